"""Equations F(z) = seen of problems that share a model, and products with their Jacobian, by torch.func."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap

from gradveil.attacks.gradients import quiet

TANGENTS = 196  # of one problem's Jacobian at once
TOGETHER = 1024  # unknowns of all problems whose Jacobians are written out at once

Trial = Callable[..., Tensor]
Direct = Callable[..., tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class Rows:
    """The equations of B problems, R rows each, in float64."""

    model: nn.Module
    one: Trial  # z (n,), each of ``given``, widths (kinks,), smooth? -> (R,)
    given: tuple[Tensor, ...]  # (B, ...) each: what a problem's equations depend on beside the unknowns
    scales: Tensor  # (B, kinks), spread of the input of each ReLU-like call
    seen: Tensor  # (B, R)
    weights: Tensor  # (B, R), of a row's squared residual
    noise: Tensor  # (B, R), known standard deviation; a row without is infinitely sure, save for the floor
    rms: Tensor  # (B, R), what the floor is relative to
    # The same written out, for all problems: z (B, n), each of ``given``, widths (B, kinks), smooth?, tangents?
    # -> (B, R), and the Jacobian in parts (n, B, some of the rows).
    direct: Direct | None = None

    def take(self, index: Tensor) -> "Rows":
        """Return the equations of some of the problems."""
        parts = {name: getattr(self, name)[index] for name in ("scales", "seen", "weights", "noise", "rms")}
        return replace(self, given=tuple(value[index] for value in self.given), **parts)

    def residual(self, z: Tensor, width: Tensor | None) -> Tensor:
        """Return F(z) - seen (B, R) for z (B, n), kinks rounded over ``width`` (B,); None: not at all."""
        with quiet(self.model), torch.no_grad():
            if self.direct is not None:
                return self.direct(z, *self._given(width), self._smooth(width), False)[0] - self.seen
            return vmap(self._of(width))(z, *self._given(width)) - self.seen

    def jacobian(self, z: Tensor, width: Tensor) -> list[Tensor]:
        """Return dF/dz of every problem, in parts (B, n, some of the rows); for as many problems as memory allows."""
        function = self._of(width)
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        # Tangents of several small problems run together; those of a large one in parts.
        chunk = None if len(z) > 1 else TANGENTS

        def one(z: Tensor, *given: Tensor) -> Tensor:
            columns: Tensor = vmap(lambda v: jvp(lambda t: function(t, *given), (z,), (v,))[1], chunk_size=chunk)(eye)
            return columns

        with quiet(self.model), torch.no_grad():
            if self.direct is not None:
                return [
                    part.transpose(0, 1) for part in self.direct(z, *self._given(width), self._smooth(width), True)[1]
                ]
            if len(z) == 1:
                return [one(z[0], *(value[0] for value in self._given(width)))[None]]
            return [vmap(one)(z, *self._given(width))]

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
        return lambda z, *given: self.one(z, *given, self._smooth(width))

    def _smooth(self, width: Tensor | None) -> bool:
        return width is not None and self.scales.shape[1] > 0

    def _given(self, width: Tensor | None) -> tuple[Tensor, ...]:
        return (*self.given, self.scales if width is None else self.scales * width[:, None])
