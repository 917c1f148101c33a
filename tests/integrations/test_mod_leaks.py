import pytest

pytest.importorskip("flwr")

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.federated.client import step_gradient
from gradveil.integrations.flower.checks import checked
from gradveil.integrations.flower.mods import guard_mod, leak_guard
from gradveil.losses import build as build_loss
from gradveil.protection.defense import build
from gradveil.threats.one_update import TrainingPass, match
from gradveil.types import Batch, Observation, Reconstruction, Update
from integrations.flower_parts import (
    LR,
    Nodes,
    ReadOff,
    client_app,
    context,
    linear_model,
    message,
    train_plainly,
    weights,
)

NOISE = "gaussian:scale=1,on=update"


@pytest.fixture(autouse=True)
def simulated(accounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mods with a seed are for sites that ask for it."""
    monkeypatch.setenv("GRADVEIL_NOISE", "simulated")


@pytest.fixture
def one(batch: Batch) -> Batch:
    return Batch(batch.inputs[:1], batch.labels[:1])


def test_an_update_that_gives_its_image_away_is_withheld(one: Batch) -> None:
    model = linear_model()
    out = client_app(lambda: model, one, [leak_guard(ReadOff())])(message(model), context())
    assert out.has_error()
    assert "rebuilt a training example at" in out.error.reason
    assert float(out.error.reason.split(" at ")[1].split(" dB")[0]) > 60


def test_an_update_that_hides_it_is_sent_with_its_score(one: Batch) -> None:
    model = linear_model()
    app = client_app(lambda: model, one, [leak_guard(ReadOff(), seed=1), guard_mod(NOISE, seed=2)])
    sent = app(message(model), context())
    metrics = sent.content["metrics"]
    assert 0 < metrics["leak-psnr"] < 20
    assert metrics["leak-floor"] == pytest.approx(float(-10 * (one.inputs - 0.5).square().mean().log10()), abs=1e-3)


def test_the_guard_looks_at_what_leaves_and_not_at_what_was_trained(one: Batch) -> None:
    model = linear_model()
    outside = client_app(lambda: model, one, [leak_guard(ReadOff()), guard_mod(NOISE, seed=2)])
    inside = client_app(lambda: model, one, [guard_mod(NOISE, seed=2), leak_guard(ReadOff())])
    assert not outside(message(model), context()).has_error()
    assert inside(message(model), context()).has_error()


def test_the_score_does_not_change_what_is_sent(one: Batch) -> None:
    first, second = linear_model(), linear_model()
    second.load_state_dict(first.state_dict())
    start = message(first)
    plainly = client_app(lambda: first, one, [])(start, context())
    guarded = client_app(lambda: second, one, [leak_guard(ReadOff(), max_psnr=1000)])(start, context())
    for name, value in weights(plainly).items():
        assert torch.equal(weights(guarded)[name], value)


def test_several_steps_on_the_same_image_are_one_example(one: Batch) -> None:
    model = linear_model()
    app = client_app(
        lambda: model, one, [leak_guard(ReadOff(), max_psnr=1000, max_examples=1)], lambda m, b: train_plainly(m, b, 3)
    )
    assert app(message(model), context()).content["metrics"]["leak-psnr"] > 20


@pytest.fixture
def many() -> Batch:
    """More examples than the guard attacks at once."""
    rng = torch.Generator().manual_seed(5)
    return Batch(torch.rand(20, 1, 8, 8, generator=rng), torch.arange(20) % 5)


def two_epochs_of_batches(model: nn.Module, batch: Batch) -> None:
    for first in (0, 5, 10, 15, 0, 5, 10, 15):
        train_plainly(model, batch[first : first + 5])


@pytest.mark.parametrize("train", [train_plainly, two_epochs_of_batches])
def test_many_examples_are_checked_by_a_sample_with_the_others_known(
    many: Batch, train: Callable[[nn.Module, Batch], None]
) -> None:
    model = linear_model()
    out = client_app(lambda: model, many, [leak_guard(ReadOff(), seed=1)], train)(message(model), context())
    assert "by knowing all others; the limit is 20 dB" in out.error.reason
    assert float(out.error.reason.split(" at ")[1].split(" dB")[0]) > 35

    sent = client_app(lambda: model, many, [leak_guard(ReadOff(), max_psnr=1000, seed=1)], train)(
        message(model), context()
    )
    assert sent.content["metrics"]["leak-checked"] == 4


@pytest.mark.parametrize("lr", [None, 0.01])  # the learning rate that the guard believes in
def test_noise_and_removed_entries_count_for_a_sample_too(many: Batch, lr: float | None) -> None:
    def score(*mods: Any) -> float:
        model = linear_model()
        guard = leak_guard(ReadOff(), max_psnr=1000, defense="none", lr=lr, seed=1)
        return float(
            client_app(lambda: model, many, [guard, *mods])(message(model), context()).content["metrics"]["leak-psnr"]
        )

    assert score() > 60
    assert score(guard_mod(NOISE, seed=2)) < 20
    assert 5 < score(guard_mod("representation:share=0.5")) < 30


@pytest.mark.parametrize("spec", ["representation:share=0.4", "pruning:share=0.5"])
def test_a_server_that_knows_the_defence_and_the_others_gets_an_example(
    model: nn.Module, many: Batch, spec: str
) -> None:
    guard = leak_guard("newton:steps=30", max_psnr=1000, defense=spec, sample=1, seed=1)
    sent = client_app(lambda: model, many, [guard, guard_mod(spec, seed=2)])(message(model), context())
    assert sent.content["metrics"]["leak-psnr"] > 30


def test_a_sample_ends_with_its_time_and_has_one_example_at_least(many: Batch) -> None:
    model = linear_model()
    guard = leak_guard(ReadOff(), max_psnr=1000, sample=20, seconds=0)
    metrics = client_app(lambda: model, many, [guard])(message(model), context()).content["metrics"]
    assert metrics["leak-checked"] == 1
    assert metrics["leak-psnr"] > 60


def unseen_loss(model: nn.Module, batch: Batch) -> None:
    """Trains by gradients that do not come from the model's outputs."""
    model(batch.inputs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


def with_momentum(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    optimizer.step()


def test_a_small_client_is_attacked_by_the_rule_of_its_own_steps(one: Batch) -> None:
    def decaying(model: nn.Module, batch: Batch) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.5)
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()

    guard = leak_guard("analytic", max_psnr=1000, lr=LR)
    model = linear_model()
    sent = client_app(lambda: model, one, [guard], decaying)(message(model), context())
    assert dict(sent.content["metrics"])["leak-psnr"] > 40


def test_a_client_whose_steps_follow_no_known_rule_is_withheld(one: Batch) -> None:
    def train(model: nn.Module, batch: Batch) -> None:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=LR)
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()

    model = linear_model()
    reply = client_app(lambda: model, one, [leak_guard("analytic")], train)(message(model), context())
    assert "trains with RMSprop" in reply.error.reason


@pytest.mark.parametrize(
    ("train", "why"),
    [(unseen_loss, "No backward pass"), (with_momentum, "sgd, momentum 0.9, whose update is no sum")],
)
def test_what_cannot_be_checked_is_withheld_or_sent_without_a_score(
    many: Batch, train: Callable[[nn.Module, Batch], None], why: str
) -> None:
    model = linear_model()
    strict = client_app(lambda: model, many, [leak_guard(ReadOff())], train)(message(model), context())
    assert "no example could be checked: " in strict.error.reason
    assert why in strict.error.reason
    free = leak_guard(ReadOff(), send_unchecked=True)
    sent = client_app(lambda: model, many, [free], train)(message(model), context())
    assert dict(sent.content["metrics"]) == {"num-examples": 20, "leak-checked": 0}


def test_the_average_counts_only_clients_that_measured(one: Batch, many: Batch) -> None:
    guard = leak_guard(ReadOff(), max_psnr=1000, send_unchecked=True, seed=1)
    apps = [
        client_app(linear_model, one, [guard]),
        client_app(linear_model, many[:10], [guard]),
        client_app(linear_model, many, [guard], unseen_loss),
    ]
    values: dict[int, Any] = {}

    def answer(node: int, msg: Message) -> Message:
        out = apps[node - 1](msg, context())
        values[node] = dict(out.content["metrics"])
        return out

    grid = checked(Nodes({node: partial(answer, node) for node in (1, 2, 3)}))
    result = FedAvg(fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=ArrayRecord(linear_model().state_dict()), num_rounds=1,
        train_config=ConfigRecord({"lr": LR}),
    )  # fmt: skip
    found = result.train_metrics_clientapp[1]
    assert "leak-psnr" not in values[3]
    for name in ("leak-psnr", "leak-floor"):
        assert found[name] == pytest.approx((values[1][name] + 10 * values[2][name]) / 11)
    assert found["leak-checked"] == pytest.approx((1 * 1 + 10 * 10 + 20 * 0) / 31)


def test_an_attack_that_cannot_run_withholds_the_update(one: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(64, 5))
    out = client_app(lambda: model, one, [leak_guard(ReadOff())])(message(model), context())
    assert "not to be seen" in out.error.reason


def test_a_client_that_was_not_seen_to_train_sends_nothing(one: Batch) -> None:
    model = linear_model()
    out = client_app(lambda: model, one, [leak_guard(ReadOff())], lambda m, b: None)(message(model), context())
    assert "not seen in training" in out.error.reason


def test_it_works_around_the_mod_that_defends_the_steps(one: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    mods = [leak_guard(ReadOff(), max_psnr=1000, defense="none"), guard_mod("representation:share=0.5")]
    metrics = client_app(lambda: model, one, mods)(message(model), context()).content["metrics"]
    assert metrics["defended-steps"] == 1
    assert metrics["leak-psnr"] < 30  # half of the pixels are gone
    assert not model._forward_pre_hooks


def test_noise_in_other_bounds_is_measured_in_those_bounds(one: Batch) -> None:
    model = linear_model()
    wide = Batch(2 * one.inputs - 1, one.labels)
    guard = leak_guard(ReadOff(), bounds=(-1.0, 1.0), max_psnr=1000)
    assert client_app(lambda: model, wide, [guard])(message(model), context()).content["metrics"]["leak-psnr"] > 60


def test_public_data_raise_the_floor_and_help_the_attack(model: nn.Module, one: Batch) -> None:
    near = one.inputs + 0.01 * torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    scores = {}
    for name, public in (("without", None), ("with", near)):
        guard = leak_guard("newton:steps=20", max_psnr=1000, defense=NOISE, public=public, seed=1)
        out = client_app(lambda: model, one, [guard, guard_mod(NOISE, seed=2)])(message(model), context())
        scores[name] = out.content["metrics"]
    assert scores["with"]["leak-floor"] > 30 > scores["without"]["leak-floor"]
    assert scores["with"]["leak-psnr"] > 30 > scores["without"]["leak-psnr"]


def test_a_registered_attack_rebuilds_a_batch_and_is_stopped(model: nn.Module, batch: Batch) -> None:
    out = client_app(lambda: model, batch, [leak_guard(max_psnr=40)])(message(model), context())
    assert "newton (plain) rebuilt a training example" in out.error.reason


def test_a_client_that_crashes_leaves_no_hook_behind(one: Batch) -> None:
    model = linear_model()

    def crash(model: nn.Module, batch: Batch) -> None:
        model(batch.inputs)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client_app(lambda: model, one, [leak_guard(ReadOff()), guard_mod("representation")], crash)(
            message(model), context()
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_a_defence_that_only_holds_against_a_server_that_does_not_know_it_is_no_excuse(
    model: nn.Module, one: Batch
) -> None:
    spec = "representation:share=0.8"
    app = client_app(lambda: model, one, [leak_guard(max_psnr=40, defense="none"), guard_mod(spec)])
    assert app(message(model), context()).content["metrics"]["leak-psnr"] < 40

    out = client_app(lambda: model, one, [leak_guard(max_psnr=40, defense=spec), guard_mod(spec)])(
        message(model), context()
    )
    assert out.has_error()
    assert "(plain)" not in out.error.reason


def regressor() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 1))


def train_regression(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    nn.functional.mse_loss(model(batch.inputs)[:, 0], batch.labels).backward()
    optimizer.step()


@pytest.mark.parametrize("count", [1, 3])
def test_a_client_with_another_loss_is_checked_by_it(batch: Batch, count: int) -> None:
    model, mine = regressor(), Batch(batch.inputs[:count], torch.tensor([3.0, -1.0, 2.0])[:count])
    guard = leak_guard("newton", loss="mse", max_examples=1, sample=1)
    out = client_app(lambda: model, mine, [guard], train_regression)(message(model), context())
    assert "newton (plain) rebuilt a training example at" in out.error.reason


def test_the_probe_and_the_others_known_follow_the_loss(batch: Batch) -> None:
    model, loss = regressor(), build_loss("mse")
    mine = Batch(batch.inputs, torch.tensor([3.0, -1.0, 2.0]))
    gradient = step_gradient(model, mine, build("none"), torch.Generator(), loss=loss)
    one = TrainingPass.of(model, model.state_dict(), mine, loss)
    for name, value in one.gradient(model, torch.ones(3)).items():
        torch.testing.assert_close(value, gradient[name])
    seen = Observation(model, Update(gradient, 3), (1, 8, 8), 1, loss=loss)
    assert match(seen, Reconstruction(mine.inputs, mine.labels, 0.0, True)) == pytest.approx(1.0)
