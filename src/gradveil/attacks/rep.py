"""Match the class-wise representation that the last layer's gradient gives away, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.labels import with_labels
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.matching import Matching, cosine_distance, squared_distance
from gradveil.attacks.search import Search
from gradveil.errors import AttackError
from gradveil.layers import find_layer, prefix
from gradveil.tree import Params
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("rep")
@dataclass(frozen=True)
class Rep(Attack):
    """Find an image whose representation is the one read off the last layer's gradient (Sun et al. 2020, 3.2).

    The row of class c of dW is δ_c times the mean representation of that class (algorithm 3). Where the bias is
    seen, r = dW_c / db_c is exact for one example and ||f(x) - r||² is minimised; without it r is known up to its
    scale and 1 - cos(f(x), r) is. For several examples each is given the representation of its class, so that
    what comes back is a typical image of the class on that device.
    """

    steps: int = 300  # outer steps of 20 evaluations per start
    restarts: int = 4
    history: int = 50
    tol: float = 1e-6

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates at once."""
        known = with_labels(seen, rngs, required=True)
        found: dict[int, Reconstruction] = {}
        for has_bias in (True, False):
            members = [i for i, s in enumerate(known) if _sees_bias(s) == has_bias]
            if members:
                solved = self._search(has_bias).run([known[i] for i in members], [rngs[i] for i in members])
                found |= dict(zip(members, solved, strict=True))
        return [found[i] for i in range(len(seen))]

    def _search(self, has_bias: bool) -> Search:
        return Search(
            squared_distance if has_bias else cosine_distance, lambda _: LBFGS(self.history, True),
            20 * self.steps, self.restarts, tol=self.tol, cuts=(0.05, 0.15), scaled=has_bias, stack=_stack,
        )  # fmt: skip


def _sees_bias(seen: Observation) -> bool:
    name = f"{find_layer(seen.model)}.bias"
    return name in seen.visible and bool(seen.update.gradient[name].any())


def _stack(seen: Sequence[Observation]) -> Matching:
    """Return one problem per observation, whose only tensor is the representation (P, N, L)."""
    layer = find_layer(seen[0].model)
    r = torch.stack([class_representation(s, layer) for s in seen])
    weight = f"{layer}.weight"
    kept = [(s.weights[weight] > 0).any(0).to(r) if weight in s.weights else r.new_ones(r.shape[2]) for s in seen]
    weights = {"r": torch.stack(kept)[:, None, :].expand_as(r)}
    return Matching(seen[0].model, ("r",), {"r": r}, weights, r.new_zeros(len(r)), _forward(seen[0], layer))


def class_representation(seen: Observation, layer: str) -> Tensor:
    """Return the representation of each example's class (N, L): dW_c / db_c, or -dW_c where no bias is seen."""
    weight = f"{layer}.weight"
    if weight not in seen.visible or seen.labels is None:
        raise AttackError(f"rep needs the gradient of {weight}, which is not seen here. Use dlg or newton.")
    rows = seen.update.gradient[weight].detach()[seen.labels]  # (N, L)
    if not _sees_bias(seen):
        return -rows  # the true class's row is -(1 - p_c) r
    divisor = seen.update.gradient[f"{layer}.bias"].detach()[seen.labels]
    divisor = torch.where(divisor.abs() > torch.finfo(rows.dtype).tiny, divisor, -torch.ones_like(divisor))
    return rows / divisor[:, None]


def _forward(seen: Observation, layer: str) -> Callable[[Tensor, Tensor], Params]:
    f = prefix(seen.model, layer)

    def trial(x: Tensor, _: Tensor) -> Params:
        return {"r": f(x.flatten(0, 1)).reshape(*x.shape[:2], -1)}

    return trial
