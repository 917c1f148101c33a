"""Public coordinates: noise is stronger along the directions of public gradients.

A = U diag(s) Uᵀ + (I - U Uᵀ) with R orthonormal directions U, and P = A^(-1/2): the map into coordinates in which a
record is clipped and plain noise is added; P⁻¹ brings it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from gradveil.errors import DefenseError
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.losses import Loss
from gradveil.protection.records.records import Records, records_of, split
from gradveil.protection.records.rounding import clip_factors, products_error, wide
from gradveil.tree import Params, parameters
from gradveil.types import Batch

LARGEST = 2**32  # bytes that public gradients may take
PUBLIC = 512  # public examples that are looked at, at most
FEWEST = 16  # that say anything
AT_ONCE = 2**14  # columns of the directions that are made float64 at once
VALUES, CLIPS = (1.0, 1e4), (1e-6, 1e6)  # that are taken from others: eigenvalues and clips


@dataclass(frozen=True, eq=False)
class Coordinates:
    """P, by its directions U (R, p) over all parameters in order, and the eigenvalues s (R,) of A there."""

    directions: Tensor
    values: Tensor

    @cached_property
    def stretch(self) -> Tensor:
        """D = s^(-½) - 1 in float64: P is 1 + Uᵀ D U, for any U that is held."""
        return self.values.double().rsqrt() - 1

    @cached_property
    def products(self) -> Tensor:
        return sum_over(lambda u: u @ u.T, self.directions)

    @cached_property
    def longest(self) -> float:
        return float(self.products.diagonal().max().sqrt()) if len(self.values) else 1.0

    def mapped(self, records: Records) -> tuple[Tensor, Tensor]:
        """Return D U g_j (..., N, R) as it is computed, and upper bounds of ||g_j + Uᵀ D U g_j||² (..., N)."""
        lengths, masses = records.square_norms(), records.square_masses()
        along = records.along(split(self.directions, records.like))
        error = products_error(lengths, masses, along.shape[-1], records.formed, self.directions.dtype) * self.longest
        beside = along * self.stretch
        found = lengths + 2 * (along * beside).sum(-1) + ((beside @ self.products) * beside).sum(-1)
        found += 2 * error * torch.linalg.vector_norm(beside, dim=-1)
        return beside, found.clamp_min(0) + 1e-9 * lengths

    def spread(self, along: Tensor) -> Tensor:
        """Return Uᵀ v for vectors (..., R) in float64."""
        parts = self.directions.split(AT_ONCE, 1)
        return torch.cat([along @ u.to(along) for u in parts], -1)

    def back(self, flat: Tensor) -> Tensor:
        """Return P⁻¹ n for vectors (..., p)."""
        return self._stretched(flat, self.values.sqrt() - 1)

    def into(self, flat: Tensor) -> Tensor:
        """Return P g for vectors (..., p)."""
        return self._stretched(flat, 1 / self.values.sqrt() - 1)

    def _stretched(self, flat: Tensor, by: Tensor) -> Tensor:
        u = self.directions.to(flat)
        return flat + (flat @ u.T * by.to(flat)) @ u

    @property
    def gain(self) -> float:
        """The noise energy of P⁻¹ n in units of that of n: tr(A) / p."""
        rank, size = self.directions.shape
        return float(self.values.sum() + size - rank) / size

    def __getstate__(self) -> dict[str, Any]:
        """Between processes, plain arrays travel."""
        return {name: getattr(self, name).cpu().numpy() for name in ("directions", "values")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, torch.from_numpy(value))


def sum_over(part: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return the sum of what follows from some columns of a matrix, in float64, for all of them."""
    return torch.stack([part(some.double()) for some in rows.split(AT_ONCE, 1)]).sum(0)


def fit(
    first: Records, second: Records, like: Params, clip: Callable[[Tensor], Tensor], rank: int, alpha: float
) -> Coordinates:
    """Return the coordinates that public gradients ask for.

    The first half gives the directions, the second their second moments λ and the mean τ of those beside, so that
    what is chance in the first counts as such: s = (λ/τ)^α. ``clip``: square norms -> how much each record counts.
    """
    size = sum(p.numel() for p in like.values())
    rank = min(rank, first.count, size - 1)
    if 4 * size * first.count > LARGEST:
        raise DefenseError(
            f"Public coordinates of {size:,} parameters would take {4 * size * first.count / 2**30:.0f} GiB. Use "
            f"shape=iso, or train fewer parameters."
        )
    counts = clip(first.square_norms()).double()
    rows = torch.cat([g.flatten(1) for g in first.each().values()], 1)[counts > 0].double() * counts[counts > 0, None]
    lengths, vectors = torch.linalg.eigh(rows @ rows.T)  # rising
    rank = min(rank, int((lengths > 1e-10 * lengths[-1]).sum()))
    directions = (vectors[:, -rank:].T @ rows / lengths[-rank:, None].sqrt()).to(wide(next(iter(like.values()))))
    weights = clip(second.square_norms()).double()
    along = torch.where(weights[:, None] > 0, second.along(split(directions, like)).double() * weights[:, None], 0.0)
    energy = torch.where(weights > 0, second.square_norms().double() * weights.square(), 0.0).mean()
    moments = along.square().mean(0)
    beside = ((energy - moments.sum()) / (size - rank)).clamp_min(1e-12 * moments.max())
    return Coordinates(directions, (moments / beside).clamp_min(1.0).pow(alpha).clamp_max(VALUES[1]).to(directions))


def save(coordinates: Coordinates, like: Params, path: str | Path, clip: float | None = None) -> None:
    """Write coordinates for a model with these parameters to a file that a server can send, with a clip in it."""
    tensors = {f"directions/{n}": v.contiguous() for n, v in split(coordinates.directions.cpu(), like).items()}
    tensors["values"] = coordinates.values.cpu()
    if clip is not None:
        tensors["clip"] = torch.tensor(clip, dtype=torch.float64)
    write_atomically(Path(path), to_bytes(tensors))


def load(path: str, like: Params) -> tuple[Coordinates, float | None]:
    """Read what ``save`` wrote, for a model with these parameters; what is no pair of P and P⁻¹ is refused."""
    advice = (
        "They are no public coordinates of this model: write them with coordinates.save (gradveil.protection.records)."
    )
    with wrap_parse_errors(repr(path), DefenseError, advice):
        return _load(path, like)


def _load(path: str, like: Params) -> tuple[Coordinates, float | None]:
    tensors = _read(path, Path(path).stat().st_mtime_ns)
    parts = [tensors[f"directions/{name}"] for name in like]
    values = tensors["values"].double()
    if any(part.shape[1:] != p.shape for part, p in zip(parts, like.values(), strict=True)):
        raise DefenseError(f"The public coordinates {path!r} are of a model with other parameters.")
    flat = torch.cat([part.flatten(1) for part in parts], 1).double()
    apart = float((flat @ flat.T - torch.eye(len(flat), dtype=flat.dtype)).abs().max()) if len(flat) else 0.0
    if not apart < 1e-3 or len(values) != len(flat):
        raise DefenseError(f"The directions in {path!r} are not orthonormal, or not as many as their values.")
    if not bool(((values >= VALUES[0]) & (values <= VALUES[1])).all()):
        raise DefenseError(f"The values in {path!r} are not all from {VALUES[0]:g} to {VALUES[1]:g}.")
    first = wide(next(iter(like.values())))
    directions = torch.linalg.qr(flat.T).Q.T  # the same but for signs, and orthonormal to rounding
    clip = check_clip(float(tensors["clip"]), f"in {path!r}") if "clip" in tensors else None
    return Coordinates(directions.to(first), values.to(first)), clip


def check_clip(clip: float, where: str) -> float:
    """Return a clip that somebody else sent; raise where it is no length that a gradient may have."""
    if not CLIPS[0] <= clip <= CLIPS[1]:
        raise DefenseError(f"The clip {where} is {clip:g}; it must be from {CLIPS[0]:g} to {CLIPS[1]:g}.")
    return clip


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> Params:
    return read_safetensors(Path(path))[0]


@dataclass(frozen=True, eq=False)
class ClipMap:
    """What follows from public data at a round's weights: the clip, and the coordinates; None: plain ones."""

    clip: float
    coordinates: Coordinates | None = None

    def save(self, model: nn.Module, path: str) -> None:
        """Write it to a file that a server can send."""
        if self.coordinates is None:
            raise DefenseError("There are no coordinates to write: give the shape public.")
        save(self.coordinates, parameters(model), path, self.clip)


def measure(
    model: nn.Module,
    public: Batch | None,
    loss: Loss,
    shape: str,
    clip: float | None,
    quantile: float | None,
    rank: int,
    alpha: float,
) -> ClipMap:
    """Return clip and coordinates at the model's weights; ``shape``: iso, public or a file; a clip of None is 1."""
    like = parameters(model)
    coordinates, sent = load(shape, like) if shape.endswith(".safetensors") else (None, None)
    fixed = next(value for value in (clip, sent, 1.0) if value is not None)
    if coordinates is not None and quantile is None:
        return ClipMap(fixed, coordinates)
    few = _enough(public, f"shape={shape}" if quantile is None else f"quantile={quantile}")
    if shape == "iso" and quantile is not None:
        return ClipMap(_quantile(records_of(model, few, loss).square_norms(), quantile))
    first, second = (records_of(model, half, loss) for half in (few[: len(few) // 2], few[len(few) // 2 :]))
    if shape == "public":
        limit = clip or _quantile(torch.cat([first.square_norms(), second.square_norms()]), quantile or 1.0)
        coordinates = fit(first, second, like, lambda norms: clip_factors(norms, limit), rank, alpha)
    if quantile is None or coordinates is None:
        return ClipMap(fixed, coordinates)
    return ClipMap(_quantile(coordinates.mapped(second)[1], quantile), coordinates)


def _enough(public: Batch | None, asks: str) -> Batch:
    if public is None or len(public) < FEWEST:
        raise DefenseError(
            f"veil:{asks} needs public examples, at least {FEWEST} that are no client's, and there are "
            f"{0 if public is None else len(public)}. Leave some records undealt, or give clip= and shape=iso."
        )
    return public[:PUBLIC]


def _quantile(square_norms: Tensor, quantile: float) -> float:
    finite = square_norms[square_norms.isfinite()].double().clamp_min(0).sqrt()
    found = float(finite.quantile(quantile)) if len(finite) else 0.0
    if not found > 0:
        raise DefenseError("The gradients of all public examples are zero or not finite: no clip follows from them.")
    return check_clip(found, "that follows from public gradients")
