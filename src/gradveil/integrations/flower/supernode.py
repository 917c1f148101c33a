"""SuperNode that enforces a site's defence outside the submitted app.

``python -P -m gradveil.integrations.flower.supernode`` takes the arguments of ``flower-supernode`` and runs it. Apps
run in processes of their own; their replies pass through this one, where ``--node-config "defense='...'"`` is applied
whatever the app did: a defence of the update is computed here, on what leaves. One that acts inside the local steps
cannot be: a reply must state it, in the app's word, and under a defence of records everything but weights, public
counts and the statement is left out. What cannot be read, or does not fit what was asked, does not leave.
"""

import time
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode import start_client_internal as node

from gradveil.errors import DefenseError, GradveilError
from gradveil.integrations.flower.mods import FAILED, PUBLIC, defend_update, other_kind
from gradveil.integrations.flower.records import LOG, arrays_of, is_training, withhold
from gradveil.integrations.flower.site import STATEMENT, check_statement, is_simulation
from gradveil.protection.defense import build
from gradveil.protection.protect import refuse_idle

PATIENCE = 600.0  # seconds that an app has to hand in what it has announced


class Outlet:
    """Holds every reply against what was asked and against the site's defence, on its way to the SuperLink."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}  # the site's
        self._asked: dict[str, Message] = {}  # by id, until they are answered

    def install(self) -> None:
        """Put this between the apps of this process's SuperNode and its connection."""
        if not all(hasattr(node, name) for name in ("_pull_and_store_message", "_push_messages")):
            raise DefenseError("This version of Flower sends replies in a way that is not known here. Use flwr 1.41.")
        node._pull_and_store_message = self._pulling(node._pull_and_store_message)
        node._push_messages = self._pushing(node._push_messages)

    def _pulling(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        def pulling(*, receive: Any, confirm_message_received: Any, object_store: Any, **others: Any) -> Any:
            self.config = dict(others["node_config"])
            trees: dict[str, Any] = {}

            def receiving() -> Any:
                if (found := receive()) is not None:
                    trees[found[0].metadata.message_id] = found[1]
                return found

            def confirming(run_id: int, message_id: str) -> None:
                self._asked[message_id] = whole(message_id, trees[message_id], object_store)
                confirm_message_received(run_id, message_id)

            return pull(receive=receiving, confirm_message_received=confirming, object_store=object_store, **others)

        return pulling

    def _pushing(self, push: Callable[..., None]) -> Callable[..., None]:
        def pushing(*, object_store: Any, send: Any, push_object: Any, **others: Any) -> None:
            def sending(message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
                out = self.answer(message, tree, object_store)
                out.metadata.__dict__["_message_id"] = out.object_id
                wanted, session = send(out, get_object_tree(out), seconds)
                inside = get_all_nested_objects(out)
                for name in wanted:
                    push_object(out.metadata.run_id, session, name, inside[name].deflate())
                return set(), session  # nothing of the app's own reply

            push(object_store=object_store, send=sending, push_object=push_object, **others)

        return pushing

    def answer(self, message: Message, tree: Any, store: Any) -> Message:
        """Return what may leave in place of a reply; raise where it answers nothing that was asked."""
        asked = self._asked.pop(message.metadata.reply_to_message_id, None)
        if asked is None:
            raise DefenseError("A reply to no message of this node is not sent.")
        try:
            reply = whole(message.metadata.message_id, tree, store)
            return self.passed(asked, reply)
        except GradveilError as error:
            LOG.warning("gradveil: a reply is withheld: %s", error)
            return withhold(asked, str(error))
        except Exception as error:
            LOG.warning("gradveil: a reply is withheld", exc_info=error)
            return withhold(asked, FAILED)

    def passed(self, asked: Message, reply: Message) -> Message:
        """Return a reply as the site's defence lets it leave."""
        context = Context(asked.metadata.run_id, asked.metadata.dst_node_id, self.config, RecordDict(), {})
        if "defense" not in self.config:
            raise DefenseError("this site has no defence. Give one: --node-config \"defense='...'\".")
        defense = build(str(self.config["defense"]))
        private = "records" in defense.acts_on
        if not is_training(asked):
            return other_kind(defense, asked, context, lambda *_: reply) if private else reply
        if defense.acts_on <= {"update"}:
            refuse_idle(defense)
            return defend_update(defense, asked, context, reply)
        if reply.has_error():
            raise DefenseError(FAILED)
        check_statement(defense, reply, is_simulation())
        return bare(asked, reply) if private else reply


def bare(asked: Message, reply: Message) -> Message:
    """Return a reply of the weights, the public counts and the statement, and of nothing else."""
    key, record = arrays_of(reply)
    content = RecordDict({key: record, STATEMENT: reply.content.config_records[STATEMENT]})
    for name, metrics in reply.content.metric_records.items():
        for other in [other for other in metrics if other not in PUBLIC]:
            del metrics[other]
        content[name] = metrics
    return Message(content, reply_to=asked)


def whole(name: str, tree: Any, store: Any) -> Message:
    """Return a message out of the objects that a node keeps of it, as soon as an app has handed in all of them."""
    contents: dict[str, bytes] = {}
    until = time.monotonic() + PATIENCE
    for one in iterate_object_tree(tree):
        while (content := store.get(one.object_id)) == b"" and time.monotonic() < until:
            time.sleep(0.1)
        if not content:
            raise DefenseError("parts of the reply never came.")
        contents[one.object_id] = content
    found: Message = inflate_object_from_contents(name, contents)
    return found


def main() -> None:
    """Run ``flower-supernode`` with everything that leaves held to the site's defence."""
    from flwr.supernode.cli import flower_supernode

    Outlet().install()
    flower_supernode()


if __name__ == "__main__":
    main()
