"""Every attack with every loss: the example comes back, or one line says why not."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.attacks.base import build
from gradveil.attacks.labels import label_signal, recover_labels
from gradveil.errors import AttackError
from gradveil.federated.client import local_update, step_gradient
from gradveil.losses import build as build_loss
from gradveil.modalities.base import label_accuracy, pair
from gradveil.protection.defense import build as build_defense
from gradveil.threats.meter import leak_meter
from gradveil.types import Batch, Observation, Reconstruction, Update


def huber(output: Tensor, target: Tensor) -> Tensor:
    """A user's loss of numbers, in operations that can be differentiated forwards as well."""
    away = (output.reshape(target.shape) - target).abs()
    return torch.where(away < 1, away.square() / 2, away - 0.5).mean()


@dataclass(frozen=True)
class Case:
    loss: Any
    outputs: int
    labels: Tensor
    read: bool = False  # whether the labels can be read off the update


CASES = {
    "cross_entropy": Case("cross_entropy", 4, torch.tensor([2]), True),
    "smoothing": Case("cross_entropy:smoothing=0.1", 4, torch.tensor([2]), True),
    "weights": Case("cross_entropy:weights=1/2/3/4,smoothing=0.2", 4, torch.tensor([1]), True),
    "several labels": Case("bce", 4, torch.tensor([[1, 0, 1, 1]]), True),
    "one label": Case("bce", 1, torch.tensor([1]), True),
    "one number": Case("mse", 1, torch.tensor([0.7])),
    "numbers": Case("mse", 3, torch.tensor([[0.7, -1.0, 300.0]])),
    "own, classes": Case(F.cross_entropy, 4, torch.tensor([2])),
    "own, numbers": Case(huber, 1, torch.tensor([0.3])),
}


def mlp(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, outputs))


def inputs(count: int = 1) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=Generator().manual_seed(3))


def seen(case: Case, labels: bool = False) -> Observation:
    model, loss = mlp(case.outputs), build_loss(case.loss).of(case.labels)
    batch = Batch(inputs(len(case.labels)), case.labels)
    update = Update(step_gradient(model, batch, build_defense("none"), Generator(), loss=loss), len(case.labels))
    return Observation(model, update, (1, 4, 4), case.outputs, case.labels if labels else None, loss=loss)


def attacked(spec: str, given: Observation) -> Reconstruction:
    return build(spec).reconstruct(given, Generator().manual_seed(1))


def right(found: Reconstruction, case: Case, below: float) -> bool:
    truth = inputs(len(case.labels))
    return float((found.inputs[pair(found.inputs, truth)] - truth).square().mean()) < below


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["dlg:steps=30", "newton", "analytic", "fedavg:optimiser=lbfgs,restarts=4"])
def test_targets_that_the_server_does_not_know_are_unknowns(spec: str, name: str) -> None:
    case = CASES[name]
    found = attacked(spec, seen(case))
    assert found.converged
    assert right(found, case, 1e-7)
    if found.labels is None:
        assert name == "own, numbers"
        assert spec in ("newton", "analytic")  # a user's function does not say which number has a slope
    else:
        assert bool(label_accuracy(found.labels, case.labels).all())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["dlg:steps=30", "newton"])
def test_with_known_targets_they_find_the_example(spec: str, name: str) -> None:
    case = CASES[name]
    found = attacked(spec, seen(case, labels=True))
    assert found.converged
    assert right(found, case, 1e-10)


@pytest.mark.parametrize("name", ["several labels", "numbers"])
def test_a_search_over_images_searches_targets_too(name: str) -> None:
    case = CASES[name]
    found = attacked("gs:steps=150,tv=1e-4", seen(case))
    assert right(found, case, 1e-2)
    assert found.labels is not None
    assert bool(label_accuracy(found.labels, case.labels).all())


@pytest.mark.parametrize("name", ["one label", "numbers"])
@pytest.mark.parametrize("spec", ["surrogate:steps=150", "fedavg:steps=150"])
def test_directions_of_several_steps(spec: str, name: str) -> None:
    case = CASES[name]
    one = seen(case)
    batch = Batch(inputs(), case.labels)
    sent = local_update(one.model, [batch], "none", 0.01, Generator(), epochs=2, batch_size=None, loss=case.loss)
    found = attacked(spec, replace(one, update=sent))
    assert right(found, case, 0.05)
    assert (found.labels is None) == (name == "numbers")  # which a direction does not tell


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["idlg:steps=30"])
def test_those_that_need_labels_read_them_or_refuse(spec: str, name: str) -> None:
    case = CASES[name]
    if case.read:
        assert right(attacked(spec, seen(case)), case, 1e-7)
        return
    with pytest.raises(AttackError, match="cannot be read off this update with the loss"):
        attacked(spec, seen(case))


TWO = {
    "smoothing": replace(CASES["smoothing"], labels=torch.tensor([0, 2])),
    "weights": replace(CASES["weights"], labels=torch.tensor([1, 3])),
    "several labels": replace(CASES["several labels"], labels=torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])),
    "one label": replace(CASES["one label"], labels=torch.tensor([0, 1])),
    "numbers": replace(CASES["numbers"], labels=torch.tensor([[0.7, -1.0, 2.0], [1.0, 0.0, -1.0]])),
}


@pytest.mark.parametrize("name", ["several labels", "numbers"])
def test_two_examples_of_one_step(name: str) -> None:
    case = TWO[name]
    found = attacked("dlg:steps=100,tol=1e-11", seen(case))
    assert bool(label_accuracy(found.labels, case.labels).all())  # type: ignore[arg-type]
    assert right(found, case, 1e-3)


@pytest.mark.parametrize("name", TWO)
def test_two_examples_of_two_steps_are_unrolled_with_their_loss(name: str) -> None:
    case = TWO[name]
    one = seen(case)
    batch = Batch(inputs(2), case.labels)
    sent = local_update(one.model, [batch], "none", 0.1, Generator(), epochs=2, batch_size=None, loss=case.loss)
    given = replace(one, update=sent, labels=case.labels)
    for spec in ("newton", "fedavg:optimiser=lbfgs"):
        found = attacked(spec, given)
        assert found.converged
        assert right(found, case, 1e-4)
    unknown = replace(given, labels=None)
    if name == "numbers":
        assert right(attacked("newton", unknown), case, 1e-2)
    if name == "several labels":
        with pytest.raises(AttackError, match="cannot be read"):
            attacked("newton", unknown)


@pytest.mark.parametrize("loss", ["cross_entropy:smoothing=0.3", "cross_entropy:weights=1/2/5,smoothing=0.3"])
@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_smoothed_label_is_read_where_it_shows_and_else_left_open(loss: str, label: int) -> None:
    """Beyond the smoothing, a sure prediction gives the same signs as a wrong label: argmin δ would be wrong."""
    case = Case(loss, 3, torch.tensor([label]))
    unsure = seen(case)
    assert recover_labels(unsure, Generator()).tolist() == [label]  # type: ignore[union-attr]
    with torch.no_grad():
        unsure.model[3].bias[label] += 20.0  # type: ignore[index, operator]
    given = seen_again(unsure, case)
    signal = label_signal(given, Generator())
    assert signal is not None
    assert int(signal.argmin()) != label
    read = recover_labels(given, Generator())
    assert read is None or (
        "weights" in loss and read.tolist() == [label]
    )  # by its weight a label may show all the same
    found = attacked("newton", given)
    assert found.labels is not None
    assert found.labels.tolist() == [label]


def seen_again(given: Observation, case: Case) -> Observation:
    """Return the update of the same example at the weights that the model has now."""
    gradient = step_gradient(
        given.model, Batch(inputs(), case.labels), build_defense("none"), Generator(), loss=given.loss
    )
    return replace(given, update=Update(gradient))


@pytest.mark.parametrize("loss", ["cross_entropy:weights=1/2/5", "cross_entropy:smoothing=0.1,weights=3/1/1"])
def test_counts_of_weighted_classes(loss: str) -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
    given = seen(Case(loss, 3, labels))
    assert torch.equal(recover_labels(given, Generator().manual_seed(0)), labels)  # type: ignore[arg-type]


def test_counts_of_a_single_label() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1])
    assert torch.equal(recover_labels(seen(Case("bce", 1, labels)), Generator().manual_seed(0)), labels)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_the_meter_reads_every_loss(name: str) -> None:
    """One example of this network is determined by its gradient, whatever the loss."""
    case = CASES[name]
    leak = leak_meter(seen(case, labels=True), Batch(inputs(), case.labels))
    assert leak.rank == 16
    assert leak.mse < 1e-3 * leak.prior_mse


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["representation:share=0.4", "pruning:share=0.5", "gaussian:scale=0.01"])
def test_defences_take_any_loss(spec: str, name: str) -> None:
    case = CASES[name]
    loss, model = build_loss(case.loss).of(case.labels), mlp(case.outputs)
    defense, batch = build_defense(spec), Batch(inputs(), case.labels)
    plain = step_gradient(model, batch, build_defense("none"), Generator(), loss=loss)
    found = step_gradient(model, batch, defense, Generator().manual_seed(0), loss=loss)
    assert any(not torch.equal(found[n], plain[n]) for n in plain)
    assert all(bool(g.isfinite().all()) for g in found.values())
