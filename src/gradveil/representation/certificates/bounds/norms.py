"""Operator norms of the steps of a chain: exact, or a certified upper bound; an estimate is called one.

For p = 1 and inf the induced norm is the largest column or row sum of |A|: one pass with |A|. For p = 2 it
is the largest singular value: from the dense matrix AᵀA where that is small, and for larger convolutions an
upper bound from the Fourier transform on a torus that the padded image fits into (Sedghi et al. 2019 for the
circular case; a stride folds the frequencies that it cannot tell apart into one block). Lanczos alone
converges from below, so that it never stands for a bound here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from math import inf, prod, sqrt
from typing import Literal

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from gradveil.errors import CertificateError
from gradveil.representation.layers.rules.activations import Pointwise
from gradveil.representation.layers.rules.arithmetic import Scale
from gradveil.representation.layers.rules.base import Affine, Step
from gradveil.representation.layers.rules.convolution import Convolution
from gradveil.representation.layers.rules.dense import Dense
from gradveil.representation.layers.rules.pooling import MaxPool
from gradveil.representation.layers.rules.shapes import Permute, Reshape

DENSE = 4096  # largest side of a Gram matrix that is formed
DIRECT = 1024  # largest side whose eigenvalues are all computed
SLACKS = (1e-8, 1e-6, 1e-4, 1e-2, 0.2)  # of a verified eigenvalue, relative: the first that the proof allows


@dataclass(frozen=True)
class Norm:
    """The norm of one step, and what kind of number it is."""

    value: float
    kind: Literal["exact", "upper bound", "estimate"]
    how: str


def check_p(p: float) -> float:
    """Return p where it is 1, 2 or inf."""
    if p not in (1, 2, inf):
        raise CertificateError(f"p is {p}; certificates know p = 1, 2 and inf.")
    return p


@singledispatch
def operator_norm(step: Step, p: float, after: Tensor | None = None) -> Norm:
    """Return ||D A||_p→p for a step A; ``after`` is the diagonal D >= 0 (broadcasts to the step's output)."""
    raise CertificateError(f"No norm is known for {type(step).__name__}.")


@operator_norm.register
def _(step: Pointwise, p: float, after: Tensor | None = None) -> Norm:
    return Norm(step.curve.steepest() * _largest(after), "exact", f"steepest slope of {step.curve.name}")


@operator_norm.register
def _(step: MaxPool, p: float, after: Tensor | None = None) -> Norm:
    m = step.overlap()
    value = {1: float(m), 2: sqrt(m), inf: 1.0}[p]
    return Norm(value * _largest(after), "exact" if m == 1 else "upper bound", f"windows overlap {m}-fold")


@operator_norm.register
def _(step: Affine, p: float, after: Tensor | None = None) -> Norm:
    operator = step.operator
    if isinstance(operator, Reshape | Permute):
        return Norm(_largest(after), "exact", "reordering")
    if isinstance(operator, Scale) and operator.source == operator.target:
        factor = operator.one.abs()
        return Norm(float((factor if after is None else factor * after).max()), "exact", "largest factor")
    if p != 2:
        return _row_or_column(step, p, after)
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
