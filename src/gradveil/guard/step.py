"""Build a layer's weight gradient from r' in place of r; all else stays as it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil.errors import DefenseError, LayerError
from gradveil.guard.defense import Defense
from gradveil.guard.passes import Pass, Report
from gradveil.guard.records.records import records_of
from gradveil.modules import LINEAR, find_layer, under_transform
from gradveil.privacy.draws import Source, own_draws
from gradveil.tree import Params, named
from gradveil.types import Batch

_PLAIN_FORWARDS = {kind.forward for kind in LINEAR}


def weight_name(layer: str) -> str:
    """Return the name of a layer's weight among the model's parameters."""
    return named(layer, "weight")


def check_layer(model: nn.Module, layer: str) -> None:
    """Raise unless the layer's weight gradient can be rebuilt from another input."""
    module = model.get_submodule(find_layer(model, layer))
    if type(module).forward not in _PLAIN_FORWARDS or "forward" in module.__dict__:
        raise LayerError(
            f"Layer {layer!r} is a {type(module).__name__} with a forward pass of its own; its weight gradient cannot "
            f"be rebuilt from a perturbed input. Defend a plain linear or convolutional layer."
        )
    weight = weight_of(module)
    if not weight.requires_grad:
        raise DefenseError(
            f"The weight of layer {layer!r} is frozen, so it has no gradient to defend. Leave this layer out, or "
            f"unfreeze it before protecting the model."
        )
    shared = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
    if len(shared) > 1:
        raise DefenseError(
            f"The weight of layer {layer!r} is shared ({', '.join(shared)}), so part of its gradient would stay as it "
            f"is. Untie the weights, or defend another layer."
        )


def apply(module: nn.Module, r: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run a plain linear or convolutional layer on r with the given weight and bias."""
    if isinstance(module, nn.Linear):
        return F.linear(r, weight, bias)
    return module._conv_forward(r, weight, bias)  # type: ignore[operator, no-any-return]


def substitute(module: nn.Module, r: Tensor, r_perturbed: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the layer's output on r, whose gradient w.r.t. the weight comes from r' alone.

    ``layer(r; W held) + (layer(r'; W) - the same, held)``: the second term is zero and carries dW = Σ δ r'ᵀ.
    The gradients w.r.t. r and the bias are those of the plain layer. Works for every layer linear in W; ``weight``
    may be a view of the layer's own.
    """
    used = weight_of(module) if weight is None else weight
    out = apply(module, r, used.detach(), module.bias)  # type: ignore[arg-type]
    carrier = apply(module, r_perturbed.detach(), used, None)
    if carrier.requires_grad and not under_transform():  # torch.func keeps the graph of every gradient
        carrier.register_hook(_refuse_second_derivatives)
    return out + (carrier - carrier.detach())


def _refuse_second_derivatives(_: Tensor) -> None:
    """Raise in a backward pass that is to be differentiated: r' is a constant there, and r is not."""
    if torch.is_grad_enabled():
        raise DefenseError(
            "A backward pass with create_graph=True goes through a defended layer, and the derivative of its gradient "
            "would not be that of the model. Take gradient penalties from a model without a guard."
        )


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight that the layer has just run with: a parametrization in train mode may move on at each look."""
    if "parametrizations" not in module._modules:
        return module.weight  # type: ignore[return-value]
    makers = [m for m in module.parametrizations.modules() if m.training]  # type: ignore[union-attr]
    try:
        for maker in makers:
            maker.training = False
        return module.weight  # type: ignore[return-value]
    finally:
        for maker in makers:
            maker.training = True


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
            bare = defense.on_records(records, slots or len(batch), rng)
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
