"""Training loops and what to look at after them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.tree import Params
from gradveil.types import Batch

REPRESENTATION = "representation:share=0.4"


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(model: Callable[[Tensor], Tensor], weights: nn.Module, batch: Batch, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()


def weights_of(model: nn.Module) -> Params:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def by_step_gradient(model: nn.Module, batch: Batch, spec: str, rng: Generator, steps: int = 3) -> None:
    for _ in range(steps):
        g = step_gradient(model, batch, build(spec), rng)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * g[name]
