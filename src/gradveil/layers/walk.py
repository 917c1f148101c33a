"""The short way to a tape: a chain of plain layers needs no recorder, only to be walked."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from gradveil.layers.convolution import Convolution
from gradveil.layers.graph import Edge, Node, Tape
from gradveil.layers.layer_rules import relu_slopes, sigmoid_slopes
from gradveil.layers.operators import Dense, Operator, Reshape, Scale, wide
from gradveil.layers.pooling import Choose

Step = tuple[Tensor, Operator]


def chain(model: nn.Module, layer: str, x: Tensor) -> list[nn.Module] | None:
    """Return the layers before ``layer``, where they are a plain chain that can be walked with x; else None.

    Plain: (nested) ``nn.Sequential`` of convolutions, linear layers, sigmoid, tanh, ReLU, max pooling and flatten, with
    no hook that could act before the layer is reached. Such a chain does the same at every call.
    """
    target = model.get_submodule(layer)
    found: list[nn.Module] = []
    if _any_global_hook() or torch.is_autocast_enabled(x.device.type):
        return None
    for part in _opened(model, target):
        if part is target:
            images = any(isinstance(layer, nn.Conv2d | nn.MaxPool2d) for layer in found)
            return None if images and x.ndim != 4 else found
        if part is None or not _is_plain(part):
            return None
        found.append(part)
    return None


def _is_plain(part: nn.Module) -> bool:
    if type(part) not in _STEPS or part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
        return False
    return not isinstance(part, nn.Conv2d) or (part.padding_mode == "zeros" and not isinstance(part.padding, str))


def _any_global_hook() -> bool:
    return bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)


def _opened(module: nn.Module, target: nn.Module) -> Iterator[nn.Module | None]:
    if type(module) is not nn.Sequential or "forward" in module.__dict__ or module is target:
        yield module
    elif module._forward_pre_hooks or (module._forward_hooks and not _holds(module, target)):
        yield None
    else:
        for child in module._modules.values():
            if child is not None:
                yield from _opened(child, target)


def _holds(module: nn.Module, target: nn.Module) -> bool:
    return any(part is target for part in module.modules())


def walk(layers: list[nn.Module], x: Tensor) -> Tape:
    """Run the layers of a chain on x and return what they did as a tape."""
    with torch.no_grad():
        value = x = x.detach()
        nodes = [Node(tuple(x.shape), ())]
        for layer in layers:
            value, operator = _STEPS[type(layer)](layer, value)
            nodes.append(Node(tuple(value.shape), (Edge(len(nodes) - 1, operator),)))
        return Tape(tuple(nodes), x, value)


def _convolution(layer: nn.Conv2d, x: Tensor) -> Step:
    assert not isinstance(layer.padding, str)
    weight, stride, padding, dilation = layer.weight.detach(), layer.stride, layer.padding, layer.dilation
    out = F.conv2d(x, weight, layer.bias, stride, padding, dilation, layer.groups)
    shapes = tuple(x.shape), tuple(out.shape)
    return out, Convolution(wide(weight), stride, padding, dilation, layer.groups, *shapes)


def _linear(layer: nn.Linear, x: Tensor) -> Step:
    return F.linear(x, layer.weight, layer.bias), Dense(wide(layer.weight.detach()), tuple(x.shape[:-1]))


def _activation(function: Callable[[Tensor], Tensor], slopes: Callable[[Tensor], Tensor]) -> Callable[..., Step]:
    def step(_: nn.Module, x: Tensor) -> Step:
        out = function(x)
        return out, Scale(slopes(out), tuple(x.shape), tuple(x.shape))

    return step


def _flatten(layer: nn.Module, x: Tensor) -> Step:
    out = layer(x)
    return out, Reshape(tuple(x.shape), tuple(out.shape))


def _max_pool(layer: nn.MaxPool2d, x: Tensor) -> Step:
    out, index = F.max_pool2d(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, return_indices=True
    )
    settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    window = tuple(n for s in settings for n in ((s, s) if isinstance(s, int) else tuple(s)))
    return out, Choose(index, tuple(x.shape), window)


_STEPS: dict[type[nn.Module], Callable[..., Step]] = {
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    nn.Sigmoid: _activation(torch.sigmoid, sigmoid_slopes),
    nn.Tanh: _activation(torch.tanh, lambda y: 1 - wide(y).square()),
    nn.ReLU: _activation(torch.relu, relu_slopes),
    nn.MaxPool2d: _max_pool,
    nn.Flatten: _flatten,
    nn.Identity: _flatten,
}
