"""The smallest share that reaches a target, against certifying every share one after the other."""

from math import inf

import pytest
import torch
from torch import Tensor, nn

from gradveil.errors import CertificateError
from gradveil.modules import representation
from gradveil.representation.certificates.certify import certify
from gradveil.representation.certificates.target import smallest_share, zeroed, zeroing_order
from gradveil.representation.scores import leak_scores
from gradveil.types import Batch


def by_trying(model: nn.Module, x: Tensor, target: float, kind: str, p: float) -> float | None:
    r = representation(model, "5", x).flatten(1)
    order = zeroing_order(r, leak_scores(model, "5", x))
    for count in range(1, r.shape[1] + 1):
        if (certify(model, "5", x, zeroed(r, order, count), p, kind).to_mse() >= target).all():
            return count / r.shape[1]
    return None


@pytest.mark.parametrize("p", [1, 2, inf])
@pytest.mark.parametrize("kind", ["local", "global", "box"])
def test_it_is_the_first_share_that_reaches_the_target(kind: str, p: float, model: nn.Module, batch: Batch) -> None:
    most = certify(model, "5", batch.inputs, torch.zeros(3, 64), p, kind).to_mse().min()
    for part in (0.1, 0.6):
        target = float(most) * part**2
        assert smallest_share(model, "5", batch.inputs, target, kind, p) == by_trying(
            model, batch.inputs, target, kind, p
        )


@pytest.mark.parametrize("seed", [7, 28])
def test_a_share_that_is_returned_reaches_the_target_for_every_example_at_once(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2)).double()
    x = torch.rand(3, 8, generator=rng, dtype=torch.float64)
    r = representation(net, "2", x)
    order = zeroing_order(r, leak_scores(net, "2", x))
    at = torch.stack([certify(net, "2", x, zeroed(r, order, k), 2, "reach").to_mse() for k in range(1, 11)])
    undone = 0
    for part in (0.25, 0.75, 0.9):
        target = part * float(at[at < inf].max())
        done = [k for k in range(1, 11) if (at[k - 1] >= target).all()]
        assert smallest_share(net, "2", x, target, "reach") == (done[0] / 10 if done else None)
        firsts = [next((k for k in range(10) if at[k, i] >= target), None) for i in range(3)]
        undone += None not in firsts and not (at[max(firsts)] >= target).all()  # type: ignore[type-var]
    assert undone  # each example has a share of its own, and the largest of these is not one for all


def test_the_darkest_image_decides_for_all() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    x = torch.tensor([[1.0] * 8, [0.5] * 8]).reshape(2, 1, 2, 4)
    # f is the identity: k zeroed pixels of 1 are an MSE of k/8, of 0.5 they are k/32.
    assert smallest_share(model, None, x[:1], 0.12) == 1 / 8
    assert smallest_share(model, None, x, 0.12) == 4 / 8
    assert smallest_share(model, None, x, 0.5) is None


def test_no_share_reaches_too_much_and_none_is_needed_for_nothing(model: nn.Module, batch: Batch) -> None:
    assert smallest_share(model, None, batch.inputs, 1e6) is None
    assert smallest_share(model, None, batch.inputs, 0.0) == 0.0


def test_a_sigmoid_needs_one_entry_to_be_unreachable(model: nn.Module, batch: Batch) -> None:
    assert smallest_share(model, None, batch.inputs, 0.5, "reach") == 1 / 64


def test_dead_entries_come_last_and_ties_by_index() -> None:
    r = torch.tensor([[0.0, 1.0, 1.0, 2.0, 0.0]])
    scores = torch.tensor([[torch.inf, 3.0, 3.0, torch.nan, 9.0]])
    assert zeroing_order(r, scores).tolist() == [[3, 1, 2, 0, 4]]
    assert zeroed(r, zeroing_order(r, scores), 2).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_kinds_without_a_share_are_refused(model: nn.Module, batch: Batch) -> None:
    with pytest.raises(CertificateError, match="'empirical' is none"):
        smallest_share(model, None, batch.inputs, 0.1, "empirical")
