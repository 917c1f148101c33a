"""How far what is computed may be from what is meant: stated once, for every kind of layer.

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

from collections.abc import Callable

import torch
from torch import Tensor

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
