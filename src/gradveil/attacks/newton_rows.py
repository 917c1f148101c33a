"""The equations of an update, row by row: what a trial input would have sent, less what was sent.

For a batch of one the bias gradient of the last layer is p - y itself. A trained network's p is so close to y that
its whole update is scaled by a number the trial input gets wrong by orders of magnitude; so there the seen p - y is
put into the backward pass in place of the trial's own (``clamped``), and the trial's log-probabilities join the
equations in its stead.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from gradveil.attacks.fedavg_unroll import unroll
from gradveil.attacks.gradients import quiet, soft_cross_entropy
from gradveil.attacks.newton_smooth import Smoothing, kink_scales
from gradveil.tree import Params
from gradveil.types import Observation

SMALLEST = 1e-30  # a probability below it was rounded away on the client, and gives no equation
TANGENTS = 196  # of the Jacobian at once

OneRows = Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Rows:
    """The equations of B problems that share a model: F(x) = seen, R rows each, float64."""

    model: nn.Module
    one: OneRows  # x (n,), y (N, K), p - y (K,), widths (kinks,), smooth? -> (R,)
    labels: Tensor  # (B, N, K) one-hot
    clamps: Tensor  # (B, K), the seen p - y
    scales: Tensor  # (B, kinks), spread of each kink's input
    seen: Tensor  # (B, R)
    weights: Tensor  # (B, R), of a row's squared residual
    noise: Tensor  # (B, R), known standard deviation
    rms: Tensor  # (B, R), root mean square of the tensor that the row belongs to

    @property
    def kinked(self) -> bool:
        """Whether the model has ReLU-like calls to smooth."""
        return self.scales.shape[1] > 0

    def take(self, index: Tensor) -> "Rows":
        """Return the equations of some of the problems."""
        names = ("labels", "clamps", "scales", "seen", "weights", "noise", "rms")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def residual(self, x: Tensor, width: Tensor | None) -> Tensor:
        """Return F(x) - seen (B, R) for x (B, n), kinks rounded over ``width`` (B,); None: not at all."""
        with quiet(self.model), torch.no_grad():
            return vmap(self._of(width))(x, *self._given(width)) - self.seen

    def jacobian(self, b: int, x: Tensor, width: Tensor) -> Tensor:
        """Return dF/dx of problem b as (n, R), for its x (n,)."""
        given = tuple(value[b] for value in self._given(width))
        function = self._of(width)
        eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
        with quiet(self.model), torch.no_grad():
            columns: Tensor = vmap(lambda v: jvp(lambda t: function(t, *given), (x,), (v,))[1], chunk_size=TANGENTS)(
                eye
            )
            return columns

    def push(self, x: Tensor, v: Tensor, width: Tensor) -> Tensor:
        """Return dF/dx v (B, R) for v (B, n)."""
        function = self._of(width)

        def one(x: Tensor, v: Tensor, *given: Tensor) -> Tensor:
            pushed: Tensor = jvp(lambda t: function(t, *given), (x,), (v,))[1]
            return pushed

        with quiet(self.model), torch.no_grad():
            return vmap(one)(x, v, *self._given(width))

    def pull(self, x: Tensor, u: Tensor, width: Tensor) -> Tensor:
        """Return (dF/dx)ᵀ u (B, n) for u (B, R)."""
        function = self._of(width)

        def one(x: Tensor, u: Tensor, *given: Tensor) -> Tensor:
            pulled: Tensor = vjp(lambda t: function(t, *given), x)[1](u)[0]
            return pulled

        with quiet(self.model):
            return vmap(one)(x, u, *self._given(width)).detach()

    def _of(self, width: Tensor | None) -> Callable[..., Tensor]:
        return lambda x, y, clamp, widths: self.one(x, y, clamp, widths, width is not None and self.kinked)

    def _given(self, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.labels, self.clamps, self.scales if width is None else self.scales * width[:, None]


def build_rows(seen: Sequence[Observation], labels: Tensor, start: Tensor, clamped: str | None) -> Rows:
    """Return the equations of problems that share model, visible tensors and sizes.

    ``labels`` is (B, N), ``start`` (n,) an input to measure the kinks' scales at, ``clamped`` the bias of the last
    layer where its gradient p - y is to be put into the backward pass.
    """
    first = seen[0]
    names = [name for name in first.visible if name != clamped]
    onehot = F.one_hot(labels, first.num_classes).to(start)
    gradients = [{n: g.to(start) for n, g in s.update.gradient.items()} for s in seen]
    clamps = torch.stack([g[clamped] if clamped else onehot.new_zeros(first.num_classes) for g in gradients])
    columns = [_columns(s, g, names) for s, g in zip(seen, gradients, strict=True)]
    values, weights, noise, rms = (torch.stack(column) for column in zip(*columns, strict=True))
    if clamped:
        p = clamps + onehot[:, 0]
        log_p = p.clamp_min(SMALLEST).log()
        values = torch.cat([values, log_p], 1)
        weights = torch.cat([weights, (p > SMALLEST).to(start)], 1)
        noise = torch.cat([noise, torch.zeros_like(p)], 1)
        rms = torch.cat([rms, log_p.square().mean(1, keepdim=True).sqrt().expand_as(log_p)], 1)
    state = _state(first.model, start)
    shape = (first.num_examples, *first.input_shape)
    with quiet(first.model):
        scales = kink_scales(lambda: functional_call(first.model, state, (start.reshape(shape),)))
    one = _one(first, state, names, shape, clamped is not None)
    spread = torch.tensor(scales).to(start).expand(len(seen), -1)
    return Rows(first.model, one, onehot, clamps, spread, values, weights, noise, rms)


def _state(model: nn.Module, like: Tensor) -> Params:
    state = {n: p.detach() for n, p in model.named_parameters()} | {n: b.detach() for n, b in model.named_buffers()}
    return {n: value.to(like) if value.is_floating_point() else value for n, value in state.items()}


def _columns(seen: Observation, gradient: Params, names: list[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return value, weight, noise and rms of each row of one problem, (R,) each."""
    flat = {n: gradient[n].reshape(-1) for n in names}
    weights = {
        n: seen.weights[n].to(g).reshape(-1) if n in seen.weights else torch.ones_like(g) for n, g in flat.items()
    }
    whole = torch.cat(list(flat.values())).square().mean().sqrt()
    rms = {n: (weights[n] * g.square()).sum().div(weights[n].sum()).sqrt() for n, g in flat.items()}
    # A tensor whose gradient is nearly zero says little, so it does not get a nearly infinite weight.
    level = {n: torch.maximum(value, 1e-3 * whole) for n, value in rms.items()}
    parts = (
        flat,
        weights,
        {n: torch.full_like(g, seen.noise.get(n, 0.0)) for n, g in flat.items()},
        {n: level[n].expand_as(g) for n, g in flat.items()},
    )
    values, weight, noise, scale = (torch.cat([part[n] for n in names]) for part in parts)
    return values, weight, noise, scale


def _one(seen: Observation, state: Params, names: list[str], shape: tuple[int, ...], clamped: bool) -> OneRows:
    """Return the rows of one trial input, a function that torch.func can transform."""
    trainable = {n for n, p in seen.model.named_parameters() if p.requires_grad}
    # Several steps move every weight, and a simulated defence sees every gradient; else the visible ones are enough.
    moved = trainable if seen.update.num_steps > 1 or seen.simulate is not None else set(names)
    free = {n: value for n, value in state.items() if n in moved}
    fixed = {n: value for n, value in state.items() if n not in moved}

    def rows(x: Tensor, y: Tensor, clamp: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        logits: list[Tensor] = []

        def loss(weights: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with Smoothing(widths.unbind()) if smooth else nullcontext():
                z = functional_call(seen.model, fixed | weights, (x,))
            return ((z[0] * clamp).sum() if clamped else soft_cross_entropy(z, y)), z

        def step(weights: Params, x: Tensor, y: Tensor) -> Params:
            gradient: Params
            gradient, z = grad(loss, has_aux=True)(weights, x, y)
            logits.append(z)
            return gradient

        update = unroll(step, free, x.reshape(shape), y, seen.update)
        if seen.simulate is not None:
            update = seen.simulate(update)
        parts = [update[n].reshape(-1) for n in names]
        return torch.cat([*parts, logits[-1][0].log_softmax(-1)] if clamped else parts)

    return rows
