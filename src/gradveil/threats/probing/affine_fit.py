"""What a defence does to numbers, as a formula found by running it, and how a server undoes it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor
from torch.func import vjp

from gradveil.attacks.base import build as build_attack
from gradveil.errors import AttackError, LayerError
from gradveil.gradients.functional import quiet
from gradveil.losses import CrossEntropy
from gradveil.modules import find_layer
from gradveil.threats.probing.function import DefenseFunction, Secret, close
from gradveil.tree import Params, dot, named, norm
from gradveil.types import GaussianPrior, Observation

DIGITS = 4096  # of a place in a vector: a tensor of the largest size has fewer than its square
MOST_CG = 300  # steps of conjugate gradients


@dataclass(frozen=True, eq=False)
class AffineFit:
    """y = A g + c for one secret, and its inverse."""

    constant: Tensor  # c
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    known: Tensor | None = None  # entries of g that y tells of; None: all
    log_scale: float = 0.0  # Σ log |A|, of all entries
    adds: bool = False  # A = 1
    what: str = "a linear map"  # in words

    def undone(self, y: Tensor) -> Tensor:
        """Return g."""
        return self.inverse(y - self.constant)


def affine(
    channel: DefenseFunction, secret: Secret, examples: Sequence[Tensor], like: AffineFit | None = None
) -> AffineFit | None:
    """Return the straight function that the defence is for this secret; None where it is none, or has no inverse.

    ``like``: that of another secret; where nothing but a constant is added there, it is taken to be so here.
    """
    constant = channel.run(torch.zeros_like(examples[0]), secret)
    if constant is None:
        return None
    if like is not None and like.adds:
        return replace(like, constant=constant)

    def linear(v: Tensor) -> Tensor | None:
        out = channel.run(v, secret)
        return None if out is None else out - constant

    a, b = examples[:2]
    outs = [linear(v) for v in (a, b, a - 2 * b)]
    if any(out is None for out in outs):
        return None
    of_a, of_b, of_both = (out for out in outs if out is not None)
    if not close(of_both, of_a - 2 * of_b, constant):
        return None
    if close(of_a, a, constant) and close(of_b, b, constant):
        what = "it adds numbers that a server can work out" if bool(constant.any()) else "it rounds numbers"
        return AffineFit(constant, _as_is, _as_is, adds=True, what=what)
    found = _places(linear, constant, a)
    if found is None:
        found = _any_linear(channel, secret, constant, a)
    if found is not None and close(found.inverse(of_b), b if found.known is None else b * found.known, constant):
        return found
    return None


def _as_is(v: Tensor) -> Tensor:
    return v


def _places(linear: Callable[[Tensor], Tensor | None], constant: Tensor, like: Tensor) -> AffineFit | None:
    """Return the map where each entry is another one, times a number: y_i = s_i g_j(i) + c_i."""
    size, n = like.square().mean().sqrt(), len(like)
    unit = 4 * size / DIGITS
    places = torch.arange(n, device=like.device)
    probes = [size.expand(n), unit * (places % DIGITS + 1), unit * (places // DIGITS + 1)]
    outs = [linear(p.to(like)) for p in probes]
    if any(out is None for out in outs):
        return None
    ones, low, high = (out for out in outs if out is not None)
    scale = ones / size
    live = scale.abs() > 1e-6
    safe = torch.where(live, scale, 1.0)
    source = ((high / unit / safe).round() - 1) * DIGITS + (low / unit / safe).round() - 1
    source = torch.where(live, source, 0.0).long()
    if bool(((source < 0) | (source >= n)).any()) or len(source[live].unique()) < int(live.sum()):
        return None

    def forward(v: Tensor) -> Tensor:
        return torch.where(live, scale * v[source], 0.0)

    def inverse(y: Tensor) -> Tensor:
        return torch.zeros_like(y).index_copy(0, source[live], (y / safe)[live])

    known = None if bool(live.all()) else inverse(torch.ones_like(like)).ne(0).to(like)
    moved = not bool((source[live] == places[live]).all())
    what = "it puts the entries in another order" if moved else "it multiplies entries by known factors"
    if not bool(live.any()):
        what = "nothing of the gradient is sent"
    return AffineFit(constant, forward, inverse, known, float(safe.abs().log().sum()), what=what)


def _any_linear(channel: DefenseFunction, secret: Secret, constant: Tensor, like: Tensor) -> AffineFit | None:
    """Return a linear map whose inverse is found by its transpose, which torch has: at once for a rotation."""

    def forward(v: Tensor) -> Tensor:
        return channel.flat(channel.sent(channel.tree(v), secret)) - constant

    try:
        transposed = vjp(forward, torch.zeros_like(like))[1]
    except Exception:  # its code cannot be differentiated
        return None

    def inverse(y: Tensor) -> Tensor:
        x: Tensor = transposed(y)[0].detach()
        return x if close(forward(x), y, constant) else _solve(lambda v: transposed(forward(v))[0], x).detach()

    return AffineFit(constant, forward, inverse, what="it rotates the entries, or mixes them in another linear way")


def _solve(product: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """Return x with AᵀA x = right by conjugate gradients."""
    x = torch.zeros_like(right)
    rest, step = right.clone(), right.clone()
    size = rest @ rest
    for _ in range(MOST_CG):
        if float(size) <= 1e-14 * float(right @ right):
            break
        pushed = product(step)
        length = size / (step @ pushed)
        x, rest = x + length * step, rest - length * pushed
        before, size = size, rest @ rest
        step = rest + size / before * step
    return x


def likeliest(y: Tensor, maps: Sequence[AffineFit], prior: GaussianPrior) -> AffineFit:
    """Return the map under which an update looks most like those of public examples."""
    away = torch.stack([one.undone(y) for one in maps]) - prior.mean
    unlikely = torch.linalg.vecdot(away, prior.whiten(away))
    return maps[int((unlikely + 2 * torch.tensor([one.log_scale for one in maps]).to(y)).argmin())]


Form = Callable[[Tensor], Tensor]


# What a defence with a secret leaves of one tensor: the same for what was sent and for the true gradient.
def _direction(t: Tensor) -> Tensor:
    return t / t.square().sum().clamp_min(1e-37).sqrt()


def line(t: Tensor) -> Tensor:
    """Return the direction, turned so that the largest entry is negative, as that of p - y is."""
    unit = _direction(t)
    flat = unit.flatten()
    return -flat[flat.abs().argmax()].sign() * unit


def aligned(sent: Tensor) -> Form:
    """Return: the direction, turned to that of what was sent."""
    seen = line(sent)
    return lambda t: (_direction(t) * seen.to(t)).sum().sign() * _direction(t)


def _centred(t: Tensor) -> Tensor:
    return t - t.mean()


def _standard(t: Tensor) -> Tensor:
    return _direction(_centred(t))


def _rows(t: Tensor) -> Tensor:
    return t - t.reshape(len(t), -1).mean(1).reshape(-1, *[1] * (t.ndim - 1)) if t.ndim > 1 else _centred(t)


def _columns(t: Tensor) -> Tensor:
    return t - t.mean(0, keepdim=True) if t.ndim > 1 else _centred(t)


def _sorted(t: Tensor) -> Tensor:
    return t.reshape(-1).sort().values.reshape(t.shape)


FORMS: dict[str, Form] = {
    "its direction": _direction,
    "its direction, but for the sign": line,
    "its differences from the mean": _centred,
    "its direction after taking off the mean": _standard,
    "its differences within a row": _rows,
    "its differences within a column": _columns,
    "the sizes of its entries": torch.abs,
    "its entries in another order": _sorted,
    "the sizes of its entries in another order": lambda t: _sorted(t.abs()),
}
FAITHFUL = list(FORMS)[:6]  # of which all but a few numbers of a row are left
OF_LENGTH = list(FORMS)[6:]  # which have the length of the tensor


CLASSES = 20  # up to which all are tried, where the label of an update cannot be read
LARGE = 500_000  # weights beyond which they are not
CLEAR = 0.2  # by how much a class must be more alike than the next to be taken at once


def one_step(seen: Observation) -> Observation:
    """Return what is seen of a client of one step as its gradient."""
    return seen.as_one_step() if seen.update.num_steps == 1 else seen


def onto(function: DefenseFunction, basis: Tensor, off: bool = False) -> Callable[[Params], Params]:
    """Return the projection of tensors by name onto a basis (r, n), or off it."""

    def projected(tree: Params) -> Params:
        flat = function.flat(tree)
        held = basis.to(flat)
        along = (flat @ held.T) @ held
        return function.tree(flat - along if off else along)

    return projected


def matched(
    seen: Observation, function: DefenseFunction, change: Callable[[Params], Params], noise: float = 0.0
) -> Observation:
    """Return the view that compares what a change leaves of the update and of trials."""
    seen = one_step(seen)
    update = replace(seen.update, gradient=change(seen.update.gradient))
    known = dict.fromkeys(function.parts, noise) if noise else seen.noise
    seen = replace(seen, update=update, simulate=change, simulate_on=function.where, noise=known)
    return with_label(seen, list(function.parts))


def with_label(seen: Observation, unsafe: Collection[str] = ()) -> Observation:
    """Return a view of one example's update with its label, where it cannot be read off the last layer any more.

    ``unsafe``: tensors that are not what the client's were. Of classes that updates of public examples speak for, the
    one is taken whose best match is closest.
    """
    loss = seen.loss
    if seen.labels is not None or seen.num_examples > 1 or not isinstance(loss, CrossEntropy) or not loss.plain:
        return seen
    try:
        layer = find_layer(seen.model)
    except LayerError:
        return seen
    bias, weight = named(layer, "bias"), named(layer, "weight")

    def readable(name: str, part: float) -> bool:
        if name not in seen.visible or name in unsafe:
            return False
        size = float(seen.update.gradient[name].square().mean().sqrt())
        kept = 1.0 if name not in seen.weights else float((seen.weights[name] != 0).double().mean())
        return seen.noise.get(name, 0.0) < 0.3 * size and kept >= part

    if readable(bias, 1.0):
        return seen
    if readable(weight, 0.3):
        return seen.without(bias) if bias in seen.update.gradient else seen
    if seen.num_classes > CLASSES or sum(p.numel() for p in seen.model.parameters()) > LARGE:
        return seen
    first, *others = _alike(seen)
    if not others:
        return replace(seen, labels=first)
    tried = [replace(seen, labels=label) for label in (first, *others)]
    try:
        rebuilt = build_attack("newton:steps=15").reconstruct_many(tried, [Generator().manual_seed(0) for _ in tried])
    except AttackError:
        return replace(seen, labels=first)
    return min(zip(rebuilt, tried, strict=True), key=lambda pair: pair[0].objective)[1]


def _alike(seen: Observation) -> list[Tensor]:
    """Return the classes (1,) for which updates of other examples look most like this one; one where that is clear."""
    like = next(seen.model.parameters())
    if seen.public is not None:
        inputs = seen.public.inputs[:8]
    else:
        middle = torch.full(seen.input_shape, sum(seen.bounds) / 2)
        inputs = (middle if seen.prior is None else seen.prior.mean.reshape(seen.input_shape))[None]
    target = {n: g * seen.weights.get(n, torch.ones(())).to(g) for n, g in seen.update.gradient.items()}
    cosines = torch.zeros(seen.num_classes)
    weights = {n: p for n, p in seen.model.named_parameters() if p.requires_grad}
    for label in range(seen.num_classes):
        for x in inputs.to(like):
            with torch.enable_grad(), quiet(seen.model):
                value = seen.loss(seen.model(x[None]), torch.tensor([label], device=like.device))
                grads = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
            sent = seen.sent(dict(zip(weights, grads, strict=True)))
            shown = {n: sent[n] * seen.weights.get(n, torch.ones(())).to(sent[n]) for n in target}
            cosines[label] += float(dot(shown, target) / (norm(shown) * norm(target)).clamp_min(1e-37)) / len(inputs)
    best = cosines.topk(min(3, len(cosines)))
    clear = float(best.values[0] - best.values[1]) > CLEAR
    return [label[None].to(like.device) for label in best.indices[: 1 if clear else None]]
