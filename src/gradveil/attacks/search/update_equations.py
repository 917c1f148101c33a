"""Rows of what a trial point would have sent, as functions that torch.func and autograd can transform.

A trial point is the examples and, for a single local step, what δ, the loss's gradient by the outputs, is made from, as
departures from a first guess: with plain cross-entropy the logits, and where the targets cannot be read, δ itself.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad

from gradveil.attacks.labels import label_signal, unreadable
from gradveil.attacks.rounds import entry_weights
from gradveil.attacks.search.equations import Equations, Prior, Smoothing, Trial, kink_scales
from gradveil.gradients.functional import output_of, quiet, trial_update
from gradveil.losses import CrossEntropy
from gradveil.modules import trace
from gradveil.tree import Params, named
from gradveil.types import Observation

SPREAD = 3.0  # standard deviation of the free logits around their first guess


def delta_of(log_p: Tensor, y: Tensor) -> Tensor:
    """Return p - y (..., K) without its cancellation: the true class misses what the others have."""
    others = log_p.exp() * (1 - y)
    return others - y * others.sum(-1, keepdim=True)


Free = Literal["logits", "slopes", "targets", "nothing"]


def free_of(seen: Observation) -> Free:
    """Return what is unknown beside the examples; several local steps have a δ each, so there it is the targets."""
    if seen.labels is None:
        return "slopes" if seen.update.num_steps == 1 else "targets"
    plain = isinstance(seen.loss, CrossEntropy) and seen.loss.plain
    return "logits" if plain and seen.update.num_steps == 1 else "nothing"


@dataclass(frozen=True)
class Guess:
    """Where targets are not known: a first guess of what stands for them, and how far from it that may be."""

    value: Tensor  # (N, K): δ for one local step, else the targets themselves
    spread: Tensor  # (N, K), standard deviation

    @classmethod
    def of(cls, seen: Observation, prior: Prior, rng: Generator) -> "Guess":
        """Return equal parts of the δ that the update shows, or the numbers that fit it at the prior's mean."""
        nothing = prior.mean.new_zeros(seen.num_examples, seen.num_classes)
        if seen.labels is not None:
            return cls(nothing, nothing)
        signal = label_signal(seen, rng)
        if signal is None:
            raise unreadable(seen)
        slopes = nothing + signal.to(nothing) / seen.num_examples
        if free_of(seen) == "slopes":
            return cls(slopes, _spread(slopes))
        output = output_of(seen.model, prior.mean.repeat(seen.num_examples).reshape(-1, *seen.input_shape)).to(nothing)
        numbers = seen.loss.read(output, slopes.reshape(output.shape)) if seen.loss.targets == "numbers" else None
        if numbers is None:
            raise unreadable(seen)
        value = seen.loss.rows(numbers, seen.num_classes)
        return cls(value, _spread(value - output.reshape(value.shape)))

    def targets(self, seen: Observation, inputs: Tensor, free: Tensor) -> Tensor | None:
        """Return the targets of a solution: those given, else those that it speaks for, where the loss tells them."""
        if seen.labels is not None:
            return seen.labels.to(self.value.device)
        found = self.value + self.spread * free.reshape(self.value.shape)
        if free_of(seen) == "targets":
            return seen.loss.found(found.float())
        output = output_of(seen.model, inputs)
        return seen.loss.read(output, found.to(output).reshape(output.shape))


def _spread(sizes: Tensor) -> Tensor:
    return SPREAD * sizes.square().mean().sqrt().expand_as(sizes)


def trial_rows(seen: Observation, state: Params, prior: Prior) -> Callable[..., Tensor]:
    """Return the rows of one trial point as a function that torch.func can transform."""
    names, model, shape = seen.visible, seen.model, (seen.num_examples, *seen.input_shape)
    buffers = {n for n, _ in model.named_buffers()}
    moved = set(_needed(seen))
    free = {n: value for n, value in state.items() if n in moved}
    fixed = {n: value for n, value in state.items() if n not in moved}

    def forward(weights: Params, x: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        held = {n: value.clone() if n in buffers else value for n, value in fixed.items()}  # a pass may write to them
        with Smoothing(widths.unbind()) if smooth else nullcontext():
            logits: Tensor = functional_call(model, held | weights, (x,))
        return logits

    def finish(sent: Params, *more: Tensor) -> Tensor:
        return torch.cat([*(sent[n].reshape(-1) for n in names), *more])

    def several_steps(z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        def step(weights: Params, x: Tensor, y: Tensor) -> Params:
            gradient: Params = grad(lambda w: seen.loss.soft(forward(w, x, widths, smooth), y))(weights)
            return gradient

        return finish(trial_update(seen, step, free, z.reshape(shape), y))

    def one_step(z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        u = (guess + SPREAD * z[prior.pixels :].reshape(guess.shape)).log_softmax(-1)  # (N, K)
        delta = delta_of(u, y) + rest

        def pulled(weights: Params) -> tuple[Tensor, Tensor]:
            logits = forward(weights, z[: prior.pixels].reshape(shape), widths, smooth)
            return (logits * delta).sum() / len(delta), logits

        update, logits = grad(pulled, has_aux=True)(free)
        return finish(seen.sent(update), (logits.log_softmax(-1) - u).reshape(-1))

    def any_target(z: Tensor, y: Tensor, guess: Tensor, spread: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        delta = guess + spread * z[prior.pixels :].reshape(guess.shape)  # (N, K)

        def pulled(weights: Params) -> Tensor:
            output = forward(weights, z[: prior.pixels].reshape(shape), widths, smooth)
            return (output.reshape(delta.shape) * delta).sum()

        return finish(seen.sent(grad(pulled)(free)))

    def any_numbers(z: Tensor, y: Tensor, guess: Tensor, spread: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        numbers = guess + spread * z[prior.pixels :].reshape(guess.shape)
        return several_steps(z[: prior.pixels], numbers, guess, spread, widths, smooth)

    kinds = {"logits": one_step, "slopes": any_target, "targets": any_numbers, "nothing": several_steps}
    return kinds[free_of(seen)]


def _needed(seen: Observation) -> tuple[str, ...]:
    """Return the tensors whose gradients a trial needs, in the order of their rows."""
    trained = tuple(name for name, p in seen.model.named_parameters() if p.requires_grad)
    return trained if seen.needs_all_gradients else seen.visible


SMALLEST = 1e-30  # a probability below it was rounded away on the client
STIFF = 1e-3  # the floor of a bias gradient that the guess fits exactly, relative to that of other tensors


def update_rows(seen: Sequence[Observation], guesses: Sequence[Guess], prior: Prior) -> Equations:
    """Return the equations of problems that share model, visible tensors and sizes; guesses for unknown targets."""
    first, center = seen[0], prior.center()
    known = [s.loss.rows(s.labels, s.num_classes) for s in seen if s.labels is not None]
    y = torch.stack(known if known else [g.value for g in guesses]).to(center)  # (B, N, K)
    state = _state(first.model, center)
    x = center[: prior.pixels].reshape(-1, *first.input_shape)
    with quiet(first.model), torch.no_grad():
        scales = kink_scales(lambda: functional_call(first.model, state, (x,)))
    widths = torch.tensor(scales).to(center).expand(len(seen), -1)
    table = torch.stack([_table(s, center) for s in seen])  # (B, 4, R)
    rest = torch.zeros_like(y)  # of δ: what the client's rounding of p - 1 adds to it
    one = trial_rows(first, state, prior)
    if not known:
        spread = torch.stack([g.spread for g in guesses])
        return _rows(first, one, (y, y, spread), widths, table)
    if free_of(first) == "nothing":
        return _rows(first, one, (y, rest, rest), widths, table)
    with quiet(first.model), torch.no_grad():
        guess = functional_call(first.model, state, (x,)).log_softmax(-1).expand_as(y)
    bias = known_bias(seen)
    if bias is None:
        rows = _rows(first, one, (y, guess, rest), widths, _with_logits(table, guess))
        guess = _rescaled(guess, y, _excess(rows, center, table.shape[2]))
    else:
        guess = torch.stack([_read(s, bias, y[b]) for b, s in enumerate(seen)])
        sizes = [(name, first.update.gradient[name].numel()) for name in first.visible]
        stiff = torch.cat([center.new_full((size,), STIFF if name == bias else 1.0) for name, size in sizes])
        table[:, 3] *= stiff
        exact = torch.stack([s.update.gradient[bias].to(y) for s in seen])[:, None]  # (B, 1, K)
        quiet_bias = torch.tensor([not s.noise.get(bias) for s in seen]).to(y)
        rest = (exact - delta_of(guess, y)) * quiet_bias[:, None, None]
    return _rows(first, one, (y, guess, rest), widths, _with_logits(table, guess))


def _rows(s: Observation, one: Trial, given: tuple[Tensor, ...], widths: Tensor, table: Tensor) -> Equations:
    seen, weights, noise, rms = table.unbind(1)
    return Equations(s.model, one, given, widths, seen, weights, noise, rms, s.randomness)


def known_bias(seen: Sequence[Observation]) -> str | None:
    """Return the last layer's bias where its gradient is the p - y of one example, all of it seen."""
    first = seen[0]
    output = trace(first.model, first.input_shape).output
    bias = named(output or "", "bias")
    whole = output is not None and all(bias in s.visible and bias not in s.weights for s in seen)
    return bias if whole and first.num_examples == 1 and not first.needs_all_gradients else None


def _state(model: nn.Module, like: Tensor) -> Params:
    state = {n: p.detach() for n, p in model.named_parameters()} | {n: b.detach() for n, b in model.named_buffers()}
    return {n: value.to(like) if value.is_floating_point() else value for n, value in state.items()}


def _table(seen: Observation, like: Tensor) -> Tensor:
    """Return value, weight, noise and rms of each entry of one update, (4, R)."""
    parts = []
    whole = torch.cat([seen.update.gradient[n].reshape(-1) for n in seen.visible]).to(like).square().mean().sqrt()
    for name in seen.visible:
        g = seen.update.gradient[name].to(like).reshape(-1)
        weight = entry_weights(seen, name).to(like).reshape(-1)
        rms = (weight * g.square()).sum().div(weight.sum()).sqrt()
        # A tensor whose gradient is nearly zero says little, so it does not get a nearly infinite weight.
        level = torch.maximum(rms, 1e-3 * whole).expand_as(g)
        parts.append(torch.stack([g, weight, torch.full_like(g, seen.noise.get(name, 0.0)), level]))
    return torch.cat(parts, 1)


def _with_logits(table: Tensor, guess: Tensor) -> Tensor:
    """Append the rows that say: the free logits are those of the trial input, (B, 4, R + N K)."""
    size = guess.flatten(1).square().mean(1, keepdim=True).sqrt().clamp_min(1.0).expand_as(guess.flatten(1))
    rows = torch.stack([torch.zeros_like(size), torch.ones_like(size), torch.zeros_like(size), size], 1)
    return torch.cat([table, rows], 2)


def _read(seen: Observation, bias: str, y: Tensor) -> Tensor:
    """Return the log-probabilities (1, K) that the bias gradient p - y shows, as far as its noise lets them be seen."""
    delta, std = seen.update.gradient[bias].to(y), max(seen.noise.get(bias, 0.0), SMALLEST)
    others = delta.clamp_min(std) * (1 - y)  # (1, K)
    missing = (-delta * y).sum().clamp(std, 1 - SMALLEST)  # 1 - p of the true class, the sum of the others
    others = others * missing / others.sum()
    return (others + y * (1 - missing)).clamp_min(SMALLEST).log()


def _excess(rows: Equations, center: Tensor, entries: int) -> Tensor:
    """Return by how much the update of the prior's mean outsizes the one seen, (B,)."""
    of_mean = rows.residual(center.expand(len(rows.seen), -1), None) + rows.seen
    noise = (rows.weights * rows.noise.square())[:, :entries].sum(1)
    sizes = [(rows.weights * value.square())[:, :entries].sum(1) for value in (of_mean, rows.seen)]
    return (sizes[0] / torch.maximum(sizes[1] - noise, 0.01 * sizes[1])).sqrt()


def _rescaled(guess: Tensor, y: Tensor, excess: Tensor) -> Tensor:
    """Return the log-probabilities (B, N, K) with the wrong classes' share divided by ``excess``."""
    others = guess.exp() * (1 - y) / excess[:, None, None]
    others = others * (0.99 / others.sum(-1, keepdim=True)).clamp_max(1.0)
    return (others + y * (1 - others.sum(-1, keepdim=True))).clamp_min(SMALLEST).log()
