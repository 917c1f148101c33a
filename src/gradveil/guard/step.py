"""A layer's weight gradient built from r' in place of r; all else stays as it is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import DefenseError, LayerError
from gradveil.modules import LINEAR, find_layer, under_transform
from gradveil.tree import named

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
