"""Unrolled local steps: the simulation is the client's own arithmetic, and the attack wins where one step fails."""

import pytest
import torch
from torch import nn

from gradveil.attacks.fedavg import FedAvg, unrolled
from gradveil.attacks.idlg import IDLG
from gradveil.defenses.nothing import NoDefense
from gradveil.errors import AttackError
from gradveil.federated.client import local_update
from gradveil.types import Batch, Observation, Update


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(model: nn.Module, batch: Batch, lr: float, epochs: int, size: int) -> Observation:
    order = [Batch(x, y) for x, y in zip(batch.inputs.split(size), batch.labels.split(size), strict=True)]
    update = local_update(model, order, NoDefense(), lr, seeded(), epochs)
    update = Update(update.gradient, len(batch), update.num_steps, lr, None if size >= len(batch) else size)
    return Observation(model, update, (1, 8, 8), 5, labels=batch.labels)


@pytest.mark.parametrize(("epochs", "size"), [(1, 3), (3, 3), (2, 2)])
def test_the_unrolled_steps_are_the_clients_own(model: nn.Module, batch: Batch, epochs: int, size: int) -> None:
    model = model.double()
    private = Batch(batch.inputs.double(), batch.labels)
    seen = observe(model, private, 0.5, epochs, size)
    y = torch.nn.functional.one_hot(private.labels, 5).double()
    found = unrolled([seen]).trial(private.inputs[None], y[None])
    for name, value in found.items():
        torch.testing.assert_close(value[0] * seen.update.num_steps, seen.update.gradient[name])


def test_several_steps_are_undone_where_a_one_step_attack_fails(model: nn.Module, batch: Batch) -> None:
    model = model.double()
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    seen = observe(model, one, 2.0, 8, 1)
    found = FedAvg(steps=60, restarts=2, tol=1e-10).reconstruct(seen, seeded())
    naive = IDLG(steps=60, restarts=2).reconstruct(seen, seeded())
    error, control = ((f.inputs - one.inputs).square().mean() for f in (found, naive))
    assert error < 1e-4
    assert control > 10 * error
    assert found.converged


def test_observations_with_other_plans_are_solved_side_by_side(model: nn.Module, batch: Batch) -> None:
    model = model.double()
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    both = [observe(model, one, 0.5, 2, 1), observe(model, one, 0.5, 3, 1)]
    found = FedAvg(steps=40, restarts=2).reconstruct_many(both, [seeded(1), seeded(2)])
    assert all((f.inputs - one.inputs).square().mean() < 1e-3 for f in found)


def test_steps_that_do_not_fit_are_refused(model: nn.Module, batch: Batch) -> None:
    seen = observe(model, batch, 0.5, 2, 2)
    wrong = Observation(model, Update(seen.update.gradient, 3, 3, 0.5, 2), (1, 8, 8), 5, labels=batch.labels)
    with pytest.raises(AttackError, match="3 local steps do not fit 3 examples in batches of 2"):
        FedAvg().reconstruct(wrong, seeded())
