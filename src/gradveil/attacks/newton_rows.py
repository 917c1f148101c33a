"""Equations F(z) = seen of problems that share a model, and products with their Jacobian, by torch.func."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap

from gradveil.attacks.gradients import quiet

TANGENTS = 196  # of the Jacobian at once


@dataclass(frozen=True)
class Rows:
    """The equations of B problems, R rows each, in float64."""

    model: nn.Module
    one: Callable[..., Tensor]  # z (n,), each of ``given``, widths (kinks,), smooth? -> (R,)
    given: tuple[Tensor, ...]  # (B, ...) each: what a problem's equations depend on beside the unknowns
    scales: Tensor  # (B, kinks), spread of the input of each ReLU-like call
    seen: Tensor  # (B, R)
    weights: Tensor  # (B, R), of a row's squared residual
    noise: Tensor  # (B, R), known standard deviation; a row without is infinitely sure, save for the floor
    rms: Tensor  # (B, R), what the floor is relative to

    def take(self, index: Tensor) -> "Rows":
        """Return the equations of some of the problems."""
        parts = {name: getattr(self, name)[index] for name in ("scales", "seen", "weights", "noise", "rms")}
        return replace(self, given=tuple(value[index] for value in self.given), **parts)

    def residual(self, z: Tensor, width: Tensor | None) -> Tensor:
        """Return F(z) - seen (B, R) for z (B, n), kinks rounded over ``width`` (B,); None: not at all."""
        with quiet(self.model), torch.no_grad():
            return vmap(self._of(width))(z, *self._given(width)) - self.seen

    def jacobian(self, b: int, z: Tensor, width: Tensor) -> Tensor:
        """Return dF/dz of problem b as (n, R), for its z (n,)."""
        given = tuple(value[b] for value in self._given(width))
        function = self._of(width)
        eye = torch.eye(len(z), dtype=z.dtype, device=z.device)
        with quiet(self.model), torch.no_grad():
            columns: Tensor = vmap(
                lambda v: jvp(lambda t: function(t, *given), (z,), (v,))[1], chunk_size=TANGENTS
            )(eye)  # fmt: skip
            return columns

    def push(self, z: Tensor, v: Tensor, width: Tensor) -> Tensor:
        """Return dF/dz v (B, R) for v (B, n)."""
        function = self._of(width)

        def one(z: Tensor, v: Tensor, *given: Tensor) -> Tensor:
            pushed: Tensor = jvp(lambda t: function(t, *given), (z,), (v,))[1]
            return pushed

        with quiet(self.model), torch.no_grad():
            return vmap(one)(z, v, *self._given(width))

    def pull(self, z: Tensor, u: Tensor, width: Tensor) -> Tensor:
        """Return (dF/dz)ᵀ u (B, n) for u (B, R)."""
        function = self._of(width)

        def one(z: Tensor, u: Tensor, *given: Tensor) -> Tensor:
            pulled: Tensor = vjp(lambda t: function(t, *given), z)[1](u)[0]
            return pulled

        with quiet(self.model):
            return vmap(one)(z, u, *self._given(width)).detach()

    def _of(self, width: Tensor | None) -> Callable[..., Tensor]:
        smooth = width is not None and self.scales.shape[1] > 0
        return lambda z, *given: self.one(z, *given, smooth)

    def _given(self, width: Tensor | None) -> tuple[Tensor, ...]:
        return (*self.given, self.scales if width is None else self.scales * width[:, None])
