"""Gradient of one local step of a client, with a defence at work on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil.errors import DefenseError
from gradveil.privacy.noise import Source
from gradveil.protection.defense import Defense, accounted, own_draws
from gradveil.protection.passes import Pass, Report, check_layer, substitute
from gradveil.protection.records.records import records_of
from gradveil.tree import Params
from gradveil.types import Batch

Loss = Callable[[Tensor, Tensor], Tensor]


def step_gradient(
    model: nn.Module,
    batch: Batch,
    defense: Defense,
    rng: Source,
    *,
    loss: Loss = F.cross_entropy,
    report: Report | None = None,
    slots: int | None = None,
) -> Params:
    """Return the gradient of the mean loss on a batch, defended: on_batch, on_records or perturb, then on_gradient.

    The same numbers as a training loop under ``protect``, in train and in eval mode. Parameters that the loss
    does not depend on have a zero gradient. ``slots``: how many records a batch of this client has room for, which a
    defence on records divides by; None: as many as there are.
    """
    report = Report() if report is None else report
    with own_draws(defense):
        batch = defense.on_batch(batch, rng)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if "records" in defense.acts_on:
        records = records_of(getattr(model, "_orig_mod", model), batch, loss)
        report.steps += 1
        report.examples += len(batch)
        with own_draws(defense):
            bare = accounted(defense).on_records(records, slots or len(batch), rng)
            return defense.on_gradient({name: bare[name.removeprefix("_orig_mod.")] for name in weights}, rng)
    with torch.enable_grad(), _substituting(model, defense, batch.inputs, rng, report) as under_way:
        output = getattr(model, "_orig_mod", model)(batch.inputs)  # a compiled model: run what was compiled, plainly
        if under_way is not None and (message := under_way.used_elsewhere(output)) is not None:
            raise DefenseError(message)
        value = loss(output, batch.labels)
    grads = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
    report.steps += 1
    report.examples += len(batch)
    with own_draws(defense):
        return defense.on_gradient(dict(zip(weights, grads, strict=True)), rng)


@contextmanager
def _substituting(model: nn.Module, defense: Defense, x: Tensor, rng: Source, report: Report) -> Iterator[Pass | None]:
    """Within, each defended layer's weight gradient is built from its perturbed input."""
    layers = defense.layers(model)
    if not layers:
        yield None
        return
    under_way = Pass(model, x)
    handles: list[RemovableHandle] = []

    def hook(layer: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        r = args[0] if args else kwargs["input"]
        if not len(r):
            return output  # no examples, no gradient
        under_way.outputs.append(
            (module, substitute(module, r, under_way.perturbed(defense, layer, r, rng, report, handles)))
        )
        return under_way.outputs[-1][1]

    try:
        for layer in layers:
            check_layer(model, layer)
            target = model.get_submodule(layer)
            handles.append(target.register_forward_hook(partial(hook, layer), prepend=True, with_kwargs=True))
        yield under_way
    finally:
        for handle in handles:
            handle.remove()
