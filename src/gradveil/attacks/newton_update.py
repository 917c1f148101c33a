"""The equations of an update: what trial inputs would have sent, entry by entry.

An update is δ, the loss's gradient by the logits, pulled back through the network. δ is p - y, and the p of a
trained network is so close to y that a trial input gets δ wrong by orders of magnitude, and every entry of the update
with it. So the logits that δ is made from are unknowns of their own. For a batch of one they start where the bias
gradient of the last layer, which is p - y itself, says; that they are the logits of the trial input is a further set
of equations, which the falling noise floor brings in by and by.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks.gradients import quiet
from gradveil.attacks.newton_prior import Prior
from gradveil.attacks.newton_rows import Direct, Rows, Trial
from gradveil.attacks.newton_smooth import kink_scales
from gradveil.attacks.newton_trial import delta_of, free_logits, trial_update, written_out
from gradveil.attacks.trace import trace
from gradveil.tree import Params
from gradveil.types import Observation

SMALLEST = 1e-30  # a probability below it was rounded away on the client
STIFF = 1e-3  # the floor of a bias gradient that the guess fits exactly, relative to that of other tensors


def update_rows(seen: Sequence[Observation], labels: Tensor, prior: Prior) -> Rows:
    """Return the equations of problems that share model, visible tensors and sizes; ``labels`` is (B, N)."""
    first, center = seen[0], prior.center()
    y = F.one_hot(labels, first.num_classes).to(center)  # (B, N, K)
    state = _state(first.model, center)
    x = center[: prior.pixels].reshape(-1, *first.input_shape)
    with quiet(first.model), torch.no_grad():
        scales = kink_scales(lambda: functional_call(first.model, state, (x,)))
        guess = functional_call(first.model, state, (x,)).log_softmax(-1).expand_as(y)
    widths = torch.tensor(scales).to(center).expand(len(seen), -1)
    table = torch.stack([_table(s, center) for s in seen])  # (B, 4, R)
    rest = torch.zeros_like(y)  # of δ: what the client's rounding of p - 1 adds to it
    one, direct = trial_update(first, state, prior), written_out(first, state, prior)
    if not free_logits(first):
        return _rows(first.model, one, (y, guess, rest), widths, table, None)
    bias = known_bias(seen)
    if bias is None:
        rows = _rows(first.model, one, (y, guess, rest), widths, _with_logits(table, guess), direct)
        guess = _rescaled(guess, y, _excess(rows, center, table.shape[2]))
    else:
        guess = torch.stack([_read(s, bias, y[b]) for b, s in enumerate(seen)])
        sizes = [(name, first.update.gradient[name].numel()) for name in first.visible]
        stiff = torch.cat([center.new_full((size,), STIFF if name == bias else 1.0) for name, size in sizes])
        table[:, 3] *= stiff
        exact = torch.stack([s.update.gradient[bias].to(y) for s in seen])[:, None]  # (B, 1, K)
        quiet_bias = torch.tensor([not s.noise.get(bias) for s in seen]).to(y)
        rest = (exact - delta_of(guess, y)) * quiet_bias[:, None, None]
    return _rows(first.model, one, (y, guess, rest), widths, _with_logits(table, guess), direct)


def _rows(
    model: nn.Module, one: Trial, given: tuple[Tensor, ...], widths: Tensor, table: Tensor, direct: Direct | None
) -> Rows:
    seen, weights, noise, rms = table.unbind(1)
    return Rows(model, one, given, widths, seen, weights, noise, rms, direct)


def known_bias(seen: Sequence[Observation]) -> str | None:
    """Return the last layer's bias where its gradient is the p - y of one example, all of it seen."""
    first = seen[0]
    bias = f"{trace(first.model, first.input_shape).output}.bias"
    whole = all(bias in s.visible and bias not in s.weights for s in seen)
    return bias if whole and first.num_examples == 1 and first.simulate is None else None


def _state(model: nn.Module, like: Tensor) -> Params:
    state = {n: p.detach() for n, p in model.named_parameters()} | {n: b.detach() for n, b in model.named_buffers()}
    return {n: value.to(like) if value.is_floating_point() else value for n, value in state.items()}


def _table(seen: Observation, like: Tensor) -> Tensor:
    """Return value, weight, noise and rms of each entry of one update, (4, R)."""
    parts = []
    whole = torch.cat([seen.update.gradient[n].reshape(-1) for n in seen.visible]).to(like).square().mean().sqrt()
    for name in seen.visible:
        g = seen.update.gradient[name].to(like).reshape(-1)
        weight = (
            seen.weights[name].to(like).expand(seen.update.gradient[name].shape).reshape(-1)
            if name in seen.weights
            else torch.ones_like(g)
        )
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


def _excess(rows: Rows, center: Tensor, entries: int) -> Tensor:
    """Return by how much the update of the prior's mean outsizes the one seen, (B,)."""
    found = rows.residual(center.expand(len(rows.seen), -1), None) + rows.seen
    noise = (rows.weights * rows.noise.square())[:, :entries].sum(1)
    sizes = [(rows.weights * value.square())[:, :entries].sum(1) for value in (found, rows.seen)]
    return (sizes[0] / torch.maximum(sizes[1] - noise, 0.01 * sizes[1])).sqrt()


def _rescaled(guess: Tensor, y: Tensor, excess: Tensor) -> Tensor:
    """Return the log-probabilities (B, N, K) with the wrong classes' share divided by ``excess``."""
    others = guess.exp() * (1 - y) / excess[:, None, None]
    others = others * (0.99 / others.sum(-1, keepdim=True)).clamp_max(1.0)
    return (others + y * (1 - others.sum(-1, keepdim=True))).clamp_min(SMALLEST).log()
