"""Arithmetic on parameters by name. A gradient, an update and a model's weights are all ``Params``."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Params = dict[str, Tensor]


def parameters(model: nn.Module) -> Params:
    """Return the model's trainable parameters by name, detached and shared with the model."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def named(layer: str, part: str) -> str:
    """Return the name of a layer's parameter in the model; the model itself, as a layer, has no path."""
    return f"{layer}.{part}" if layer else part


def map_values(function: Callable[[Tensor], Tensor], tree: Params) -> Params:
    """Apply a function to every tensor."""
    return {name: function(value) for name, value in tree.items()}


def add(a: Params, b: Params, scale: float = 1.0) -> Params:
    """Return ``a + scale * b``."""
    return {name: value + scale * b[name] for name, value in a.items()}


def subtract(a: Params, b: Params) -> Params:
    """Return ``a - b``."""
    return add(a, b, -1.0)


def scale(tree: Params, factor: float) -> Params:
    """Return ``factor * tree``."""
    return {name: value * factor for name, value in tree.items()}


def dot(a: Params, b: Params) -> Tensor:
    """Return the inner product over all entries."""
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def norm(tree: Params) -> Tensor:
    """Return the Euclidean norm over all entries."""
    return dot(tree, tree).sqrt()


def size(tree: Params) -> int:
    """Return how many numbers the tree holds."""
    return sum(value.numel() for value in tree.values())


def flatten(tree: Params) -> Tensor:
    """Return all entries as one vector, in the tree's order."""
    return torch.cat([value.reshape(-1) for value in tree.values()])


def is_finite(tree: Params) -> bool:
    """Return whether every entry is a finite number."""
    return all(bool(torch.isfinite(value).all()) for value in tree.values())
