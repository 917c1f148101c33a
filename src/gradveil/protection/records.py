"""Gradients of single records: what can be asked of them, their clipped sum, and how far rounding may move it.

A record's gradient g is the exact function of the numbers that are held of it: of its own gradient where this lies in
memory, else of what the layer got (rows a_t, T of them) and of the loss's slopes δ_t: g = Σ_t δ_t a_tᵀ. With u the
unit of rounding (2⁻²⁴ in float32) and τ the least normal number, a sum of n products x·y, in any order, is off by at
most γ |x|·|y| + n τ, γ = n u to first order. From this:

- **Lengths.** ``squares`` returns an upper bound of a sum of squares. Where g is never formed, ||g||² is
  Σ_st (a_s·a_t)(δ_s·δ_t), which may cancel down to nothing; its error is at most γ A², where A = Σ_t ||a_t|| ||δ_t|| is
  the record's *mass* and n = inputs + outputs + positions, and is added (``gram``).
- **Factors.** c = min(1, C' / bound), C' = C / (1 + ``SLACK``), and so small that c A ≤ ``MASS`` C; 0 where a bound is
  not finite: ``clip_factors``. So ||c g|| ≤ C', and what cancels is never longer than ``MASS`` C. In public coordinates
  (``Coordinates.mapped``) g itself may be longer than C: there c A ≤ ``MAPPED`` C.
- **Sums.** A chunk of m records is summed in float32. Taking a record's slot to zero changes the rounding of its own
  chunk alone. There a layer is off by at most m T u Σ_i c_i A_i, before and after;
  ``records_in_a_chunk`` holds m² T · mass ≤ 2¹⁴ for powers of two m, so that the chunks of all layers lie in one
  another. By Cauchy and Schwarz, over 8 sizes of chunks and layers with and without mass, all layers together are then
  off by at most 2 · 3 · 2¹⁴ u C < 0.006 C. Chunks, of which none is longer than its records' clips, are added in
  float32 where chunks · records ≤ 2¹⁴, which is 2 · 2¹⁴ u C < 0.002 C, else in float64; and the sum is rounded to
  float32 once (``narrow``), for as much again.

Together ||change|| ≤ C' (1 + 2 u · MAPPED) + 0.010 C + (float64's part, 10⁻⁹ C) < C, as C' < 0.985 C. Float64 has
u = 2⁻⁵³ and the same argument. Numbers below τ count in all bounds as if they were as large.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gradveil.gradients.functional import full_precision
from gradveil.tree import Params

if TYPE_CHECKING:
    from gradveil.protection.layers import LayerRecord

SLACK = 1 / 64
MASS = 16.0  # a record's mass after clipping, at most, in clips; 1 to 4 in trained networks
MAPPED = 64.0  # the same in public coordinates, where what is clipped is shorter than what is summed
LONG = 2**14  # clips that float32 may add up or be rounded at; beyond, float64
BLOCK = 256  # numbers of a sum in float32, before float64 goes on
AT_ONCE = {"cpu": 2**18, "cuda": 2**26}  # numbers of chunks' sums that are made together

Pair = tuple[Tensor, Tensor]  # upper bounds of square norms and of square masses, in float64


def wide(values: Tensor) -> Tensor:
    """Return numbers in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def unit(dtype: torch.dtype) -> float:
    """Return u, half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def squares(values: Tensor, lead: int) -> Tensor:
    """Return upper bounds of the sums of squares over all dimensions after the first ones, in float64."""
    flat = wide(values).flatten(lead) if values.ndim > lead else wide(values)[..., None]
    size = flat.shape[-1]
    whole = size // (16 * BLOCK) * 16 * BLOCK
    if 0 < whole < size:
        return squares(flat[..., :whole], lead) + squares(flat[..., whole:], lead)
    parts = flat.unflatten(-1, (-1, 16 * BLOCK)) if whole > 16 * BLOCK else flat
    found = torch.linalg.vector_norm(parts, dim=-1).double().square()
    found = found.sum(-1) if parts.ndim > flat.ndim else found
    info, most = torch.finfo(flat.dtype), min(size, 16 * BLOCK)
    bound: Tensor = (found + size * info.tiny) * (1 + 2 * (most + 4) * unit(flat.dtype))
    return bound


def gram(a: Tensor, delta: Tensor) -> Pair:
    """Return bounds of Σ_g ||Σ_t δ_t a_tᵀ||² and of its mass from rows a (..., G, T, I) and δ (..., G, T, O)."""
    (positions, inputs), outputs, info = a.shape[-2:], delta.shape[-1], torch.finfo(a.dtype)
    if (inputs + outputs + positions) * unit(a.dtype) > 2**-5:
        return gram(a.double(), delta.double())
    ours, theirs = a @ a.mT, delta @ delta.mT  # (..., G, T, T)
    alpha, beta = (_diagonal(m, n) for m, n in ((ours, inputs), (theirs, outputs)))  # (..., G, T)
    return _from_products(torch.linalg.vecdot(ours, theirs).double(), alpha, beta, inputs, outputs, info)


def gram_of_rows(delta: Tensor, together: Tensor) -> Pair:
    """Return bounds of Σ ||Σ_t δ_t||² and of its mass, over rows δ (..., T, D) that are ``together`` (..., T, T)."""
    positions, size, info = *delta.shape[-2:], torch.finfo(delta.dtype)
    if (size + positions) * unit(delta.dtype) > 2**-5:
        return gram_of_rows(delta.double(), together)
    theirs = delta @ delta.mT
    beta = _diagonal(theirs, size).sqrt()  # (..., T)
    mass = ((beta[..., None, :] * together).sum(-1) * beta).sum(-1)
    found = (theirs.double() * together).sum((-2, -1)).clamp_min(0)
    bound = found + 1.1 * (size + 8) * info.eps / 2 * mass + size * positions**2 * info.tiny
    return torch.minimum(bound, mass), mass


def _diagonal(products: Tensor, terms: int) -> Tensor:
    info = torch.finfo(products.dtype)
    squared = products.diagonal(dim1=-2, dim2=-1).double()
    return (squared + terms * info.tiny) * (1 + 2 * (terms + 4) * unit(products.dtype))


def _from_products(rows: Tensor, alpha: Tensor, beta: Tensor, inputs: int, outputs: int, info: torch.finfo) -> Pair:
    """Return the bounds from Σ_t (a_s·a_t)(δ_s·δ_t) (..., G, T) and the rows' square lengths."""
    positions = rows.shape[-1]
    mass = (alpha * beta).sqrt().sum(-1)
    lost = inputs * beta.sqrt().sum(-1).square() + outputs * alpha.sqrt().sum(-1).square() + positions**2
    error = 1.1 * (inputs + outputs + positions + 8) * info.eps / 2
    bound = rows.sum(-1).clamp_min(0) + error * mass.square() + lost * info.tiny
    return torch.minimum(bound, mass.square()).sum(-1), mass.square().sum(-1)


def products(values: Tensor, rows: Tensor) -> Tensor:
    """Return inner products (..., R) of vectors (..., q) and rows (R, q) in float64, off by ``products_error``."""
    flat, size = wide(values).reshape(-1, values.shape[-1]), values.shape[-1]
    rows, whole = rows.to(flat), size // BLOCK * BLOCK
    found = (flat[:, whole:] @ rows[:, whole:].T).double()
    if whole:
        left = flat[:, :whole].unflatten(1, (-1, BLOCK)).transpose(0, 1)
        right = rows[:, :whole].unflatten(1, (-1, BLOCK)).permute(1, 2, 0)
        found += torch.bmm(left, right).sum(0, dtype=torch.float64)
    return found.reshape(*values.shape[:-1], len(rows))


def products_error(norms: Tensor, masses: Tensor, rank: int, positions: int, dtype: torch.dtype) -> Tensor:
    """Return by how much R products with unit rows are off, as the length of a vector, from square norms and masses.

    ``positions``: rows of a gradient that was formed for this and is not what is summed.
    """
    found: Tensor = (BLOCK + 4) * rank**0.5 * norms.sqrt() + (positions + 2) * masses.sqrt()
    return 1.1 * unit(dtype) * found


def clip_factors(square_norms: Tensor, clip: float, square_masses: Tensor | None = None, mass: float = MASS) -> Tensor:
    """Return c_j = min(1, C' / ||g_j||) in float64, or less where the mass asks for it; 0 where one is not finite."""
    lengths = square_norms.double()
    if square_masses is not None:
        lengths = torch.maximum(lengths, square_masses / mass**2)
    factors = (clip / (1 + SLACK) / lengths.clamp_min(1e-300).sqrt()).clamp_max(1.0)
    return torch.where(lengths.isfinite(), factors, torch.zeros_like(factors))


def records_in_a_chunk(rows: int, mass: float, dtype: torch.dtype) -> int:
    """Return how many records may be summed before float64 goes on, a power of two; 0: not one."""
    most = 2**14 * 2.0**-24 / unit(dtype) / (rows * mass)
    size = 1
    while size * size * 4 <= most:
        size *= 2
    return size if most >= 1 else 0


def chunked(values: Tensor, size: int) -> Tensor:
    """Return values (K, N, ...) as chunks of records (K, N / size, size, ...)."""
    found: Tensor = values.unflatten(1, (values.shape[1] // size if size else 1, size))
    return found


def in_chunks(
    count: int, size: int, numbers: int, like: Tensor, part: Callable[[slice, int], Tensor], length: float = 1.0
) -> Tensor:
    """Return the sum (K, ...) over ``count`` records: ``part(some, n)`` sums chunks of n (K, chunks, ...).

    ``numbers``: how many one chunk's sum has; ``length``: of what one record adds to the sum, at most, in clips.
    """
    if count <= size:
        return part(slice(0, count), count)[:, 0]
    several = size * max(1, AT_ONCE["cuda" if like.is_cuda else "cpu"] // numbers)
    whole = count // size * size
    pieces = [(slice(at, min(at + several, whole)), size) for at in range(0, whole, several)]
    pieces += [(slice(whole, count), count - whole)] if whole < count else []
    few = (count // size + 1) * count * length <= LONG
    total: Tensor | None = None
    for some, each in pieces:
        found = part(some, each)
        found = found[:, 0] if found.shape[1] == 1 else found.sum(1, dtype=found.dtype if few else torch.float64)
        if total is None:
            total = found if few else found.double()
        else:
            total += found
    assert total is not None
    return narrow(total, count, like.dtype, length)


def narrow(total: Tensor, count: int, dtype: torch.dtype, length: float = 1.0) -> Tensor:
    """Return a sum of so many records in a type, or in float64 where its rounding would move it too far."""
    return total.to(dtype) if count * length <= LONG else total


def sum_of_held(each: Tensor, weights: Tensor, mass: float) -> Tensor:
    """Return the sums (K, *shape) of gradients (K, N, *shape) by weights (K, N); ``mass``: of one of them, in clips."""
    (clients, count), shape = each.shape[:2], each.shape[2:]
    flat, weights = each.reshape(clients, count, shape.numel()), weights.to(each)

    def part(some: slice, size: int) -> Tensor:
        rows, factors = flat[:, some], weights[:, some]
        chunks = rows.shape[1] // size if size else 1
        rows = rows.reshape(clients * chunks, size, rows.shape[2])
        factors = factors.reshape(clients * chunks, 1, size)
        return torch.bmm(factors, rows).view(clients, chunks, *shape)

    return in_chunks(count, records_in_a_chunk(1, mass, each.dtype), max(1, shape.numel()), each, part, mass)


class Records(ABC):
    """Gradients g_j of N records."""

    count: int
    like: Params  # the trained parameters, of which names, order, shapes and types count

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Return upper bounds of each ||g_j||² (N,) in float64, as near as rounding lets them be."""

    def square_masses(self) -> Tensor:
        """Return upper bounds of what cancels in each g_j, squared (N,): where nothing does, norms (``rounding``)."""
        return self.square_norms()

    @property
    def formed(self) -> int:
        """Positions of gradients that ``along`` forms and ``weighted_sum`` does not; 0: none."""
        return 0

    @abstractmethod
    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R) with directions (R, *shape) by name, in float64."""

    @abstractmethod
    def each(self) -> Params:
        """Return the gradients themselves (N, *shape) by name."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        """Return Σ w_j g_j, in float32 at least; a record of weight 0 never counts, even where it is not finite.

        ``mass``: the most that one w_j g_j may be long, in clips; the sum is off by less than ``rounding`` says.
        """

    def pieces(self) -> Iterator[tuple["Records", slice]]:
        """Yield the records as they are held at once, and which of all they are."""
        yield self, slice(None)


@dataclass(frozen=True)
class Held(Records):
    """Gradients that lie side by side: (N, *shape) by name."""

    gradients: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(next(iter(self.gradients.values())))

    @property
    def like(self) -> Params:  # type: ignore[override]
        return {n: g.new_empty(g.shape[1:]) for n, g in self.gradients.items()}

    def square_norms(self) -> Tensor:
        return torch.stack([squares(g, 1) for g in self.gradients.values()]).sum(0)

    def along(self, directions: Params) -> Tensor:
        found = [products(g.flatten(1), directions[n].flatten(1)) for n, g in self.gradients.items()]
        return torch.stack(found).sum(0)

    def each(self) -> Params:
        return self.gradients

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        kept, found = weights != 0, self.gradients
        if not bool(kept.all()):  # in its place: where the others are summed must not hang on it
            found = {n: g.masked_fill(~kept.view(-1, *[1] * (g.ndim - 1)), 0) for n, g in found.items()}
        return {n: sum_of_held(wide(g)[None], weights[None], mass)[0] for n, g in found.items()}


@dataclass(frozen=True)
class InParts(Records):
    """Gradients of some records after the others: computed anew for every question."""

    parts: Sequence[Callable[[], Held]]
    sizes: Sequence[int]
    like: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        return sum(self.sizes)

    def square_norms(self) -> Tensor:
        return torch.cat([part().square_norms() for part in self.parts])

    def along(self, directions: Params) -> Tensor:
        return torch.cat([part().along(directions) for part in self.parts])

    def each(self) -> Params:
        found = [part().gradients for part in self.parts]
        return {n: torch.cat([some[n] for some in found]) for n in found[0]}

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        total: Params = {}
        for part, some in self.pieces():
            found = part.weighted_sum(weights[some], mass)
            total = {n: g.double() + total[n] if total else g.double() for n, g in found.items()}
        return total

    def pieces(self) -> Iterator[tuple[Records, slice]]:
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part(), slice(start, start + size)
            start += size


@dataclass
class Captured(Records):
    """Gradients by what the layers saw: of N records, or of (K, N) where the model's weights are those of K clients."""

    layers: "list[LayerRecord]"
    like: Params  # the trained parameters, in order
    shape: tuple[int, ...]  # (N,) or (K, N)

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.shape[-1]

    @cached_property
    def _lengths(self) -> Pair:
        each = [layer.lengths_of(which) for layer in self.layers for which in layer.trained]
        norms = torch.stack([norm for norm, _ in each]).sum(0)  # (K, N)
        if all(norm is mass for norm, mass in each):
            return norms, norms
        return norms, torch.stack([mass for _, mass in each]).sum(0)

    @property
    def _lead(self) -> torch.Size:
        return self.layers[0].delta.shape[:2]

    def square_norms(self) -> Tensor:
        return self._lengths[0].view(self.shape)

    def square_masses(self) -> Tensor:
        return self._lengths[1].view(self.shape)

    @cached_property
    def formed(self) -> int:
        return max(layer.formed for layer in self.layers)

    def along(self, directions: Params) -> Tensor:
        found = [
            layer.along(which, directions[layer.prefix + which].to(layer.delta))
            for layer in self.layers
            for which in layer.trained
        ]
        return torch.stack(found).sum(0).reshape(*self.shape, -1)

    def each(self) -> Params:
        found = {layer.prefix + w: layer.each(w) for layer in self.layers for w in layer.trained}
        empty = self.layers[0].delta.new_zeros(())
        return {
            n: found.get(n, empty).expand(*self._lead, *p.shape).reshape(*self.shape, *p.shape)
            for n, p in self.like.items()
        }

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        factors, bad = weights.view(self._lead), ~self._lengths[1].isfinite()
        layers = [layer.without(bad & (factors == 0)) for layer in self.layers] if bool(bad.any()) else self.layers
        found = {layer.prefix + w: layer.total(w, factors, mass) for layer in layers for w in layer.trained}
        lead = self.shape[:-1]
        return {
            n: found[n].reshape(*lead, *p.shape) if n in found else wide(p.new_zeros(*lead, *p.shape))
            for n, p in self.like.items()
        }

    def dealt(self, clients: int) -> "Captured":
        layers = [layer.dealt(clients) for layer in self.layers]
        return Captured(layers, self.like, (self.shape[0] * clients, self.shape[1] // clients))

    def clients(self, some: slice) -> "Captured":
        count = len(range(*some.indices(self.shape[0])))
        return Captured([layer.part(some) for layer in self.layers], self.like, (count, *self.shape[1:]))


class PublicMap(Protocol):
    """Public coordinates: P = 1 + Uᵀ D U, with R rows U."""

    def mapped(self, records: Records) -> tuple[Tensor, Tensor]:
        """Return D U g_j (..., N, R) as it is computed, and upper bounds of ||P g_j||² (..., N)."""

    def spread(self, along: Tensor) -> Tensor:
        """Return Uᵀ v for vectors (..., R) in float64."""


def split(flat: Tensor, like: Params) -> Params:
    """Return vectors (..., p) as tensors by name, each (..., *shape)."""
    parts = zip(like.items(), flat.split([p.numel() for p in like.values()], -1), strict=True)
    return {name: part.reshape(*part.shape[:-1], *p.shape) for (name, p), part in parts}


def clipped_sum(
    records: Records, clip: float, coordinates: PublicMap | None = None, present: Tensor | None = None
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


def _of_piece(records: Records, clip: float, coordinates: PublicMap | None, present: Tensor | None) -> Tensor:
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
