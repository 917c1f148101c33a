"""What the tests of attacks on a fully connected first layer begin with."""

from dataclasses import replace

import torch
from torch import Generator, nn

from gradveil.types import Batch, Observation, Update

CLASSES = 5


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def network(inputs: int, *tail: nn.Module, width: int = 64) -> nn.Sequential:
    """Return a network of one fully connected layer, the tail behind it, and a last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *tail, nn.Linear(width, CLASSES))


def observe(model: nn.Module, data: Batch) -> Observation:
    """Return what a server sees of one step on all examples."""
    found = torch.autograd.grad(nn.functional.cross_entropy(model(data.inputs), data.labels), list(model.parameters()))
    gradient = dict(zip(dict(model.named_parameters()), found, strict=True))
    return Observation(model, Update(gradient, num_examples=len(data)), tuple(data.inputs.shape[1:]), CLASSES)


def noisy(seen: Observation, share: float) -> Observation:
    """Return it with noise, relative to the largest entry of each tensor."""
    draw = rng(9)
    gradient = {
        n: g + share * g.abs().max() * torch.randn(g.shape, generator=draw) for n, g in seen.update.gradient.items()
    }
    return replace(seen, update=replace(seen.update, gradient=gradient))
