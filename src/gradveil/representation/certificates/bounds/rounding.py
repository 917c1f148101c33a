"""How far what a model computes, in its own precision, can lie from what its chain is exactly.

A sum of n products computed in any order is off by at most γ_n Σ|a_j||z_j|, γ_n = nu / (1 - nu) (Higham 2002, section
3.1). ``slack`` is that bound for one step; ``forward_error`` adds it up over a chain, in a norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import chain
from math import inf, prod

import torch
from torch import Tensor, nn

from gradveil.errors import CertificateError
from gradveil.representation.certificates.bounds.norms import Norm, operator_norm
from gradveil.representation.layers.rules.activations import Pointwise
from gradveil.representation.layers.rules.arithmetic import Mean, Scale
from gradveil.representation.layers.rules.base import Affine, Step
from gradveil.representation.layers.rules.convolution import Convolution
from gradveil.representation.layers.rules.dense import Dense
from gradveil.representation.layers.rules.pooling import MaxPool
from gradveil.representation.layers.rules.shapes import Move

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
    if isinstance(operator, Mean):
        return prod(operator.source[d] for d in operator.dims)
    return step.in_size


def _share(step: Affine, precision: Precision) -> float:
    """Return the relative error of one output: the model's, and that of computing the bound itself."""
    operations = 1 + step.joined
    theirs = precision.share(addends(step) + OTHERS * operations, operations)
    return theirs + 8 * max(step.in_size, step.out_size) * OWN


@singledispatch
def slack(step: Step, size: Tensor, precision: Precision) -> Tensor:
    """Return how far each computed output (N, *out_shape) can be from the exact one, for an input of |.| <= size."""
    raise CertificateError(f"No rounding error is known for {type(step).__name__}.")


@slack.register
def _(step: Affine, size: Tensor, precision: Precision) -> Tensor:
    if isinstance(step.operator, Move):
        return torch.zeros((), dtype=torch.float64)
    whole = step.linear(size, absolute=True) + step.offset_size
    return _share(step, precision) * whole + precision.tiny * (addends(step) + OTHERS)


@slack.register
def _(step: Pointwise, size: Tensor, precision: Precision) -> Tensor:
    curve = step.curve
    at_zero = float(curve.function(torch.zeros(1, dtype=torch.float64)).abs())
    gain, tiny = _gain(step, precision), 0.0 if curve.unit is None else precision.tiny
    return gain * (2 * curve.steepest() * size + at_zero + (curve.unit or 0.0)) + curve.off + tiny


def _gain(step: Pointwise, precision: Precision) -> float:
    return 16 * OWN + (0.0 if step.curve.unit is None else precision.share(OTHERS))


@slack.register
def _(step: MaxPool, size: Tensor, precision: Precision) -> Tensor:
    return torch.zeros((), dtype=torch.float64)


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
