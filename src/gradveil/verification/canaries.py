"""Canary records: examples whose clipped gradients are full and point apart, and those gradients from outside."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.errors import DataError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.tree import Params, parameters
from gradveil.types import Batch

SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)  # of random inputs, until the clip binds
FULL = 2.0  # times the clip: a gradient that long is clipped for certain, whatever is rounded on the way
Into = Callable[[Tensor], Tensor]  # from gradients (K, p) to the coordinates in which the noise is alike


@dataclass(frozen=True)
class Canaries:
    """K records, each put into its slot of a client by a coin, or its slot zeroed."""

    inputs: Tensor  # (K, *shape)
    labels: Tensor  # (K,) or (K, ...)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or len(self.inputs) < 2:
            raise DataError(
                f"There are {len(self.inputs)} canaries with {len(self.labels)} labels. Give two at least, each with "
                "one."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def present(self, some: Tensor) -> Batch:
        """Return the records whose slots are not zeroed; some (K,)."""
        return Batch(self.inputs[some], self.labels[some])


def gradients(model: nn.Module, weights: Params, canaries: Canaries, loss: Loss = CROSS_ENTROPY) -> Tensor:
    """Return each record's gradient (K, p) at these weights, in float32, by plain autograd on batches of one.

    Nothing of the mechanism is used, so what is wrong with its own gradients or norms shows.
    """
    free = {n: weights[n].detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    fixed |= {n: b.detach().clone() for n, b in model.named_buffers()}

    def value(some: Params, x: Tensor, y: Tensor) -> Tensor:
        return loss.each(functional_call(model, fixed | some, (x[None],)), y[None]).sum()

    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = vmap(partial(grad(value), free), randomness="different")(canaries.inputs, canaries.labels)
    except (RuntimeError, NotImplementedError):  # a recurrent layer, a custom function
        pairs = zip(canaries.inputs, canaries.labels, strict=True)
        each = [_plain(value, free, x, y) for x, y in pairs]
        found = {n: torch.stack([g[n] for g in each]) for n in free}
    return torch.cat([g.detach().flatten(1).float() for g in found.values()], 1)


def _plain(value: Callable[[Params, Tensor, Tensor], Tensor], free: Params, x: Tensor, y: Tensor) -> Params:
    own = {n: w.clone().requires_grad_() for n, w in free.items()}
    with torch.enable_grad():
        found = torch.autograd.grad(value(own, x, y), list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True))


def make(
    model: nn.Module,
    like: Batch,
    count: int,
    rng: torch.Generator,
    loss: Loss = CROSS_ENTROPY,
    clip: float = 1.0,
    into: Into = lambda g: g,
) -> Canaries:
    """Return random records of the kind of some given ones, as loud as it takes for the clip to bind.

    Inputs that are numbers are Gaussian, scaled until nine in ten gradients are twice as long as the clip, or as long
    as it goes; tokens are drawn from those given. Labels are those given, drawn again.
    """
    device = like.inputs.device
    chosen = torch.randint(len(like), (count,), generator=rng).to(device)
    labels = like.labels[torch.randint(len(like), (count,), generator=rng).to(device)]
    if not like.inputs.is_floating_point():
        some = like.inputs.flatten()[torch.randint(like.inputs.numel(), like.inputs[chosen].shape, generator=rng)]
        if like.labels.shape == like.inputs.shape:  # the next token at each place
            labels = some
        return Canaries(some.to(device), labels)
    noise = torch.randn((count, *like.inputs.shape[1:]), generator=rng).to(like.inputs)
    weights = parameters(model)
    best, longest = Canaries(noise, labels), -1.0
    for scale in SCALES:
        trial = Canaries(noise * scale, labels)
        length = float(into(gradients(model, weights, trial, loss)).norm(dim=1).nan_to_num().quantile(0.1))
        if length > longest:
            best, longest = trial, length
        if length >= FULL * clip:
            break
    return best
