"""Losses are torch's own at certain targets, and the same function of targets as rows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.errors import LossError, SpecError
from gradveil.losses import build

Reference = Callable[[Tensor, Tensor], Tensor]


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=output.dtype)
    return nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2)(output, target)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return nn.MSELoss()(output, target.reshape(output.shape).to(output))


def binary(output: Tensor, target: Tensor) -> Tensor:
    return nn.BCEWithLogitsLoss()(output, target.reshape(output.shape).to(output))


def worst(output: Tensor, target: Tensor) -> Tensor:
    """No mean over examples."""
    return F.cross_entropy(output, target, reduction="none").max()


# spec -> torch's own, outputs of one example, targets
CASES: dict[str, tuple[object, Reference, int, str]] = {
    "cross_entropy": ("cross_entropy", F.cross_entropy, 3, "classes"),
    "weights and smoothing": ("cross_entropy:weights=1/2/0.5,smoothing=0.2", smoothed, 3, "classes"),
    "several labels": ("bce", binary, 4, "bits"),
    "one label": ("bce", binary, 1, "bits"),
    "one number": ("mse", squared, 1, "numbers"),
    "numbers": ("mse", squared, 2, "numbers"),
    "own, of classes": (smoothed, smoothed, 3, "classes"),
    "own, no mean": (worst, worst, 3, "classes"),
    "own, of labels": (binary, binary, 4, "bits"),
    "own, of numbers": (squared, squared, 2, "numbers"),
}


def drawn(kind: str, n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    output = torch.randn(n, k, generator=rng, dtype=torch.double)
    if kind == "classes":
        return output, torch.randint(k, (n,), generator=rng)
    target = torch.randn(n, k, generator=rng) if kind == "numbers" else torch.randint(2, (n, k), generator=rng)
    return output, target[:, 0] if k == 1 else target


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(list(CASES)), n=st.integers(1, 4), seed=st.integers(0, 2**30))
def test_at_certain_targets_both_forms_are_torchs_loss_and_gradient(name: str, n: int, seed: int) -> None:
    spec, reference, k, kind = CASES[name]
    output, target = drawn(kind, n, k, seed)
    loss = build(spec).of(target)  # type: ignore[arg-type]
    assert loss.targets == kind
    free = output.requires_grad_()
    rows = loss.rows(target, k).double()
    assert rows.shape == (n, k)
    expected = reference(free, target)
    (slope,) = torch.autograd.grad(expected, free)
    for value in (loss(free, target), loss.soft(free, rows)):
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, free)[0], slope)
    assert loss.total(output.detach(), target) == pytest.approx(n * float(expected.detach()))
    if loss.separable:
        torch.testing.assert_close(loss.each(output, target).mean(), expected)


@pytest.mark.parametrize("name", CASES)
def test_free_numbers_become_rows_and_targets(name: str) -> None:
    spec, _, k, kind = CASES[name]
    _, target = drawn(kind, 3, k, 5)
    loss = build(spec).of(target)  # type: ignore[arg-type]
    certain = loss.rows(target, k).float()
    free = certain if kind == "numbers" else 200 * certain - 100
    torch.testing.assert_close(loss.squash(free), certain)
    torch.testing.assert_close(loss.found(free).float(), target.float())
    assert loss.width(target, 3) == k
    assert loss.fits(torch.zeros(5, k), k)
    assert loss.fits(torch.zeros(5), 1) == (kind != "classes" or name.startswith("own"))


def test_soft_targets_of_a_users_classes_are_an_expectation() -> None:
    output, y = torch.randn(4, 3), torch.randn(4, 3).softmax(-1)
    own, known = build(F.cross_entropy), build("cross_entropy")
    torch.testing.assert_close(own.soft(output, y), known.soft(output, y))


def test_scores() -> None:
    output, target = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])
    assert (build("mse").scored_by, build("mse").score(output, target)) == ("R²", 0.5)
    assert build("bce").score(output - 1.5, torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)
    assert build("bce").score(torch.tensor([[1.0, -1.0]]), torch.tensor([[1, 1]])) == 0.5
    assert build("cross_entropy").score(torch.eye(3), torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)
    assert build(binary).of(torch.tensor([0, 1])).score(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1])) == 1.0


@pytest.mark.parametrize(
    ("spec", "output", "target", "message"),
    [
        ("cross_entropy", torch.zeros(2, 3), torch.zeros(2), "takes classes"),
        ("cross_entropy", torch.zeros(2), torch.zeros(2).long(), "one logit for each class"),
        ("cross_entropy:weights=1/2", torch.zeros(2, 3), torch.zeros(2).long(), "2 weights .* 3 classes"),
        ("bce", torch.zeros(2, 3), torch.tensor([0, 4]), "0 and 1; .* from 0 to 4 of shape"),
        ("bce", torch.zeros(2, 3), torch.tensor([0, 1]), r"gives \(2, 3\) for targets \(2,\)"),
        ("mse", torch.zeros(2, 3), torch.tensor([0.0, 1.0]), r"gives \(2, 3\) for targets \(2,\)"),
        (lambda output, _: output, torch.zeros(2, 3), torch.zeros(2), r"shape \(2, 3\); it must return the mean"),
        (lambda *_: 3.0, torch.zeros(2, 3), torch.zeros(2), "returned a float"),
        (lambda *_: [][0], torch.zeros(2, 3), torch.zeros(2), "error is its own: .*test_losses.py.*IndexError"),
    ],
)
def test_what_does_not_fit_is_said(spec: object, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(LossError, match=message):
        build(spec).of(target)(output, target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec", ["hinge", "cross_entropy:smoothing=1", "cross_entropy:weights=-1/2", "no_such_module:loss"]
)
def test_wrong_specs_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        build(spec)
