"""From a wanted distance back to the defence: the fewest entries whose zeroing reaches a target."""

from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor, nn

from gradveil.errors import CertificateError
from gradveil.representation.certificates.base import ROUNDING, Kind, Problem, norm
from gradveil.representation.certificates.certify import KINDS, certify
from gradveil.representation.selection import zeroed

PROPORTIONAL = ("local", "global", "box")  # kinds whose bound is ||r - r′|| over a number that r′ does not change
SEARCHED = ("radius", "reach")  # kinds that are computed anew for every share
TARGET_KINDS = (*PROPORTIONAL, *SEARCHED)
GRID = 100  # shares that are tried for those


@dataclass(frozen=True)
class Needed:
    """How many entries of each example must go for its certificate to reach the target."""

    counts: Tensor  # (N,): L + 1 where zeroing all of r is not enough
    length: int  # L
    most: Tensor  # (N,): the mean squared error that zeroing all of r certifies

    @property
    def reachable(self) -> bool:
        """Whether some share reaches the target for every example."""
        return int(self.counts.max()) <= self.length


def needed_counts(
    model: nn.Module,
    layer: str,
    x: Tensor,  # (N, *shape)
    r: Tensor,  # (N, L)
    order: Tensor,  # (N, L): which entry of each row goes first, second, ...
    target_mse: float,
    kind: Kind = "global",
    p: float = 2,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Needed:
    """Return the fewest entries of each example, in the given order, whose certificate reaches the target."""
    if kind not in TARGET_KINDS:
        raise CertificateError(
            f"A target needs a bound that depends on the share alone; {kind!r} is none. "
            f"Use one of: {', '.join(TARGET_KINDS)}."
        )
    r, order = r.detach().cpu(), order.cpu()
    problem = Problem.make(model, layer, x, torch.zeros_like(r), p, bounds=bounds)
    whole = KINDS[kind](problem)
    if target_mse <= 0:
        counts = torch.zeros(len(r), dtype=torch.int64)
    elif kind in SEARCHED:
        counts = _by_search(problem, r, order, target_mse, kind)
    else:
        lost = whole.details.get("rounding", torch.zeros(len(r), dtype=torch.float64))
        per_unit = whole.bound / (whole.details["distance"] - lost).clamp_min(
            1e-300
        )  # (N,): bound per unit of the rest
        left = (_distances(problem.r, r, order, p) - lost[:, None]).clamp_min(0)
        reached = left * per_unit[:, None]  # (N, L): the bound after k entries
        wanted = sqrt(target_mse) * (whole.size if p == 1 else sqrt(whole.size))
        counts = (reached < wanted).sum(1) + 1
    return Needed(counts, r.shape[1], whole.to_mse())


def _distances(exact: Tensor, r: Tensor, order: Tensor, p: float) -> Tensor:
    """Return ||r - r′||_p (N, L) after 1, 2, ... entries, as ``Problem.distance`` has it: r′ comes from rounded r."""
    gone = exact.gather(1, order).abs()
    off = (exact - r.double()).gather(1, order).abs()  # of the entries kept: rounding in the forward pass
    left = torch.cat([off[:, 1:], torch.zeros_like(off[:, :1])], 1).flip(1)
    if p == inf:
        found = torch.maximum(gone.cummax(1).values, left.cummax(1).values.flip(1))
    else:
        found = (gone.pow(p).cumsum(1) + left.pow(p).cumsum(1).flip(1)).pow(1 / p)
    return (found - 2 * ROUNDING * norm(exact, p)[:, None]).clamp_min(0)


def _grid(length: int) -> list[int]:
    """Return the counts of entries that are tried: in steps of one hundredth."""
    return sorted({max(1, round(step / GRID * length)) for step in range(1, GRID + 1)})


def _by_search(problem: Problem, r: Tensor, order: Tensor, target: float, kind: Kind) -> Tensor:
    """Return the first count (N,) of a grid of shares whose certificate reaches the target; L + 1 where none does."""
    length = r.shape[1]
    found = torch.full((len(r),), length + 1)
    for count in _grid(length):
        open_ = (found > length).nonzero()[:, 0]
        if not len(open_):
            break
        changed = zeroed(r[open_], order[open_], count)
        bound = certify(problem.model, problem.layer, problem.x[open_], changed, problem.p, kind, bounds=problem.bounds)
        found[open_[bound.to_mse() >= target]] = count
    return found
