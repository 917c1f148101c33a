"""A site's defence is put on what leaves its SuperNode, in a process that no submitted app runs in."""

from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode import start_client_internal as node

from gradveil.integrations.flower.site import STATEMENT, name_of, settings_of
from gradveil.integrations.flower.supernode import Outlet
from gradveil.protection.defense import build
from integrations.flower_parts import linear_model, message, reply, weights

PRUNING = "pruning:share=0.9,on=update"


def store_of(store: InMemoryObjectStore, whole: Message) -> tuple[Message, Any]:
    """Put a message into a store as Flower does, and return it without content, and its tree."""
    whole.metadata.__dict__["_message_id"] = whole.object_id
    tree = get_object_tree(whole)
    store.preregister(1, tree)
    for name, one in get_all_nested_objects(whole).items():
        store.put(name, one.deflate())
    return remove_content_from_message(whole), tree


class State:
    def __init__(self, replies: list[Message]) -> None:
        self.replies = replies

    def get_messages_legacy(self, is_reply: bool) -> list[Message]:
        return self.replies

    def get_message_processing_duration(self, message_id: str) -> float:
        return 1.0

    def delete_messages(self, message_ids: list[str]) -> None: ...


def through(site: dict[str, Any], asked: Message, answer: Message | None) -> list[Message]:
    """Return what arrives at the server when a SuperNode of this site is asked, and its app answers."""
    store: Any = InMemoryObjectStore()
    outlet, arrived = Outlet(), []
    bare, tree = store_of(store, asked)

    def pull(*, receive: Any, confirm_message_received: Any, **_: Any) -> int:
        receive()
        confirm_message_received(1, bare.metadata.message_id)
        return 1

    outlet._pulling(pull)(
        receive=lambda: (bare, tree), confirm_message_received=lambda *_: None, object_store=store, node_config=site
    )
    if answer is None:
        return []
    answer.metadata.__dict__["_reply_to_message_id"] = bare.metadata.message_id
    sent, _ = store_of(store, answer)
    pushed: dict[str, bytes] = {}
    heads: list[Message] = []

    def send(out: Message, of: Any, seconds: float) -> tuple[set[str], str]:
        heads.append(out)
        return set(get_all_nested_objects(out)), "session"

    outlet._pushing(node._push_messages)(
        state=State([sent]), object_store=store, send=send,
        push_object=lambda run, session, name, content: pushed.update({name: content}),
    )  # fmt: skip
    for head in heads:
        arrived.append(inflate_object_from_contents(head.object_id, dict(pushed)))
    return arrived


def moved(asked: Message, by: float = 1.0) -> Message:
    ones = {
        name: value + by * torch.linspace(0.1, 1, value.numel()).view_as(value)
        for name, value in weights(asked).items()
    }
    return reply(asked, ones, 3)


def test_an_app_that_defends_nothing_is_defended_all_the_same() -> None:
    asked = message(linear_model())
    (out,) = through({"defense": PRUNING}, asked, moved(asked))
    change = torch.cat([(weights(out)[n] - w).flatten() for n, w in weights(asked).items()])
    assert 0.88 < float((change == 0).float().mean()) < 0.92
    assert out.content[STATEMENT]["defense"] == name_of(build(PRUNING))
    (plain,) = through({"defense": "none+pruning:share=0,on=update"}, asked, moved(asked)) or [None]
    assert plain is not None
    assert plain.has_error()  # it changes nothing


@pytest.mark.parametrize("site", [{}, {"defense": "no such thing"}])
def test_without_a_defence_nothing_leaves(site: dict[str, Any]) -> None:
    asked = message(linear_model())
    (out,) = through(site, asked, moved(asked))
    assert out.has_error()


def test_a_defence_of_the_steps_must_be_stated_and_nothing_else_leaves() -> None:
    veil = "veil:z=2,clip=1"
    asked = message(linear_model())
    (silent,) = through({"defense": veil}, asked, moved(asked))
    assert "does not say what was done" in silent.error.reason
    said = moved(asked)
    said.content[STATEMENT] = ConfigRecord(
        {
            "defense": veil,
            "settings": settings_of(build(veil)),
            "from-site": True,
            "steps": 1,
            "examples": 3,
            "noise": "secret",
        }
    )
    said.content["metrics"]["loss"] = 0.3
    said.content["more"] = MetricRecord({"pixel": 0.49})
    said.content["words"] = ConfigRecord({"pixel": "0.49"})
    (out,) = through({"defense": veil}, asked, said)
    assert {*out.content} == {"arrays", "metrics", "more", STATEMENT}
    assert {*out.content["metrics"], *out.content["more"]} == {"num-examples"}
    (failed,) = through({"defense": veil}, asked, Message(Error(1, "the first pixel is 0.49"), reply_to=asked))
    assert "0.49" not in failed.error.reason
    other = message(linear_model(), kind="evaluate")
    (evaluated,) = through(
        {"defense": veil}, other, Message(RecordDict({"m": MetricRecord({"loss": 1.0})}), reply_to=other)
    )
    assert evaluated.has_error()


def test_a_reply_that_answers_nothing_is_not_sent() -> None:
    asked = message(linear_model())
    outlet = Outlet()
    outlet.config = {"defense": PRUNING}
    with pytest.raises(Exception, match="no message of this node"):
        outlet.answer(moved(asked), None, None)


def test_it_fits_the_flower_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = node._push_messages
    monkeypatch.setattr(node, "_push_messages", before)
    monkeypatch.setattr(node, "_pull_and_store_message", node._pull_and_store_message)
    Outlet().install()
    assert node._push_messages is not before
    monkeypatch.delattr(node, "_push_messages")
    with pytest.raises(Exception, match="version of Flower"):
        Outlet().install()
