import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import nn

from gradveil.attacks.base import Malicious, build
from gradveil.integrations.flower.mods import ACCEPTED, weights_guard
from gradveil.types import Batch
from integrations.flower_parts import client_app, context, message, train_plainly, weights

PUBLIC = Batch(torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 5)


def planted(spec: str, model: nn.Module) -> nn.Module:
    attack = build(spec)
    assert isinstance(attack, Malicious)
    return attack.plant(model, (1, 8, 8), 5, PUBLIC, torch.Generator().manual_seed(0))


class Client:
    """A user's client behind the guard, and how often its train function was called."""

    def __init__(self, guard: weights_guard, batch: Batch) -> None:
        self.calls, self.state, self.batch = 0, context(), batch
        self.guard = guard

    def answer(self, sent: nn.Module, message_of: Message | None = None) -> Message:
        def train(model: nn.Module, batch: Batch) -> None:
            self.calls += 1
            train_plainly(model, batch)

        app = client_app(lambda: sent, self.batch, [self.guard], train)
        return app(message_of or message(sent), self.state)


def test_honest_rounds_pass_and_the_last_accepted_weights_are_kept(model: nn.Module, batch: Batch) -> None:
    client = Client(weights_guard(lambda: model, examples=lambda context: batch), batch)
    for _ in range(3):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        out = client.answer(model)
        assert not out.has_error()
        kept = client.state.state[ACCEPTED].to_torch_state_dict()
        assert all(torch.equal(value, before[name]) for name, value in kept.items())
        model.load_state_dict(weights(out))
    assert client.calls == 3


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        ("fishing", False, "one class alone"),
        ("imprint:rows=64", False, "measure the same with different thresholds"),
        ("imprint:rows=64", True, "is new: there is no such tensor in the model that is expected"),
    ],
)
def test_planted_weights_are_refused_before_the_train_function_is_called(
    model: nn.Module, batch: Batch, spec: str, given: bool, words: str
) -> None:
    client = Client(weights_guard((lambda: model) if given else None), batch)
    out = client.answer(planted(spec, model))
    assert out.has_error()
    assert out.error.reason.startswith("Update withheld: the weights look planted. ")
    assert words in out.error.reason
    assert client.calls == 0
    assert ACCEPTED not in client.state.state


def test_what_weights_do_to_a_clients_own_examples_is_not_told(model: nn.Module, batch: Batch) -> None:
    client = Client(weights_guard(lambda: model, examples=lambda context: batch), batch)
    out = client.answer(planted("fishing", model))
    assert out.error.reason == "Update withheld: the weights look planted. The node's own log says why."


def test_weights_that_were_replaced_since_the_last_round_are_refused(model: nn.Module, batch: Batch) -> None:
    client = Client(weights_guard(), batch)
    assert not client.answer(model).has_error()
    with torch.no_grad():
        nn.init.uniform_(model[5].weight, -0.1, 0.1, generator=torch.Generator().manual_seed(5))
    out = client.answer(model)
    assert "it was replaced, not trained" in out.error.reason
    assert client.calls == 1


def test_numbered_weights_need_the_model(model: nn.Module, batch: Batch) -> None:
    numbered = message(model)
    arrays = [Array(value.numpy()) for value in model.state_dict().values()]
    numbered.content["arrays"] = ArrayRecord({str(i): array for i, array in enumerate(arrays)})

    def train(sent: Message, state: Context) -> Message:
        return Message(sent.content, reply_to=sent)

    assert "Give the model" in weights_guard()(numbered, context(), train).error.reason
    assert not weights_guard(lambda: model)(numbered, context(), train).has_error()


def test_a_request_to_evaluate_passes(model: nn.Module, batch: Batch) -> None:
    out = Client(weights_guard(), batch).answer(model, message(planted("fishing", model), kind="evaluate"))
    assert out.content["metrics"]["num-examples"] == len(batch)
