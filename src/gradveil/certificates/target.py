"""From a wanted distance back to the defence: the smallest share whose certificate reaches a target."""

from math import sqrt

import torch
from torch import Tensor, nn

from gradveil.certificates.base import Kind
from gradveil.certificates.certify import certify
from gradveil.errors import CertificateError
from gradveil.layers import find_layer, representation
from gradveil.scores import leak_scores

PROPORTIONAL = ("local", "global", "box")  # kinds whose bound is ||r - r′|| over a number that r′ does not change
SEARCHED = ("radius", "reach")  # kinds that are computed anew for every share
GRID = 0.01  # step of the shares that are tried then


def smallest_share(
    model: nn.Module,
    layer: str | None,
    x: Tensor,  # (N, *shape)
    target_mse: float,
    kind: Kind = "global",
    p: float = 2,
    *,
    method: str = "auto",
    bounds: tuple[float, float] = (0.0, 1.0),
) -> float | None:
    """Return the smallest share whose certificate of that kind reaches the target for every example; None: no share.

    Entries are zeroed in the order of the paper's score, those that are zero already left out. For ``local``,
    ``global`` and ``box`` the answer is exact to one entry (a multiple of 1/L); ``radius`` and ``reach`` are tried
    in steps of one hundredth.
    """
    if kind not in (*PROPORTIONAL, *SEARCHED):
        raise CertificateError(
            f"A target needs a bound that depends on the share alone; {kind!r} is none. "
            f"Use one of: {', '.join((*PROPORTIONAL, *SEARCHED))}."
        )
    if target_mse <= 0:
        return 0.0
    name = find_layer(model, layer)
    r = representation(model, name, x).flatten(1)  # (N, L)
    order = zeroing_order(r, leak_scores(model, name, x, method))
    if kind in SEARCHED:
        return _by_search(model, name, x, r, order, target_mse, kind, p, bounds)
    whole = certify(model, name, x, torch.zeros_like(r), p, kind, bounds=bounds)
    per_unit = whole.bound / whole.details["distance"].clamp_min(1e-300)  # (N,): bound per unit of ||r - r′||
    sizes = _running_norm(r.double().gather(1, order), p) * per_unit[:, None]  # (N, L): the bound after k entries
    needed = sqrt(target_mse) * (whole.size if p == 1 else sqrt(whole.size))
    counts = (sizes < needed).sum(1) + 1  # (N,): entries until the bound is reached
    count = int(counts.max())
    return count / r.shape[1] if count <= r.shape[1] else None


def zeroing_order(r: Tensor, scores: Tensor) -> Tensor:
    """Return the order (N, L) in which entries are zeroed: by falling score, ties by index, dead ones last."""
    keys = torch.where(r != 0, scores.nan_to_num(nan=torch.inf, posinf=torch.inf), -1.0)
    return keys.argsort(dim=1, descending=True, stable=True)


def zeroed(r: Tensor, order: Tensor, count: int) -> Tensor:
    """Return r′ (N, L): the first ``count`` entries of each row's order set to zero."""
    return r.scatter(1, order[:, :count], 0.0)


def _running_norm(entries: Tensor, p: float) -> Tensor:
    """Return the p-norms (N, L) of the first 1, 2, ... entries of each row."""
    size = entries.abs()
    if p == 1:
        return size.cumsum(1)
    return size.square().cumsum(1).sqrt() if p == 2 else size.cummax(1).values


def _by_search(
    model: nn.Module, layer: str, x: Tensor, r: Tensor, order: Tensor, target: float, kind: Kind, p: float,
    bounds: tuple[float, float],
) -> float | None:  # fmt: skip
    for step in range(1, round(1 / GRID) + 1):
        share = step * GRID
        perturbed = zeroed(r, order, round(share * r.shape[1]))
        if bool((certify(model, layer, x, perturbed, p, kind, bounds=bounds).to_mse() >= target).all()):
            return share
    return None
