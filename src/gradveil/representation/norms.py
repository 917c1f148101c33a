"""Operator norms of the steps of a chain, exact or certified upper bounds, and what rounding adds to a chain's values.

For p = 1 and inf the induced norm is the largest column or row sum of |A|: one pass with |A|. For p = 2 it
is the largest singular value: from the dense matrix AᵀA where that is small, and for larger convolutions an
upper bound from the Fourier transform on a torus that the padded image fits into (Sedghi et al. 2019 for the
circular case; a stride folds the frequencies that it cannot tell apart into one block). Lanczos alone
converges from below, so that it never stands for a bound here.

A sum of n products computed in any order is off by at most γ_n Σ|a_j||z_j|, γ_n = nu / (1 - nu) (Higham 2002, section
3.1). ``slack`` is that bound for one step; ``forward_error`` adds it up over a chain, in a norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, prod, sqrt
from typing import Literal

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from gradveil.errors import CertificateError
from gradveil.representation.rules.activations import Pointwise
from gradveil.representation.rules.arithmetic import Mean, Scale
from gradveil.representation.rules.base import Affine, Step
from gradveil.representation.rules.products import Dense
from gradveil.representation.rules.shapes import Move
from gradveil.representation.rules.windows import Average, Convolution, MaxPool

ROUNDING = 1e-12  # relative, of a sum computed here in float64: thousands of roundings
DENSE = 4096  # largest side of a Gram matrix that is formed
DIRECT = 1024  # largest side whose eigenvalues are all computed
SLACKS = (1e-8, 1e-6, 1e-4, 1e-2, 0.2)  # of a verified eigenvalue, relative: the first that the proof allows


@dataclass(frozen=True)
class Norm:
    """The norm of one step, and what kind of number it is."""

    value: float
    kind: Literal["exact", "upper bound"]
    how: str


def norm(x: Tensor, p: float) -> Tensor:
    """Return the p-norm of each row (N,) of x (N, ...)."""
    found: Tensor = torch.linalg.vector_norm(x.flatten(1), p, dim=1)
    return found


def dual_norm(x: Tensor, p: float) -> Tensor:
    """Return the norm dual to p of each row: inf for 1, 2 for 2, 1 for inf."""
    return norm(x, {1: inf, 2: 2, inf: 1}[p])


def farthest(x: Tensor, bounds: tuple[float, float], p: float) -> Tensor:
    """Return the largest distance (N,) from x to an image in the data range."""
    low, high = bounds
    return norm(torch.maximum(x - low, high - x), p)


def ratio(distance: Tensor, size: Tensor | float) -> Tensor:
    """Return distance / size (N,): infinite where f does not move at all, 0 where r′ is r."""
    size = torch.as_tensor(size, dtype=distance.dtype, device=distance.device)
    return torch.where(distance > 0, distance / size, torch.zeros_like(distance))


def check_p(p: float) -> float:
    """Return p where it is 1, 2 or inf."""
    if p not in (1, 2, inf):
        raise CertificateError(f"p is {p}; certificates know p = 1, 2 and inf.")
    return p


def operator_norm(step: Step, p: float, after: Tensor | None = None) -> Norm:
    """Return ||D A||_p→p for a step A; ``after`` is the diagonal D >= 0 (broadcasts to the step's output)."""
    if isinstance(step, Pointwise):
        return Norm(step.curve.steepest() * _largest(after), "exact", f"steepest slope of {step.curve.name}")
    if isinstance(step, MaxPool):
        m = step.overlap()
        value = {1: float(m), 2: sqrt(m), inf: 1.0}[p]
        return Norm(value * _largest(after), "exact" if m == 1 else "upper bound", f"windows overlap {m}-fold")
    assert isinstance(step, Affine)
    operator = step.operator
    if isinstance(operator, Move):
        return Norm(_largest(after), "exact" if step.in_size == step.out_size else "upper bound", "entries elsewhere")
    if isinstance(operator, Scale) and operator.source == operator.target:
        factor = operator.one.abs()
        return Norm(float((factor if after is None else factor * after).max()), "exact", "largest factor")
    if p != 2:
        return _row_or_column(step, p, after)
    if isinstance(operator, Average):
        value = spectral(operator.down) * spectral(operator.across) * _largest(after)
        return Norm(value, "exact" if after is None else "upper bound", "singular values of rows and columns")
    if isinstance(operator, Dense):
        return _matrix_norm(operator.weight, after if len(step.out_shape) == 1 else None, after)
    if min(step.in_size, step.out_size) <= DENSE:
        return Norm(sqrt(largest_eigenvalue(gram(step, after))), "exact", "singular values of the whole map")
    mixed = sqrt(operator_norm(step, 1).value * operator_norm(step, inf).value)
    torus = torus_bound(operator) if isinstance(operator, Convolution) else inf
    how = "Fourier transform on a torus" if torus <= mixed else "geometric mean of the 1- and inf-norms"
    return Norm(min(torus, mixed) * _largest(after), "upper bound", how)


def _matrix_norm(weight: Tensor, rows: Tensor | None, after: Tensor | None) -> Norm:
    if rows is not None:
        return Norm(spectral(weight * rows.expand(len(weight))[:, None]), "exact", "singular values")
    return Norm(spectral(weight) * _largest(after), "exact" if after is None else "upper bound", "singular values")


def _largest(after: Tensor | None) -> float:
    return 1.0 if after is None else float(after.max())


def _row_or_column(step: Affine, p: float, after: Tensor | None) -> Norm:
    d = torch.ones((), dtype=torch.float64) if after is None else after
    if p == inf:
        rows = step.linear(torch.ones(1, *step.in_shape, dtype=torch.float64), absolute=True) * d
        return Norm(float(rows.max()), "exact", "largest row sum")
    columns = step.transposed(d.expand(1, *step.out_shape).to(torch.float64), absolute=True)
    return Norm(float(columns.max()), "exact", "largest column sum")


def spectral(matrix: Tensor) -> float:
    """Return the largest singular value of a matrix (or of the largest of a stack), certified from above."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    side = min(matrix.shape[-2:])
    if side == 0:
        return 0.0
    if side <= DIRECT // 2 and matrix.ndim == 2:
        return float(torch.linalg.matrix_norm(matrix, 2))
    return sqrt(largest_eigenvalue(matrix @ matrix.mH if wide else matrix.mH @ matrix))


def gram(step: Affine, after: Tensor | None = None, chunk: int = 256) -> Tensor:
    """Return AᵀD²A or D A AᵀD, whichever is smaller, without forming A."""
    d = torch.ones((), dtype=torch.float64) if after is None else after
    inward = step.in_size <= step.out_size
    side, shape = (step.in_size, step.in_shape) if inward else (step.out_size, step.out_shape)
    rows = []
    for start in range(0, side, chunk):
        unit = torch.eye(side, dtype=torch.float64)[start : start + chunk].reshape(-1, *shape)
        part = step.transposed(step.linear(unit) * d * d) if inward else step.linear(step.transposed(unit * d)) * d
        rows.append(part.flatten(1))
    return torch.cat(rows)


def largest_eigenvalue(grams: Tensor) -> float:
    """Return an upper bound of the largest eigenvalue of a positive semidefinite matrix (..., n, n), tight to 1e-8.

    Small: all eigenvalues, exact to rounding. Large: Lanczos for the value, then a Cholesky factor of
    λ I - G as the proof that no eigenvalue exceeds λ.
    """
    n = grams.shape[-1]
    if n <= DIRECT or grams.ndim > 2:
        return max(0.0, float(torch.linalg.eigvalsh(grams).max()))
    start = np.random.default_rng(0).standard_normal(n)
    value = max(float(eigsh(grams.numpy(), k=1, which="LA", v0=start, return_eigenvectors=False)[0]), 1e-300)
    for slack in SLACKS:
        bound = value * (1 + slack)
        if int(torch.linalg.cholesky_ex(bound * torch.eye(n, dtype=grams.dtype) - grams).info) == 0:
            return bound
    return float(grams.abs().sum(1).max())


def torus_bound(conv: Convolution) -> float:
    """Return an upper bound of a zero-padded convolution's largest singular value.

    The map is: put the image on a torus of side n + reach of the kernel (norm 1), convolve in a circle, keep
    every s-th entry, cut out the result (norm at most 1). In the Fourier domain the middle part is block
    diagonal: for every coarse frequency the s^k frequencies that the stride folds together, divided by s^(k/2).
    """
    groups, out = conv.groups, conv.weight.shape[0]
    weight = conv.weight.reshape(groups, out // groups, *conv.weight.shape[1:])
    kernel, k = conv.weight.shape[2:], len(conv.stride)
    sides = [
        -(-(n + d * (w - 1)) // s) * s
        for n, d, w, s in zip(conv.source[2:], conv.dilation, kernel, conv.stride, strict=True)
    ]
    spread = torch.zeros(*weight.shape[:3], *sides, dtype=torch.float64)
    spots = torch.meshgrid(*(torch.arange(w) * d for w, d in zip(kernel, conv.dilation, strict=True)), indexing="ij")
    spread.flatten(3)[..., sum(spot * prod(sides[i + 1 :]) for i, spot in enumerate(spots))] = weight
    transform = torch.fft.fftn(spread, dim=tuple(range(3, 3 + k)))  # (groups, out, in, *sides)
    return max(_folded(transform[g], conv.stride) for g in range(groups))


def _folded(transform: Tensor, stride: tuple[int, ...]) -> float:
    out, channels, *sides = transform.shape
    split = [size for n, s in zip(sides, stride, strict=True) for size in (s, n // s)]  # frequency = j n/s + coarse
    k = len(stride)
    folds, coarse = [2 + 2 * i for i in range(k)], [3 + 2 * i for i in range(k)]
    blocks = transform.reshape(out, channels, *split).permute(*coarse, 0, 1, *folds)
    blocks = blocks.reshape(-1, out, channels * prod(stride))
    side = min(blocks.shape[1:])
    largest = 0.0
    for part in blocks.split(max(1, 2**24 // side**2)):
        largest = max(largest, largest_eigenvalue(part @ part.mH if side == out else part.mH @ part))
    return sqrt(largest / prod(stride))


def lanczos(
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    tolerance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return estimates of the largest singular values of N maps at once (N,), and their relative residuals (N,).

    Lanczos on AᵀA with full reorthogonalisation, from ``start`` (N, d), until every residual is below the
    tolerance. The residual of the Ritz pair says that *a* singular value lies that near; that it is the largest is
    likely, not proved. Never above the true norm.
    """
    q = start / start.norm(dim=1, keepdim=True)
    basis = q.new_empty(len(q), steps, q.shape[1])  # (N, steps, d)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for step in range(steps):
        basis[:, step] = q
        w = backward(forward(q))
        diagonal.append((w * q).sum(1))
        span = basis[:, : step + 1]  # (N, j, d)
        before, w = w.norm(dim=1), _remove(w, span)
        if bool((w.norm(dim=1) < 0.01 * before).any()):
            w = _remove(w, span)  # what is left after much cancels is mostly rounding: once more
        size, scale = w.norm(dim=1), torch.stack(diagonal).amax(0)
        size = torch.where(size > 100 * torch.finfo(w.dtype).eps * scale, size, 0.0)  # 0: the space is exhausted
        beside.append(size)
        top, residual = _ritz(diagonal, beside)
        if bool((residual <= tolerance).all()):
            break
        q = torch.where(size[:, None] > 0, w / size[:, None].clamp_min(torch.finfo(w.dtype).tiny), 0.0)
    return top.sqrt().to(start.dtype), residual.to(start.dtype)


def _remove(w: Tensor, span: Tensor) -> Tensor:
    """Return w (N, d) without its part in the span (N, j, d) of orthonormal rows."""
    return w - ((span @ w[:, :, None]).mT @ span)[:, 0]


def _ritz(diagonal: list[Tensor], beside: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest Ritz value (N,) of AᵀA and its residual relative to it."""
    off = torch.diag_embed(torch.stack(beside[:-1], 1), offset=1) if len(beside) > 1 else 0.0
    tri = torch.diag_embed(torch.stack(diagonal, 1)) + off
    values, vectors = torch.linalg.eigh(tri.double(), UPLO="U")
    top = values[:, -1].clamp_min(0)
    return top, beside[-1].double() * vectors[:, -1, -1].abs() / top.clamp_min(1e-300)


OWN = 2.0**-53  # of the float64 that bounds are computed in
OTHERS = 10  # roundings of one operation beside its sum: batch norm's root and quotient, an exponential, a bias
FASTER = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}  # what float32 products may be rounded to


@dataclass(frozen=True)
class Precision:
    """How a model rounds: each number that enters a sum, and each sum, relative; what is smaller than tiny vanishes."""

    name: str
    entry: float
    sums: float
    tiny: float

    @classmethod
    def of(cls, model: nn.Module, like: torch.dtype = torch.float64) -> "Precision":
        """Return the coarsest precision that the model computes in; ``like`` where it has no numbers of its own."""
        held = [t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()]
        places = {t.device.type for t in held} | {"cpu"}
        dtypes = {t.dtype for t in held} or {like}
        dtypes |= {torch.get_autocast_dtype(place) for place in places if torch.is_autocast_enabled(place)}
        coarsest = max(dtypes, key=lambda d: torch.finfo(d).eps)
        made = cls.exactly(coarsest)
        if coarsest != torch.float32:
            return made
        entry = FASTER[torch.get_float32_matmul_precision()]
        convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in model.modules())
        if "cuda" in places and convolves and torch.backends.cudnn.allow_tf32:
            entry = max(entry, FASTER["high"])
        return cls(made.name, max(made.entry, entry), made.sums, made.tiny)

    @classmethod
    def exactly(cls, dtype: torch.dtype) -> "Precision":
        """Return the precision of one type; sums are kept in single precision at least."""
        found = torch.finfo(dtype)
        unit = found.eps / 2
        return cls(str(dtype).removeprefix("torch."), unit, min(unit, 2.0**-24), found.tiny)

    def share(self, roundings: int, operations: int = 1) -> float:
        """Return the relative error of a sum: so many roundings one after the other, in so many operations."""
        lost = roundings * self.sums
        if lost > 0.1:
            raise CertificateError(
                f"Sums of {roundings} numbers in {self.name} may lose every digit, so nothing can be certified. "
                "Certify the model in a higher precision: model.double()."
            )
        return lost / (1 - lost) + 4 * operations * self.entry


def addends(step: Affine) -> int:
    """Return how many products one output of a linear map is the sum of, at most."""
    operator = step.operator
    if isinstance(operator, Scale):
        return 1
    if isinstance(operator, Dense | Convolution):
        return operator.weight[0].numel()
    if isinstance(operator, Average):
        return prod(int((matrix != 0).sum(1).max()) for matrix in (operator.down, operator.across))
    if isinstance(operator, Mean):
        return prod(operator.source[d] for d in operator.dims)
    return step.in_size


def _share(step: Affine, precision: Precision) -> float:
    """Return the relative error of one output: the model's, and that of computing the bound itself."""
    operations = 1 + step.joined
    theirs = precision.share(addends(step) + OTHERS * operations, operations)
    return theirs + 8 * max(step.in_size, step.out_size) * OWN


def slack(step: Step, size: Tensor, precision: Precision) -> Tensor:
    """Return how far each computed output (N, *out_shape) can be from the exact one, for an input of |.| <= size."""
    if isinstance(step, Pointwise):
        curve = step.curve
        at_zero = float(curve.function(torch.zeros(1, dtype=torch.float64)).abs())
        gain, tiny = _gain(step, precision), 0.0 if curve.unit is None else precision.tiny
        return gain * (2 * curve.steepest() * size + at_zero + (curve.unit or 0.0)) + curve.off + tiny
    if not isinstance(step, Affine) or isinstance(step.operator, Move):
        return torch.zeros((), dtype=torch.float64)  # the same numbers at other places
    whole = step.linear(size, absolute=True) + step.offset_size
    return _share(step, precision) * whole + precision.tiny * (addends(step) + OTHERS)


def _gain(step: Pointwise, precision: Precision) -> float:
    return 16 * OWN + (0.0 if step.curve.unit is None else precision.share(OTHERS))


def _growth(step: Step, p: float, precision: Precision) -> float:
    """Return how much the p-norm of the slack grows per unit of the p-norm of the input's size."""
    if isinstance(step, Pointwise):
        return 2 * _gain(step, precision) * step.curve.steepest()
    if not isinstance(step, Affine) or isinstance(step.operator, Move):
        return 0.0
    columns, rows = (operator_norm(step, q).value for q in (1, inf))
    size: float = columns ** (1 / p) * rows ** (1 - 1 / p)  # of |A|, between its 1- and inf-norm
    return _share(step, precision) * size


def forward_error(
    steps: Sequence[Step], norms: Sequence[Norm], x: Tensor, p: float, precision: Precision
) -> tuple[Tensor, float]:
    """Return e (N,) and t: for any X′ the computed f(X′) is within e + t ||X′ - X||_p of the exact one, in the p-norm.

    By induction over the steps, s being the Lipschitz constant so far: a computed input lies within e + (s + t) D of
    the exact values at X, whose own sizes are known.
    """
    e, s, t = torch.zeros(len(x), dtype=torch.float64), 1.0, 0.0
    z = x.to(torch.float64)
    for step, norm in zip(steps, norms, strict=True):
        new = slack(step, z.abs(), precision).expand(len(z), *step.out_shape).flatten(1)
        added: Tensor = torch.linalg.vector_norm(new, p, dim=1)
        growth = _growth(step, p, precision)
        e = (norm.value + growth) * e + added
        t = (norm.value + growth) * t + growth * s
        s *= norm.value
        z = step(z)
    return e * (1 + 1e-9), t * (1 + 1e-9)
