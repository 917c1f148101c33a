"""The sum of clipped records before the noise: a record's slot moves it by the clip at most, as it is rounded."""

import torch
from torch import Tensor

from gradveil.gradients.precision import full_precision
from gradveil.guard.records.coordinates import Coordinates
from gradveil.guard.records.records import Records
from gradveil.guard.records.rounding import MAPPED, clip_factors, narrow
from gradveil.tree import Params


def clipped_sum(
    records: Records, clip: float, coordinates: Coordinates | None = None, present: Tensor | None = None
) -> Tensor:
    """Return h = Σ_j c_j P g_j as one vector (p,), or of K clients (K, p), in float32 at least.

    Each slot counts by itself, whatever lies in the others. ``present``: 0 for a slot (N,) or (K, N) that is to be
    zero. With coordinates P g_j is g_j + Uᵀ D U g_j, with D = s^(-½) - 1 and U g_j as it was computed of this record:
    so h is right for any U and s, and going back by P⁻¹ is left to whoever has the noise on it.
    """
    total: Tensor | None = None
    for some, which in records.pieces():
        with full_precision(), torch.autocast(_device(records.like).type, enabled=False):
            found = _of_piece(some, clip, coordinates, None if present is None else present[..., which])
        total = found if total is None else total.double() + found
    assert total is not None
    return narrow(total, records.count, torch.promote_types(next(iter(records.like.values())).dtype, torch.float32))


def _of_piece(records: Records, clip: float, coordinates: Coordinates | None, present: Tensor | None) -> Tensor:
    lengths, masses = records.square_norms(), records.square_masses()
    if coordinates is None:
        factors = clip_factors(lengths, clip, masses)
        return _flat(records.weighted_sum(_those(factors, present)), lengths.ndim - 1)
    along, lengths = coordinates.mapped(records)
    factors = _those(clip_factors(lengths, clip, masses, MAPPED), present)
    beside = torch.einsum("...n,...nr->...r", factors, torch.where(factors[..., None] > 0, along, 0.0))
    plain = _flat(records.weighted_sum(factors, MAPPED), lengths.ndim - 1)
    return plain.double() + coordinates.spread(beside)


def _those(factors: Tensor, present: Tensor | None) -> Tensor:
    return factors if present is None else factors * present.to(factors)


def _flat(tree: Params, lead: int) -> Tensor:
    """Return all entries as one vector, or as one (K, p) for each client."""
    return torch.cat([g.flatten(lead) if g.ndim > lead else g[..., None] for g in tree.values()], -1)


def _device(like: Params) -> torch.device:
    return next(iter(like.values())).device
