import copy
import threading

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.mod import fixedclipping_mod
from torch import nn

from gradveil.federated.client import step_gradient
from gradveil.integrations.flower.mods import guard_mod
from gradveil.protection.defense import build
from gradveil.protection.protect import protect
from gradveil.types import Batch
from integrations.flower_parts import (
    LR,
    client_app,
    context,
    gradient,
    linear_model,
    message,
    reply,
    train_plainly,
    weights,
)  # fmt: skip

SPEC = "representation:share=0.5"


def test_a_client_that_knows_nothing_of_it_sends_the_defended_update(
    model: nn.Module, batch: Batch, rng: torch.Generator
) -> None:
    before = copy.deepcopy(model)
    expected = step_gradient(copy.deepcopy(model), batch, build(SPEC), rng)

    out = client_app(lambda: model, batch, [guard_mod(SPEC)])(message(model), context())

    for name, value in weights(out).items():
        torch.testing.assert_close(value, before.state_dict()[name] - LR * expected[name])
    assert not torch.allclose(expected["5.weight"], gradient(before, batch)["5.weight"])
    assert out.content["metrics"]["defended-steps"] == 1


def test_every_step_is_counted_from_the_first_on(model: nn.Module, batch: Batch) -> None:
    app = client_app(lambda: model, batch, [guard_mod(SPEC)], lambda m, b: train_plainly(m, b, steps=3))
    assert app(message(model), context()).content["metrics"]["defended-steps"] == 3


def test_the_same_update_as_with_the_guard_in_the_training_code(model: nn.Module, batch: Batch) -> None:
    inside = copy.deepcopy(model)
    with protect(inside, SPEC):
        train_plainly(inside, batch, steps=2)

    app = client_app(lambda: model, batch, [guard_mod(SPEC)], lambda m, b: train_plainly(m, b, steps=2))
    out = app(message(model), context())

    for name, value in weights(out).items():
        assert torch.equal(value, inside.state_dict()[name])


def bypassing(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    nn.functional.cross_entropy(model.forward(batch.inputs), batch.labels).backward()
    optimizer.step()


def another_thread(model: nn.Module, batch: Batch) -> None:
    thread = threading.Thread(target=train_plainly, args=(model, batch))
    thread.start()
    thread.join()


def half_bypassing(model: nn.Module, batch: Batch) -> None:
    train_plainly(model, batch)
    bypassing(model, batch)


def then_by_hand(model: nn.Module, batch: Batch) -> None:
    train_plainly(model, batch)
    for name, g in gradient(model.eval(), batch).items():
        model.get_parameter(name).data -= LR * g


def only_looking(model: nn.Module, batch: Batch) -> None:
    model.eval()(batch.inputs)


NOISE = "gaussian:scale=0.1"


@pytest.mark.parametrize(
    ("spec", "train"),
    [(SPEC, bypassing), (SPEC, half_bypassing), (SPEC.replace("0.5", "0"), train_plainly)]
    + [(spec, train) for spec in (SPEC, NOISE) for train in (another_thread, only_looking, then_by_hand)],
)
def test_an_update_that_went_past_the_defence_is_withheld(  # type: ignore[no-untyped-def]
    model: nn.Module, batch: Batch, spec: str, train
) -> None:
    out = client_app(lambda: model, batch, [guard_mod(spec)], train)(message(model), context())
    assert out.has_error()
    assert "Update withheld" in out.error.reason


def test_the_model_is_left_without_hooks_and_torch_as_it_was(model: nn.Module, batch: Batch) -> None:
    for train in (train_plainly, bypassing):
        client_app(lambda: model, batch, [guard_mod(SPEC)], train)(message(model), context())
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_called_with_keywords_is_found_in_time(batch: Batch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 5)

        def forward(self, images: torch.Tensor, scale: float) -> torch.Tensor:
            out: torch.Tensor = self.fc(scale * images.flatten(1))
            return out

    def train(model: nn.Module, batch: Batch) -> None:
        loss = nn.functional.cross_entropy(model(images=batch.inputs, scale=2.0), batch.labels)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=LR).step()

    net = Net()
    out = client_app(lambda: net, batch, [guard_mod(SPEC)], train)(message(net), context())
    assert out.content["metrics"]["defended-steps"] == 1


def test_a_defence_of_steps_and_update_does_both(model: nn.Module, batch: Batch) -> None:
    before = copy.deepcopy(model.state_dict())
    out = client_app(lambda: model, batch, [guard_mod(f"{SPEC}+pruning:share=0.9,on=update")])(
        message(model), context()
    )
    change = torch.cat([(weights(out)[n] - before[n]).flatten() for n in before])
    assert out.content["metrics"]["defended-steps"] == 1
    assert (change == 0).float().mean() > 0.85


def test_mods_of_flower_run_around_it(model: nn.Module, batch: Batch) -> None:
    before = copy.deepcopy(model.state_dict())
    app = client_app(lambda: model, batch, [fixedclipping_mod, guard_mod(SPEC)])
    out = app(message(model, clipping_norm=1e-3), context())
    assert not out.has_error()
    norm = torch.cat([(weights(out)[n] - before[n]).flatten() for n in before]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)
    assert out.content["metrics"]["defended-steps"] == 1


def test_no_defence_passes_and_says_that_no_step_was_defended(model: nn.Module, batch: Batch) -> None:
    out = client_app(lambda: model, batch, [guard_mod("none")])(message(model), context())
    assert out.content["metrics"]["defended-steps"] == 0


def numbered(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(i): value for i, value in enumerate(state.values())}


def test_clients_of_the_older_interface_number_their_arrays_and_are_found(model: nn.Module, batch: Batch) -> None:
    inside = copy.deepcopy(model)
    with protect(inside, SPEC):
        train_plainly(inside, batch)
    start = message(model)
    start.content["arrays"] = ArrayRecord(numbered(model.state_dict()))

    def train(msg: Message, ctx: Context) -> Message:
        train_plainly(model, batch)
        return reply(msg, numbered(model.state_dict()))

    out = guard_mod(f"{SPEC}+gaussian:scale=1e-7,on=update")(start, context(), train)

    assert out.content["metrics"]["defended-steps"] == 1
    for name, value in numbered(inside.state_dict()).items():
        torch.testing.assert_close(weights(out)[name], value)


def test_a_model_of_other_shapes_is_not_taken_for_the_one_that_was_sent(model: nn.Module, batch: Batch) -> None:
    start = message(model)
    start.content["arrays"] = ArrayRecord({str(i): torch.zeros(2) for i in range(len(model.state_dict()))})
    out = guard_mod(SPEC)(start, context(), lambda msg, ctx: (train_plainly(model, batch), reply(msg, {}))[1])
    assert "no module was called" in out.error.reason


def test_a_model_that_is_called_while_it_is_built_is_found(batch: Batch) -> None:
    """A builder may run the parts that are there on an example, to learn how wide the last layer is."""

    def build() -> nn.Module:
        made = nn.Sequential(nn.Flatten())
        made(batch.inputs[:1])
        return made.append(nn.Linear(64, 5))

    out = client_app(build, batch, [guard_mod("gaussian:scale=0.1")])(message(linear_model()), context())
    assert not out.has_error(), out.error.reason
    assert out.content["metrics"]["defended-steps"] == 1
