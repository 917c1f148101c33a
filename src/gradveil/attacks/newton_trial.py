"""What a trial point would have sent: by torch.func for any model, written out for a chain of known layers.

A trial point is the examples, and for a single local step the logits that δ, the loss's gradient by the logits, is made
from, as departures from a first guess.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from gradveil.attacks.chain import pull, walk
from gradveil.attacks.fedavg_unroll import unroll
from gradveil.attacks.gradients import soft_cross_entropy
from gradveil.attacks.newton_chain import can_write_out, run_chain
from gradveil.attacks.newton_prior import Prior
from gradveil.attacks.newton_rows import Direct
from gradveil.attacks.newton_smooth import Smoothing
from gradveil.tree import Params
from gradveil.types import Observation

SPREAD = 3.0  # standard deviation of the free logits around their first guess


def free_logits(seen: Observation) -> bool:
    """Return whether the logits behind δ are unknowns: for one local step; several have a δ each."""
    return seen.update.num_steps == 1


def delta_of(log_p: Tensor, y: Tensor) -> Tensor:
    """Return p - y (..., K) without its cancellation: the true class misses what the others have."""
    others = log_p.exp() * (1 - y)
    return others - y * others.sum(-1, keepdim=True)


def trial_update(seen: Observation, state: Params, prior: Prior) -> Callable[..., Tensor]:
    """Return the rows of one trial point as a function that torch.func can transform."""
    names, model, shape = seen.visible, seen.model, (seen.num_examples, *seen.input_shape)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    # Several steps move every weight, and a simulated defence sees every gradient; else the visible ones are enough.
    moved = trainable if seen.update.num_steps > 1 or seen.simulate is not None else set(names)
    free = {n: value for n, value in state.items() if n in moved}
    fixed = {n: value for n, value in state.items() if n not in moved}

    def forward(weights: Params, x: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        with Smoothing(widths.unbind()) if smooth else nullcontext():
            logits: Tensor = functional_call(model, fixed | weights, (x,))
        return logits

    def finish(update: Params, *more: Tensor) -> Tensor:
        sent = update if seen.simulate is None else seen.simulate(update)
        return torch.cat([*(sent[n].reshape(-1) for n in names), *more])

    def several_steps(z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        def step(weights: Params, x: Tensor, y: Tensor) -> Params:
            gradient: Params = grad(lambda w: soft_cross_entropy(forward(w, x, widths, smooth), y))(weights)
            return gradient

        return finish(unroll(step, free, z.reshape(shape), y, seen.update))

    def one_step(z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        u = (guess + SPREAD * z[prior.pixels :].reshape(guess.shape)).log_softmax(-1)  # (N, K)
        delta = delta_of(u, y) + rest

        def pulled(weights: Params) -> tuple[Tensor, Tensor]:
            logits = forward(weights, z[: prior.pixels].reshape(shape), widths, smooth)
            return (logits * delta).sum() / len(delta), logits

        update, logits = grad(pulled, has_aux=True)(free)
        return finish(update, (logits.log_softmax(-1) - u).reshape(-1))

    return one_step if free_logits(seen) else several_steps


def written_out(seen: Observation, state: Params, prior: Prior) -> Direct | None:
    """Return the rows of many trial points and, on demand, their Jacobian by parts; None where it is no known chain."""
    links = walk(seen.model)
    if links is None or not can_write_out(links) or not free_logits(seen) or seen.simulate is not None:
        return None
    names, examples = seen.visible, seen.num_examples

    def rows(
        z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool, tangents: bool
    ) -> tuple[Tensor, list[Tensor]]:
        b, n = z.shape
        eye = torch.eye(n, dtype=z.dtype, device=z.device)
        shape = (examples, *seen.input_shape)
        x = z[:, : prior.pixels].reshape(b * examples, *seen.input_shape)
        dx = eye[:, : prior.pixels].reshape(n, 1, *shape).expand(n, b, *shape).flatten(1, 2) if tangents else None
        each = iter(widths.repeat_interleave(examples, 0).unbind(1)) if smooth else None
        (logits, dlogits), passed = run_chain(links, state, (x, dx), each)

        def behind(v: Tensor) -> tuple[Tensor, Tensor]:
            u = (guess + SPREAD * v.reshape(guess.shape)).log_softmax(-1)
            return u, (delta_of(u, y) + rest).flatten(0, 1) / examples

        free = z[:, prior.pixels :]
        u, delta = behind(free)
        log_p = logits.log_softmax(-1)
        gap = (log_p.reshape(guess.shape) - u).flatten(1)
        if dlogits is None:
            found = pull(links, passed, (delta, None), names, b)
            return torch.cat([*(found[name][0] for name in names), gap], 1), []
        steps = eye[:, None, prior.pixels :].expand(n, *free.shape)
        du, ddelta = vmap(lambda v: jvp(behind, (free,), (v,))[1])(steps)
        found = pull(links, passed, (delta, ddelta), names, b)
        dlog_p = dlogits - (log_p.exp() * dlogits).sum(-1, keepdim=True)
        dgap = (dlog_p.reshape(n, *guess.shape) - du).flatten(2)
        values = torch.cat([*(found[name][0] for name in names), gap], 1)
        slopes = [slope for name in names if (slope := found[name][1]) is not None]
        return values, [*slopes, dgap]

    return rows
