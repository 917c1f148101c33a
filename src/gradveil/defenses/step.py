"""The gradient of one defended local step, as a function: for clients that run no optimizer of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil.defenses.base import Defense
from gradveil.defenses.passes import lifted, perturbed, random_state
from gradveil.defenses.report import Report
from gradveil.defenses.substitution import check_layer, substitute
from gradveil.tree import Params
from gradveil.types import Batch

Loss = Callable[[Tensor, Tensor], Tensor]


def step_gradient(
    model: nn.Module,
    batch: Batch,
    defense: Defense,
    rng: Generator,
    *,
    loss: Loss = F.cross_entropy,
    report: Report | None = None,
) -> Params:
    """Return the gradient of the mean loss on a batch, defended: on_batch, perturb, then on_gradient.

    The same numbers as a training loop under ``protect``, in train and in eval mode. Parameters that the loss
    does not depend on have a zero gradient.
    """
    report = Report() if report is None else report
    batch = defense.on_batch(batch, rng)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), _substituting(model, defense, batch.inputs, rng, report):
        value = loss(model(batch.inputs), batch.labels)
    grads = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
    report.steps += 1
    report.examples += len(batch)
    return defense.on_gradient(dict(zip(weights, grads, strict=True)), rng)


@contextmanager
def _substituting(model: nn.Module, defense: Defense, x: Tensor, rng: Generator, report: Report) -> Iterator[None]:
    """Within, each defended layer's weight gradient is built from its perturbed input."""
    layers = defense.layers(model)
    if not layers:
        yield
        return
    restore = random_state(x.device)
    handles: list[RemovableHandle] = []

    def hook(layer: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        with lifted(handles), torch.random.fork_rng([x.device] if x.is_cuda else []):
            restore()
            changed = perturbed(defense, model, layer, x, args[0], rng, report)
        return substitute(module, args[0], changed)

    try:
        for layer in layers:
            check_layer(model, layer)
            handles.append(model.get_submodule(layer).register_forward_hook(partial(hook, layer)))
        yield
    finally:
        for handle in handles:
            handle.remove()
