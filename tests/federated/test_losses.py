"""Clients minimise the loss that they are told to, one after the other and stacked; models are scored by it."""

import copy

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.data.base import from_arrays
from gradveil.errors import GradveilError
from gradveil.federated.client import evaluate, local_update
from gradveil.federated.engines import ENGINES, Job, World
from gradveil.federated.settings import Local
from gradveil.protection.defense import build
from gradveil.types import Batch

X = np.random.default_rng(0).random((24, 6))
LABELS = {
    "cross_entropy:smoothing=0.1": np.arange(24) % 3,
    "cross_entropy:weights=1/2/0.5": np.arange(24) % 3,
    "bce": (X[:, :3] > 0.5).astype(int),
    "mse": 5 * X[:, :3],
}
TORCH = {
    "cross_entropy:smoothing=0.1": nn.CrossEntropyLoss(label_smoothing=0.1),
    "cross_entropy:weights=1/2/0.5": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
    "bce": lambda output, target: nn.BCEWithLogitsLoss()(output, target.float()),
    "mse": nn.MSELoss(),
}


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def torch_steps(model: nn.Module, batches: list[Batch], loss: object, lr: float) -> dict[str, Tensor]:
    trained = copy.deepcopy(model)
    optimiser = torch.optim.SGD(trained.parameters(), lr)
    for batch in batches:
        optimiser.zero_grad()
        loss(trained(batch.inputs), batch.labels).backward()  # type: ignore[operator]
        optimiser.step()
    return dict(trained.named_parameters())


@pytest.mark.parametrize("loss", LABELS)
def test_local_steps_are_torchs(loss: str) -> None:
    data, model = from_arrays("own", (X, LABELS[loss]), (X, LABELS[loss])), mlp()
    batches = [data.train.batch(slice(i, i + 8)) for i in (0, 8, 16)]
    update = local_update(model, batches, "none", 0.1, Generator(), loss=loss)
    after = torch_steps(model, batches, TORCH[loss], 0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p - 0.1 * update.gradient[name], after[name])
    whole = data.test.batch()
    expected = TORCH[loss](model(whole.inputs), whole.labels)  # type: ignore[operator]
    assert evaluate(model, data.test, batch_size=7, loss=loss).loss == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize("loss", LABELS)
def test_stacked_clients_minimise_it_too_or_say_why_not(loss: str) -> None:
    data, model = from_arrays("own", (X, LABELS[loss]), (X, LABELS[loss])).train, mlp().double()
    world = World(model, data, build("none"), Local(2, 4, loss=loss))
    jobs = [Job(k, part, seed=k) for k, part in enumerate((np.arange(9), np.arange(9, 24)))]
    if "weights" in loss:
        with pytest.raises(GradveilError, match="is not known to be a mean of one loss per example"):
            ENGINES.build("vectorised").start(world)
        return
    alone, stacked = (ENGINES.build(name).start(world).train(model, jobs, 0.1) for name in ("sequential", "vectorised"))
    for a, b in zip(alone, stacked, strict=True):
        for name, value in a.update.gradient.items():
            torch.testing.assert_close(value, b.update.gradient[name])


def test_a_regression_is_scored_by_r2() -> None:
    data, model = from_arrays("own", (X, LABELS["mse"]), (X, LABELS["mse"])), mlp()
    found = evaluate(model, data.test, loss="mse")
    aim, output = data.test.labels, model(data.test.batch().inputs)
    r2 = 1 - (output - aim).square().sum() / (aim - aim.mean(0)).square().sum()
    assert (found.accuracy, found.scored_by) == (pytest.approx(float(r2.detach())), "R²")
