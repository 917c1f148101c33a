"""The fewest entries that reach a target, against certifying every number of them one after the other."""

from math import inf

import pytest
import torch
from torch import Tensor, nn

from gradveil.errors import CertificateError
from gradveil.modules import representation
from gradveil.representation.certify import certify, needed_counts
from gradveil.representation.problem import Kind
from gradveil.representation.scores import leak_scores
from gradveil.representation.selection import zeroed, zeroing_order
from gradveil.types import Batch


def smallest_share(
    model: nn.Module, layer: str, x: Tensor, target: float, kind: Kind = "global", p: float = 2
) -> float | None:
    """The share that the example which needs most needs; None: none is enough."""
    r = representation(model, layer, x).flatten(1)
    needed = needed_counts(model, layer, x, r, zeroing_order(r, leak_scores(model, layer, x)), target, kind, p)
    return int(needed.counts.max()) / needed.length if needed.reachable else None


def by_trying(model: nn.Module, x: Tensor, target: float, kind: Kind, p: float) -> float | None:
    r = representation(model, "5", x).flatten(1)
    order = zeroing_order(r, leak_scores(model, "5", x))
    for count in range(1, r.shape[1] + 1):
        if (certify(model, "5", x, zeroed(r, order, count), p, kind).to_mse() >= target).all():
            return count / r.shape[1]
    return None


@pytest.mark.parametrize("p", [1, 2, inf])
@pytest.mark.parametrize("kind", ["local", "global", "box"])
def test_it_is_the_first_share_that_reaches_the_target(kind: Kind, p: float, model: nn.Module, batch: Batch) -> None:
    most = certify(model, "5", batch.inputs, torch.zeros(3, 64), p, kind).to_mse().min()
    for part in (0.1, 0.6):
        target = float(most) * part**2
        assert smallest_share(model, "5", batch.inputs, target, kind, p) == by_trying(
            model, batch.inputs, target, kind, p
        )


def test_the_darkest_image_decides_for_all() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    x = torch.tensor([[1.0] * 8, [0.5] * 8]).reshape(2, 1, 2, 4)
    # f is the identity: k zeroed pixels of 1 are an MSE of k/8, of 0.5 they are k/32.
    assert smallest_share(model, "1", x[:1], 0.12) == 1 / 8
    assert smallest_share(model, "1", x, 0.12) == 4 / 8
    assert smallest_share(model, "1", x, 0.5) is None


def test_no_share_reaches_too_much_and_none_is_needed_for_nothing(model: nn.Module, batch: Batch) -> None:
    assert smallest_share(model, "5", batch.inputs, 1e6) is None
    assert smallest_share(model, "5", batch.inputs, 0.0) == 0.0


def test_dead_entries_come_last_and_ties_by_index() -> None:
    r = torch.tensor([[0.0, 1.0, 1.0, 2.0, 0.0]])
    scores = torch.tensor([[torch.inf, 3.0, 3.0, torch.nan, 9.0]])
    assert zeroing_order(r, scores).tolist() == [[3, 1, 2, 0, 4]]
    assert zeroed(r, zeroing_order(r, scores), 2).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_kinds_without_a_share_are_refused(model: nn.Module, batch: Batch) -> None:
    for kind in ("empirical", "reach"):
        with pytest.raises(CertificateError, match=f"'{kind}' is none"):
            smallest_share(model, "5", batch.inputs, 0.1, kind)  # type: ignore[arg-type]
