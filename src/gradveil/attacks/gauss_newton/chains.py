"""Jacobians and products with them, with both passes written out, for models that are a chain of known layers.

Beside the activations h go their tangents, one per unknown, and beside δ on the way back its own. A layer's gradient
G = δ hᵀ then has the tangent δ dhᵀ + dδ hᵀ: two matrix products for all unknowns at once, where differentiating the
gradient by torch.func runs a small grouped convolution for each. For products alone the layers leave their patches,
slopes and δ behind; every operation is linear in the direction, so that autograd gives the transposed program as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.nn.grad import conv2d_input

from gradveil import pace
from gradveil.attacks.gauss_newton.equations import Push, Smoothing
from gradveil.gradients.by_hand import Geometry, Pair, Passed, pair
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


SPREAD = 3.0  # standard deviation of the free logits around their first guess


def delta_of(log_p: Tensor, y: Tensor) -> Tensor:
    """Return p - y (..., K) without its cancellation: the true class misses what the others have."""
    others = log_p.exp() * (1 - y)
    return others - y * others.sum(-1, keepdim=True)


def behind(v: Tensor, guess: Tensor, y: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits that free numbers v (B, N K) stand for (B, N, K), and the δ that they make (B N, K)."""
    u = (guess + SPREAD * v.reshape(guess.shape)).log_softmax(-1)
    return u, (delta_of(u, y) + rest).flatten(0, 1) / guess.shape[1]


def products(
    links: Sequence[Link], state: Params, input_shape: tuple[int, ...], names: Sequence[str], pixels: int
) -> Callable[..., Push]:
    """Return, at many points (B, n), products with the Jacobian of the named gradients; so many unknowns are pixels."""
    shape = (-1, *input_shape)

    def at(z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool) -> Push:
        u, delta = behind(z[:, pixels:], guess, y, rest)
        p, others = u.exp(), u.exp() * (1 - y)
        each = iter(widths.repeat_interleave(guess.shape[1], 0).unbind(1)) if smooth else None
        along, logits = _linearise(links, state, z[:, :pixels].reshape(shape), delta, len(z), each)
        q = logits.softmax(-1).view_as(guess)

        def push(v: Tensor) -> Tensor:
            du = SPREAD * v[:, pixels:].reshape(guess.shape)
            du = du - (p * du).sum(-1, keepdim=True)
            changed = others * du
            ddelta = (changed - y * changed.sum(-1, keepdim=True)).flatten(0, 1) / guess.shape[1]
            dlogits, found = along(v[:, :pixels].reshape(shape), ddelta)
            dlogits = dlogits.view_as(guess)
            gap = dlogits - (q * dlogits).sum(-1, keepdim=True) - du
            return torch.cat([*(found[name] for name in names), gap.flatten(1)], 1)

        return push

    return at


@dataclass(frozen=True)
class LinearStep:
    """A layer at the point. ``up`` also returns what ``back`` and ``read`` need of the direction."""

    output: Tensor
    up: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # dh, δ' -> dh', kept
    pull: Callable[[Tensor], Tensor]  # δ' -> δ
    back: Callable[[Tensor, Tensor, Tensor], Tensor]  # δ', dδ', kept -> dδ
    read: Callable[[Tensor, Tensor, Tensor], Params]  # δ', dδ', kept -> the direction of the layer's gradients


def _linearise(
    links: Sequence[Link], state: Params, x: Tensor, delta: Tensor, problems: int, widths: Iterator[Tensor] | None
) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, Params]], Tensor]:
    """Return (dx, dδ at the logits) -> direction of the logits and of the gradients (B, size); and the logits."""
    steps, h = [], x
    for link in links:
        steps.append(_linear_step(link, state, h, problems, widths))
        h = steps[-1].output
    deltas = [delta]
    for step in reversed(steps[1:]):
        deltas.insert(0, step.pull(deltas[0]))

    def along(dx: Tensor, ddelta: Tensor) -> tuple[Tensor, Params]:
        dh, kept = dx, []
        for step, delta in zip(steps, deltas, strict=True):
            dh, some = step.up(dh, delta)
            kept.append(some)
        found: Params = {}
        for i in range(len(steps) - 1, -1, -1):
            found |= steps[i].read(deltas[i], ddelta, kept[i])
            if i:
                ddelta = steps[i].back(deltas[i], ddelta, kept[i])
        return dh, found

    return along, h


def _nothing(delta: Tensor, ddelta: Tensor, kept: Tensor) -> Params:
    return {}


def _linear_step(link: Link, state: Params, h: Tensor, problems: int, widths: Iterator[Tensor] | None) -> LinearStep:
    module = link.module
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        return _weighted(link.path, module, state, h, problems)
    if isinstance(module, nn.Flatten):
        return _fixed(h.flatten(1), lambda v: v.flatten(1), lambda v: v.view_as(h))
    if isinstance(module, (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)):
        return _fixed(h, lambda v: v, lambda v: v)
    if is_elementwise(module):
        kinked = isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.Hardtanh))
        width = next(widths).reshape(-1, *[1] * (h.ndim - 1)) if kinked and widths is not None else None
        out, first, second = derivatives(module, h, width)
        return LinearStep(
            out, lambda v, _: (v * first, v), lambda d: d * first,
            lambda d, dd, kept: torch.addcmul(dd * first, d * second, kept), _nothing,
        )  # fmt: skip
    result: Any = vjp(module, h)
    out, pull = result
    return _fixed(out, lambda v: jvp(module, (h,), (v,))[1], lambda v: pull(v)[0])


def _fixed(out: Tensor, up: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> LinearStep:
    """A layer that is linear around the point and has no parameters."""
    return LinearStep(out, lambda v, _: (up(v), v), back, lambda d, dd, kept: back(dd), _nothing)


def _weighted(path: str, module: nn.Module, state: Params, h: Tensor, problems: int) -> LinearStep:
    """A linear layer or a convolution, as a product with its columns: the input itself, or patches of it."""
    weight, bias = state[named(path, "weight")].flatten(1), state.get(named(path, "bias"))
    columns, spread, places = _as_columns(module, h)
    here = columns(h)

    def shaped(v: Tensor) -> Tensor:
        return v.unflatten(2, places) if isinstance(module, nn.Conv2d) else v[..., 0]

    def flat(v: Tensor) -> Tensor:  # (M, O, ...) -> (M, O, positions)
        return v.flatten(2) if v.ndim > 2 else v[..., None]

    def up(v: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        product, change = _Products.apply(columns(v), weight, flat(d))
        return shaped(product), change

    def pull(d: Tensor) -> Tensor:
        return spread(weight.T @ flat(d))

    def read(d: Tensor, dd: Tensor, change: Tensor) -> Params:
        found = {named(path, "weight"): (flat(dd) @ here.mT + change.mT).flatten(1)}
        if bias is not None:
            found[named(path, "bias")] = flat(dd).sum(2)
        return {name: v.unflatten(0, (problems, -1)).sum(1) for name, v in found.items()}

    out = shaped(weight @ here + (0.0 if bias is None else bias[:, None]))
    return LinearStep(out, up, pull, lambda d, dd, change: pull(dd), read)


class _Products(torch.autograd.Function):
    """W c and c δᵀ for columns c (M, C, positions); the way back is one sum of two products, in the layout of c."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, weight: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, delta)
        return weight @ c, c @ delta.mT

    @staticmethod
    def backward(ctx: Any, by_product: Tensor, by_change: Tensor) -> tuple[Tensor, None, None]:
        weight, delta = ctx.saved_tensors
        return (weight.T @ by_product).baddbmm_(by_change, delta), None, None


def _as_columns(module: nn.Module, h: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Pair]:
    """Return how the input becomes columns (M, C kernel, positions), the transposed of that, and the output's size."""
    if not isinstance(module, nn.Conv2d):
        return lambda v: v[..., None], lambda v: v[..., 0], (1, 1)
    g, size = Geometry.of(module), pair(h.shape[2:])
    places = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, g.padding, g.kernel, g.stride, strict=True)]
    return (
        lambda v: F.unfold(v, g.kernel, padding=g.padding, stride=g.stride),
        lambda v: F.fold(v, size, g.kernel, padding=g.padding, stride=g.stride),
        pair(places),
    )


LOOK = 10  # iterations between looks at whether all are done, on a GPU, where each makes the host wait


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    iterations: int,
    tolerance: float,
) -> Tensor:
    """Solve A s = right (B, n) for symmetric positive A, every problem with its own step lengths.

    Where the time is over (see ``pace``), as far as it came.
    """
    z = precondition(right)
    rz = (right * z).sum(1)
    state = [torch.zeros_like(right), right.clone(), z.clone(), rz]  # s, r, p, r z
    enough = tolerance**2 * rz

    def iterate() -> None:
        s, r, p, rz = state
        live = rz > enough
        ap = product(p)
        length = (rz / (p * ap).sum(1)).masked_fill(~live, 0.0)[:, None]
        s.addcmul_(length, p)
        r.addcmul_(length, ap, value=-1)
        z = precondition(r)
        fresh = (r * z).sum(1)
        p.mul_((fresh / rz).masked_fill(~live, 0.0)[:, None]).add_(z)
        rz.copy_(torch.where(live, fresh, rz))

    step = captured(iterate, state) if right.is_cuda and iterations > LOOK else iterate
    for k in range(iterations):
        if k % (LOOK if right.is_cuda else 1) == 0 and not bool((state[3] > enough).any()):
            break
        step()
        if pace.part_of_step((k + 1) / iterations):
            break
    return state[0]


def captured(change: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], object]:
    """Return what changes the state in place as a CUDA graph, or as it is where it cannot be captured."""
    before = [value.clone() for value in state]
    change()  # settles what torch sets up on first use
    for value, old in zip(state, before, strict=True):
        value.copy_(old)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            change()
    except RuntimeError:
        return change
    return graph.replay
