"""An update and its Jacobian with both passes written out, for models that are a chain of known layers.

Beside the activations h go their tangents, one per unknown, and beside δ on the way back its own. A layer's gradient
G = δ hᵀ then has the tangent δ dhᵀ + dδ hᵀ: two matrix products for all unknowns at once, where differentiating the
gradient by torch.func runs a small grouped convolution for each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.nn.grad import conv2d_input

from gradveil.attacks.gauss_newton.kinks import Smoothing
from gradveil.gradients.by_hand import Passed
from gradveil.gradients.convolution import Geometry
from gradveil.modules import Link
from gradveil.tree import Params, named

Dual = tuple[Tensor, Tensor | None]  # a value (M, ...) and its tangents (T, M, ...)
Gradients = dict[str, Dual]  # name -> (B, size) and (T, B, size)

_SHAPES = (nn.Flatten, nn.Dropout, nn.Dropout2d, nn.AlphaDropout)
_LINEAR_HERE = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


def can_write_out(links: Sequence[Link] | None) -> bool:
    """Return whether every layer with parameters is linear or convolutional."""
    return links is not None and all(isinstance(x.module, (nn.Linear, nn.Conv2d)) for x in links if x.has_parameters)


def run_chain(
    links: Sequence[Link], state: Params, x: Dual, widths: Iterator[Tensor] | None
) -> tuple[Dual, list[Passed[Dual]]]:
    """Run all layers on x (M, ...); ``widths`` (M,) each round the kinks of the ReLU-like ones, in order."""
    h, passed = x, []
    for link in links:
        passed.append(_run(link, state, h, widths))
        h = passed[-1].output
    return h, passed


def _run(link: Link, state: Params, h: Dual, widths: Iterator[Tensor] | None) -> Passed[Dual]:
    module = link.module
    if isinstance(module, nn.Linear):
        return _dense(link.path, state, h)
    if isinstance(module, nn.Conv2d):
        return _convolution(link.path, module, state, h)
    if isinstance(module, _SHAPES):
        return _reshaping(module, h)
    if isinstance(module, _LINEAR_HERE) or not is_elementwise(module):
        return _linear_here(module, h)
    return _elementwise(module, h, widths)


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a layer is an activation."""
    return type(module).__module__.startswith("torch.nn.modules.activation") or isinstance(module, nn.Identity)


def _both(function: Callable[[Tensor], Tensor], dual: Dual) -> Dual:
    """Apply a linear function of (M, ...) to a value and all its tangents."""
    value, tangents = dual
    if tangents is None:
        return function(value), None
    return function(value), function(tangents.flatten(0, 1)).unflatten(0, tangents.shape[:2])


def _none(delta: Dual, b: int) -> Gradients:
    return {}


def _dense(path: str, state: Params, r: Dual) -> Passed[Dual]:
    weight, bias = state[named(path, "weight")], state.get(named(path, "bias"))
    value, tangents = _both(lambda v: v @ weight.T, r)

    def read(delta: Dual, b: int) -> Gradients:
        return _products(path, _columns(delta, b), _columns(r, b), bias is not None)

    out = value if bias is None else value + bias
    return Passed((out, tangents), lambda delta: _both(lambda v: v @ weight, delta), read)


def _convolution(path: str, layer: nn.Conv2d, state: Params, h: Dual) -> Passed[Dual]:
    weight, bias = state[named(path, "weight")], state.get(named(path, "bias"))
    g = Geometry.of(layer)
    value, tangents = _both(lambda v: F.conv2d(v, weight, None, g.stride, g.padding), h)

    def read(delta: Dual, b: int) -> Gradients:
        patches = _both(lambda v: F.unfold(v, g.kernel, padding=g.padding, stride=g.stride), h)
        return _products(
            path, _columns(_both(lambda v: v.flatten(2), delta), b), _columns(patches, b), bias is not None
        )

    def back(delta: Dual) -> Dual:
        size = h[0].shape[1:]
        return _both(lambda v: conv2d_input((len(v), *size), weight, v, g.stride, g.padding), delta)

    out = value if bias is None else value + bias[:, None, None]
    return Passed((out, tangents), back, read)


def _columns(dual: Dual, b: int) -> Dual:
    """Return (M, C) or (M, C, positions) as (B, C, N positions), tangents alike."""

    def shape(v: Tensor) -> Tensor:
        v = v[..., None] if v.ndim == 2 else v
        return v.reshape(b, -1, *v.shape[1:]).transpose(1, 2).flatten(2)

    value, tangents = dual
    return shape(value), None if tangents is None else vmap(shape)(tangents)


def _products(path: str, delta: Dual, h: Dual, bias: bool) -> Gradients:
    """Return δ hᵀ and Σ δ per problem, with their tangents."""
    (d, dd), (c, dc) = delta, h
    slope = None
    if dd is not None and dc is not None:
        slope = (dd @ c.mT).flatten(0, 1)  # (T B, O, I)
        slope = slope.baddbmm_(d.expand_as(dd).flatten(0, 1), dc.flatten(0, 1).mT).reshape(*dd.shape[:2], -1)
    gradients: Gradients = {named(path, "weight"): ((d @ c.mT).flatten(1), slope)}
    if bias:
        gradients[named(path, "bias")] = (d.sum(2), None if dd is None else dd.sum(3))
    return gradients


def _reshaping(module: nn.Module, h: Dual) -> Passed[Dual]:
    shape = h[0].shape[1:]
    flat = isinstance(module, nn.Flatten)
    out = _both(lambda v: v.flatten(1), h) if flat else h
    return Passed(out, lambda delta: _both(lambda v: v.reshape(-1, *shape), delta), _none)


def _linear_here(module: nn.Module, h: Dual) -> Passed[Dual]:
    """A layer without parameters that is linear around h, such as a pooling."""
    value, tangents = h
    result: Any = vjp(module, value)
    out, pull = result
    slope = None if tangents is None else vmap(lambda v: jvp(module, (value,), (v,))[1])(tangents)

    def back(delta: Dual) -> Dual:
        d, dd = delta
        return pull(d)[0], None if dd is None else vmap(lambda v: pull(v)[0])(dd)

    return Passed((out, slope), back, _none)


def _elementwise(module: nn.Module, h: Dual, widths: Iterator[Tensor] | None) -> Passed[Dual]:
    """An activation f: dh' = f' dh on the way up; δ f' and dδ f' + δ f'' dh on the way back."""
    value, tangents = h
    kinked = isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.Hardtanh))
    width = next(widths).reshape(-1, *[1] * (value.ndim - 1)) if kinked and widths is not None else None
    out, first, second = derivatives(module, value, width)

    def back(delta: Dual) -> Dual:
        d, dd = delta
        if dd is None or tangents is None:
            return d * first, None
        return d * first, dd * first + (d * second) * tangents

    return Passed((out, None if tangents is None else tangents * first), back, _none)


def derivatives(module: nn.Module, z: Tensor, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return an activation's value and its first two derivatives; torch's own where they are not written here."""
    if isinstance(module, nn.Sigmoid):
        s = z.sigmoid()
        slope = s * (1 - s)
        return s, slope, slope * (1 - 2 * s)
    if isinstance(module, nn.Tanh):
        t = z.tanh()
        return t, 1 - t * t, -2 * t * (1 - t * t)
    if type(module) is nn.ReLU:
        if width is None:
            return z.clamp_min(0), (z > 0).to(z), torch.zeros_like(z)
        s = (z / width).sigmoid()
        return width * F.softplus(z / width), s, s * (1 - s) / width

    def f(t: Tensor) -> Tensor:
        with nullcontext() if width is None else Smoothing([width]):
            result: Tensor = module(t.clone())
        return result

    ones = torch.ones_like(z)
    slopes: Any = jvp(lambda t: jvp(f, (t,), (ones,))[1], (z,), (ones,))
    return f(z), slopes[0], slopes[1]
