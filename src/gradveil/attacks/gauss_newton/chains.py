"""Rows of an update and products with their Jacobian, both passes written out, for chains of known layers.

The layers leave their patches, slopes and δ behind. Along a direction a layer's gradient G = δ hᵀ then changes by
δ dhᵀ + dδ hᵀ: two matrix products, also for all unknowns at once, where differentiating the gradient by torch.func runs
a small grouped convolution for each. Every operation is linear in the direction, so that autograd gives the transposed
program as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap

from gradveil import pace
from gradveil.attacks.gauss_newton.equations import Linearised, Smoothing
from gradveil.gradients.by_hand import Geometry, Pair, pair
from gradveil.modules import Link
from gradveil.tree import Params, named


def can_write_out(links: Sequence[Link] | None) -> bool:
    """Return whether every layer with parameters is linear or convolutional."""
    return links is not None and all(isinstance(x.module, (nn.Linear, nn.Conv2d)) for x in links if x.has_parameters)


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a layer is an activation."""
    return type(module).__module__.startswith("torch.nn.modules.activation") or isinstance(module, nn.Identity)


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


def linearised(
    links: Sequence[Link], state: Params, input_shape: tuple[int, ...], names: Sequence[str], pixels: int
) -> Callable[..., Linearised]:
    """Return, at many points (B, n), the named gradients and products with their Jacobian; the first are pixels."""

    def at(z: Tensor, y: Tensor, guess: Tensor, rest: Tensor, widths: Tensor, smooth: bool) -> Linearised:
        u, delta = behind(z[:, pixels:], guess, y, rest)
        (b, n), p = guess.shape[:2], u.exp()
        each = iter(widths.repeat_interleave(n, 0).unbind(1)) if smooth else None
        chain = _Chain.at(links, state, z[:, :pixels].reshape(-1, *input_shape), delta, b, each)
        log_q = chain.logits.log_softmax(-1).view_as(guess)
        q, p, others, wrong = (part[:, None] for part in (log_q.exp(), p, p * (1 - y), y))  # beside directions

        def values() -> Tensor:
            found = chain.gradients()
            return torch.cat([*(found[name] for name in names), (log_q - u).flatten(1)], 1)

        def push(v: Tensor) -> list[Tensor]:
            dx, du = v[..., :pixels].unflatten(2, (n, -1)), SPREAD * v[..., pixels:].unflatten(2, guess.shape[1:])
            du = du - (p * du).sum(-1, keepdim=True)
            changed = others * du
            ddelta = (changed - wrong * changed.sum(-1, keepdim=True)).transpose(1, 2).flatten(0, 1) / n
            dlogits, found = chain.along(dx.transpose(1, 2).reshape(b * n, -1, *input_shape), ddelta)
            dlogits = dlogits.unflatten(0, (b, n)).transpose(1, 2)
            gap = dlogits - (q * dlogits).sum(-1, keepdim=True) - du
            return [*(found[name] for name in names), gap.flatten(2)]

        return Linearised(values, push)

    return at


@dataclass(frozen=True)
class LinearStep:
    """A layer at the point. ``up`` also returns what ``back`` and ``read`` need of the directions (M, T, ...)."""

    output: Tensor
    up: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # dh, δ' -> dh', kept
    pull: Callable[[Tensor], Tensor]  # δ' -> δ
    back: Callable[[Tensor, Tensor, Tensor], Tensor]  # δ', dδ', kept -> dδ
    own: Callable[[Tensor], Params] = lambda delta: {}  # δ' -> the layer's gradients (B, size)
    read: Callable[[Tensor, Tensor, Tensor], Params] = lambda delta, ddelta, kept: {}  # their directions (B, T, size)


@dataclass(frozen=True)
class _Chain:
    """All layers at the point, and δ behind each."""

    steps: Sequence[LinearStep]
    deltas: Sequence[Tensor]

    @classmethod
    def at(
        cls, links: Sequence[Link], state: Params, x: Tensor, delta: Tensor, problems: int,
        widths: Iterator[Tensor] | None,
    ) -> "_Chain":  # fmt: skip
        steps, h = [], x
        for link in links:
            steps.append(_linear_step(link, state, h, problems, widths))
            h = steps[-1].output
        deltas = [delta]
        for step in reversed(steps[1:]):
            deltas.insert(0, step.pull(deltas[0]))
        return cls(steps, deltas)

    @property
    def logits(self) -> Tensor:
        return self.steps[-1].output

    def gradients(self) -> Params:
        """Return the gradients (B, size) by name."""
        found: Params = {}
        for step, delta in zip(self.steps, self.deltas, strict=True):
            found |= step.own(delta)
        return found

    def along(self, dx: Tensor, ddelta: Tensor) -> tuple[Tensor, Params]:
        """Return the directions of the logits, and of the gradients (B, T, size), for dx and dδ at the logits."""
        dh, kept = dx, []
        for step, delta in zip(self.steps, self.deltas, strict=True):
            dh, some = step.up(dh, delta)
            kept.append(some)
        found: Params = {}
        for i in range(len(self.steps) - 1, -1, -1):
            found |= self.steps[i].read(self.deltas[i], ddelta, kept[i])
            if i:
                ddelta = self.steps[i].back(self.deltas[i], ddelta, kept[i])
        return dh, found


def _linear_step(link: Link, state: Params, h: Tensor, problems: int, widths: Iterator[Tensor] | None) -> LinearStep:
    module = link.module
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        return _Weighted.step(link.path, module, state, h, problems)
    if isinstance(module, nn.Flatten):
        shape = h.shape[1:]
        return _fixed(h.flatten(1), lambda v: v.flatten(2), lambda v: v.unflatten(-1, shape))
    if isinstance(module, (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)):
        return _fixed(h, lambda v: v, lambda v: v)
    if is_elementwise(module):
        kinked = isinstance(module, (nn.ReLU, nn.LeakyReLU, nn.Hardtanh))
        width = next(widths).reshape(-1, *[1] * (h.ndim - 1)) if kinked and widths is not None else None
        out, first, second = derivatives(module, h, width)
        beside = first[:, None]
        return LinearStep(
            out, lambda v, _: (v * beside, v), lambda d: d * first,
            lambda d, dd, kept: torch.addcmul(dd * beside, (d * second)[:, None], kept),
        )  # fmt: skip
    result: Any = vjp(module, h)
    out, pull = result
    step = _fixed(out, _each(lambda v: jvp(module, (h,), (v,))[1]), _each(lambda v: pull(v)[0]))
    return replace(step, pull=lambda d: pull(d)[0])


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function of (M, ...) as one of directions (M, T, ...)."""
    many: Callable[[Tensor], Tensor] = vmap(function, 1, 1)
    return lambda v: function(v[:, 0])[:, None] if v.shape[1] == 1 else many(v)


def _fixed(out: Tensor, up: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> LinearStep:
    """A layer that is linear around the point and has no parameters."""
    return LinearStep(out, lambda v, _: (up(v), v), back, lambda d, dd, kept: back(dd))


@dataclass(frozen=True)
class _Weighted:
    """A linear layer or a convolution, as a product with its columns: the input itself, or patches of it."""

    path: str
    weight: Tensor  # (O, C)
    bias: Tensor | None
    here: Tensor  # (M, C, positions)
    columns: Callable[[Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]  # the transposed of that
    places: Pair | None  # of a convolution's output
    problems: int

    @classmethod
    def step(cls, path: str, module: nn.Module, state: Params, h: Tensor, problems: int) -> LinearStep:
        weight, bias = state[named(path, "weight")].flatten(1), state.get(named(path, "bias"))
        columns, spread, places = _as_columns(module, h)
        one = cls(path, weight, bias, columns(h), columns, spread, places, problems)
        out = one.shaped(weight @ one.here + (0.0 if bias is None else bias[:, None]))
        return LinearStep(out, one.up, one.pull, one.back, one.own, one.read)

    def shaped(self, v: Tensor) -> Tensor:
        return v[..., 0] if self.places is None else v.unflatten(-1, self.places)

    def flat(self, v: Tensor) -> Tensor:
        return v[..., None] if self.places is None else v.flatten(-2)

    def up(self, v: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        c = self.columns(v.flatten(0, 1)).unflatten(0, v.shape[:2])
        if c.shape[1] > 1:
            return self.shaped(self.weight @ c), c
        product: Tensor
        product, change = _Products.apply(c[:, 0], self.weight, self.flat(d))
        return self.shaped(product[:, None]), change

    def pull(self, d: Tensor) -> Tensor:
        return self.spread(self.weight.T @ self.flat(d))

    def back(self, d: Tensor, dd: Tensor, kept: Tensor) -> Tensor:
        every = self.pull(dd.flatten(0, 1))
        whole: Tensor = every.unflatten(0, dd.shape[:2])
        return whole

    def own(self, d: Tensor) -> Params:
        return self.named(self.flat(d) @ self.here.mT, self.flat(d).sum(-1))

    def read(self, d: Tensor, dd: Tensor, kept: Tensor) -> Params:
        slopes, t = self.flat(dd), dd.shape[1]
        if t == 1:
            return self.named((slopes[:, 0] @ self.here.mT + kept.mT)[:, None], slopes.sum(-1))
        product = (slopes.flatten(1, 2) @ self.here.mT).view(len(dd) * t, -1, self.here.shape[1])
        product.baddbmm_(self.flat(d)[:, None].expand_as(slopes).flatten(0, 1), kept.flatten(0, 1).mT)
        return self.named(product.unflatten(0, (-1, t)), slopes.sum(-1))

    def named(self, weights: Tensor, biases: Tensor) -> Params:
        found = {named(self.path, "weight"): weights.flatten(-2)}
        if self.bias is not None:
            found[named(self.path, "bias")] = biases
        if len(self.here) == self.problems:
            return found
        return {name: v.unflatten(0, (self.problems, -1)).sum(1) for name, v in found.items()}


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


def _as_columns(
    module: nn.Module, h: Tensor
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Pair | None]:
    """Return how the input becomes columns (M, C kernel, positions), the transposed of that, and the output's size."""
    if not isinstance(module, nn.Conv2d):
        return lambda v: v[..., None], lambda v: v[..., 0], None
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
