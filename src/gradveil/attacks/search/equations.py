"""The equations of a Gauss-Newton attack: the prior over the unknowns, rows to fulfil, rounds below one another.

Kinks of ReLU-like calls are rounded over a width in units of the spread of their input.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import jvp, vmap
from torch.overrides import TorchFunctionMode

from gradveil import pace
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.types import GaussianPrior, Observation

_RELU = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_LEAKY = {F.leaky_relu, F.leaky_relu_}
_CLIPPED = {F.hardtanh, F.hardtanh_}
_KINKED = _RELU | _LEAKY | _CLIPPED | {F.relu6}


class Smoothing(TorchFunctionMode):
    """Within, the i-th ReLU-like call is rounded over the i-th width; without widths, its input's spread is noted."""

    def __init__(self, widths: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._widths = None if widths is None else iter(widths)
        self.scales: list[float] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KINKED and self._widths is not None:
            return _rounded(func, args[0], next(self._widths), args[1:], kwargs or {})
        if func in _KINKED:
            self.scales.append(float(args[0].std(correction=0)) or 1.0)
        return func(*args, **(kwargs or {}))


def kink_scales(forward: Callable[[], object]) -> list[float]:
    """Return the spread of the input of each ReLU-like call of a forward pass, in the order of the calls."""
    listening = Smoothing()
    with torch.no_grad(), listening:
        forward()
    return listening.scales


def _rounded(func: Callable[..., Any], z: Tensor, t: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if func in _LEAKY:
        slope: float = args[0] if args else kwargs.get("negative_slope", 0.01)
        return slope * z + (1 - slope) * _ramp(z, t)
    if func is F.relu6:
        return _ramp(z, t) - _ramp(z - 6, t)
    if func in _CLIPPED:
        low: float = args[0] if args else kwargs.get("min_val", -1.0)
        high: float = args[1] if len(args) > 1 else kwargs.get("max_val", 1.0)
        return low + _ramp(z - low, t) - _ramp(z - high, t)
    return _ramp(z, t)


def _ramp(z: Tensor, t: Tensor) -> Tensor:
    return t * F.softplus(z / t)


@dataclass(frozen=True)
class Prior:
    """N examples of d numbers, each N(mean, Σ) with Σ = V diag(v) Vᵀ + ridge (I - V Vᵀ), and k standard normal numbers.

    Points are vectors of n = N d + k numbers.
    """

    examples: int
    extra: int  # k
    mean: Tensor  # (d,)
    basis: Tensor  # V (d, m), orthonormal columns
    variances: Tensor  # v (m,), ridge included
    ridge: float  # variance in every other direction

    @classmethod
    def of(cls, seen: Observation, extra: int, device: torch.device) -> "Prior":
        """Return the observation's prior; where it has none, independent pixels around mid-grey."""
        d = int(torch.Size(seen.input_shape).numel())
        low, high = seen.bounds
        prior = seen.prior
        if prior is None:
            # The variance of a uniform draw from the data range.
            prior = GaussianPrior.white(torch.full((d,), (low + high) / 2), (high - low) / 12**0.5)
        if prior.mean.numel() != d:
            raise AttackError(
                f"The prior is over {prior.mean.numel()} numbers and an example has {d} {seen.input_shape}. "
                "Fit it to public data of the same shape."
            )
        basis, scales = _orthogonal(prior.factor.to(device, torch.float64))
        mean = prior.mean.to(device, torch.float64)
        return cls(seen.num_examples, extra, mean, basis, scales**2 + prior.ridge, prior.ridge)

    @property
    def pixels(self) -> int:
        return self.examples * len(self.mean)

    def center(self) -> Tensor:
        return torch.cat([self.mean.repeat(self.examples), self.mean.new_zeros(self.extra)])

    def precise(self, z: Tensor) -> Tensor:
        return self._apply(z, 1 / self.variances, 1 / self.ridge)

    def covary(self, z: Tensor) -> Tensor:
        return self._apply(z, self.variances, self.ridge)

    def precision(self) -> Tensor:
        return self.precise(torch.eye(self.pixels + self.extra, dtype=self.mean.dtype, device=self.mean.device))

    def draw(self, count: int, rng: Generator) -> Tensor:
        """Return draws (count, n) around zero."""
        white = torch.randn(count, self.pixels, generator=rng, dtype=self.mean.dtype, device=rng.device)
        beside = white.new_zeros(count, self.extra)
        return self._apply(torch.cat([white, beside], 1).to(self.mean.device), self.variances.sqrt(), self.ridge**0.5)

    def _apply(self, z: Tensor, inside: Tensor, outside: float) -> Tensor:
        v = z[:, : self.pixels].reshape(len(z), self.examples, -1)
        v = outside * v + ((v @ self.basis) * (inside - outside)) @ self.basis.T
        return torch.cat([v.flatten(1), z[:, self.pixels :]], 1)


def _orthogonal(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal columns and their scales; a fitted prior's columns are orthogonal already."""
    gram = factor.T @ factor
    lengths = gram.diagonal().sqrt()
    if len(lengths) and bool((gram - gram.diagonal().diag()).abs().max() > 1e-5 * lengths.max() ** 2):
        basis, lengths, _ = torch.linalg.svd(factor, full_matrices=False)
        return basis, lengths
    kept = lengths > 1e-6 * lengths.max() if len(lengths) else lengths.bool()
    return factor[:, kept] / lengths[kept], lengths[kept]


def refuse_recurrent(model: nn.Module) -> None:
    """Raise where the model has a recurrent layer: torch has no tangents of these."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            raise AttackError(
                f"Layer {name!r} is a {type(module).__name__}, and torch cannot differentiate these forwards. Use dlg, "
                "gs or fedavg."
            )


TANGENTS = 196  # of one problem's Jacobian at once
TOGETHER = 1024  # unknowns of all problems whose Jacobians are written out at once

Trial = Callable[..., Tensor]
Push = Callable[[Tensor], Tensor]  # direction (B, n) -> (B, R)


@dataclass(frozen=True)
class Equations:
    """The equations of B problems, R rows each, in float64."""

    model: nn.Module
    one: Trial  # z (n,), each of ``given``, widths (kinks,), smooth? -> (R,)
    given: tuple[Tensor, ...]  # (B, ...) each: what a problem's equations depend on beside the unknowns
    scales: Tensor  # (B, kinks), spread of the input of each ReLU-like call
    seen: Tensor  # (B, R)
    weights: Tensor  # (B, R), of a row's squared residual
    noise: Tensor  # (B, R), known standard deviation; a row without is infinitely sure, save for the floor
    rms: Tensor  # (B, R), what the floor is relative to
    randomness: Literal["error", "same"] = "error"  # of ``one``, for vmap

    def take(self, index: Tensor) -> "Equations":
        parts = {name: getattr(self, name)[index] for name in ("scales", "seen", "weights", "noise", "rms")}
        return replace(self, given=tuple(value[index] for value in self.given), **parts)

    def residual(self, z: Tensor, width: Tensor | None) -> Tensor:
        """Return F(z) - seen (B, R) for z (B, n), kinks rounded over ``width`` (B,); None: not at all."""
        with quiet(self.model), torch.no_grad():
            return self._rows(z, width) - self.seen

    def jacobian(self, z: Tensor, width: Tensor) -> Tensor:
        """Return dF/dz of every problem (B, n, R); for as many problems as memory allows."""
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        # Tangents of several small problems run together; those of a large one in parts.
        chunk = None if len(z) > 1 else TANGENTS

        rows = self._of(width)

        def one(z: Tensor, *given: Tensor) -> Tensor:
            along = self._vmap(lambda v: jvp(lambda t: rows(t, *given), (z,), (v,))[1], chunk_size=chunk)
            if chunk is None:
                whole: Tensor = along(eye)
                return whole
            columns = []
            for i, part in enumerate(eye.split(chunk)):
                columns.append(along(part))
                if pace.part_of_step((i + 1) * chunk / len(eye)) and (i + 1) * chunk < len(eye):
                    raise pace.OutOfTime  # a part of it is nothing
            return torch.cat(columns)

        with quiet(self.model), torch.no_grad():
            return self._each(one)(z, *self._given(width))

    def pull(self, z: Tensor, u: Tensor, width: Tensor) -> Tensor:
        """Return (dF/dz)ᵀ u at z for u (B, R)."""
        with torch.enable_grad(), quiet(self.model):
            free = z.detach().requires_grad_()
            (pulled,) = torch.autograd.grad(self._rows(free, width), free, u)
        return pulled

    def curvature(self, z: Tensor, weights: Tensor, width: Tensor) -> Push:
        """Return v (B, n) -> (dF/dz)ᵀ (weights · dF/dz v) at z; ``weights`` is (B, R).

        (dF/dz)ᵀ u is linear in u, and its derivative by u, transposed, is dF/dz: one graph serves all directions.
        """

        def graph() -> tuple[Tensor, ...]:
            with torch.enable_grad(), quiet(self.model):
                free = z.detach().requires_grad_()
                rows = self._rows(free, width)
                u = torch.zeros_like(rows).requires_grad_()
                (pulled,) = torch.autograd.grad(rows, free, u, create_graph=True)
            return free, rows, u, pulled

        kept = None if z.is_cuda else graph()  # on a GPU a product is captured as a whole

        def curved(v: Tensor) -> Tensor:
            free, rows, u, pulled = kept or graph()
            (pushed,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
            (back,) = torch.autograd.grad(rows, free, weights * pushed, retain_graph=True)
            return back

        return curved

    def _rows(self, z: Tensor, width: Tensor | None) -> Tensor:
        return self._each(self._of(width))(z, *self._given(width))

    def _of(self, width: Tensor | None) -> Callable[..., Tensor]:
        smooth = width is not None and self.scales.shape[1] > 0
        return lambda z, *given: self.one(z, *given, smooth)

    def _each(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function of one problem as one of all: of the only one there is, as it is."""
        if len(self.seen) > 1:
            return self._vmap(function)
        return lambda *stacked: function(*(value[0] for value in stacked))[None]

    def _vmap(self, function: Callable[..., Tensor], chunk_size: int | None = None) -> Callable[..., Tensor]:
        mapped: Callable[..., Tensor] = vmap(function, chunk_size=chunk_size, randomness=self.randomness)
        return mapped

    def _given(self, width: Tensor | None) -> tuple[Tensor, ...]:
        return (*self.given, self.scales if width is None else self.scales * width[:, None])


def input_equations(
    model: nn.Module, f: Callable[[Tensor], Tensor], x: Tensor, seen: Tensor, level: Tensor,
    weights: Tensor | None = None, noise: Tensor | None = None,
) -> Equations:  # fmt: skip
    """Return the equations f = seen (B, R) of B examples by themselves, with kinks that spread as at examples x."""

    def one(z: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        with Smoothing(widths.unbind()) if smooth else nullcontext():
            return f(z.reshape(1, *x.shape[1:])).flatten()

    with quiet(model):
        scales = torch.tensor(kink_scales(lambda: f(x))).to(seen).expand(len(seen), -1)
    weights = torch.ones_like(seen) if weights is None else weights
    noise = torch.zeros_like(seen) if noise is None else noise
    return Equations(model, one, (), scales, seen, weights, noise, level.expand_as(seen))


def normal_equations(
    rows: Equations, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Kᵀ V⁻¹ K (b, n, n) and Kᵀ V⁻¹ residual (b, n)."""
    root = weights.sqrt()[:, None]
    scaled = rows.jacobian(x, width) * root  # (b, n, R)
    return scaled @ scaled.mT, (scaled @ (root * residual[:, None]).mT)[..., 0]


def stack(parts: Sequence[Equations], pixels: int, own: Sequence[int]) -> Equations:
    """Return the equations of all rounds below one another: unknowns of the examples, then ``own`` of each round."""
    if len(parts) == 1:
        return parts[0]
    first, every = parts[0], torch.arange(pixels + sum(own), device=parts[0].seen.device)
    places = [torch.cat([every[:pixels], mine]) for mine in every[pixels:].split(list(own))]
    kinks = [part.scales.shape[1] for part in parts]

    def one(z: Tensor, *more: Any) -> Tensor:
        *given, widths, smooth = more
        found, left = [], iter(given)
        for part, place, mine in zip(parts, places, widths.split(kinks), strict=True):
            with nullcontext() if part.model is first.model else quiet(part.model):
                found.append(part.one(z[place], *islice(left, len(part.given)), mine, smooth))
        return torch.cat(found)

    whole: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts], 1)
        for name in ("scales", "seen", "weights", "noise", "rms")
    }
    return replace(first, one=one, given=tuple(value for part in parts for value in part.given), **whole)
