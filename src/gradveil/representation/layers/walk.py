"""The short way from a plain chain of layers to a tape."""

import torch
from torch import Tensor, nn

from gradveil.chain import sequential
from gradveil.representation.layers.jacobian import Edge, Node, Tape
from gradveil.representation.layers.rules.base import PLAIN


def walkable(model: nn.Module, layer: str, x: Tensor) -> list[nn.Module] | None:
    """Return the layers before ``layer``, where they are a plain chain that can be walked with x; else None.

    Plain: layers whose rule says how they are run without a recorder. Such a chain does the same at every call.
    """
    links = None if torch.is_autocast_enabled(x.device.type) else sequential(model, layer)
    if links is None:
        return None
    layers = [link.module for link in links]
    if not all(type(part) in PLAIN and PLAIN[type(part)][1](part) for part in layers):
        return None
    images = any(isinstance(part, nn.Conv2d | nn.MaxPool2d) for part in layers)
    return None if images and x.ndim != 4 else layers


def walk(layers: list[nn.Module], x: Tensor) -> Tape:
    """Run the layers of a chain on x and return what they did as a tape."""
    with torch.no_grad():
        value = x = x.detach()
        nodes = [Node(tuple(x.shape), ())]
        for layer in layers:
            value, operator = PLAIN[type(layer)][0](layer, value)
            nodes.append(Node(tuple(value.shape), (Edge(len(nodes) - 1, operator),)))
        return Tape(tuple(nodes), x, value)
