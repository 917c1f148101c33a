"""What a search minimises: stacked matching problems, distances of gradients, and terms on the examples alone.

Observations that share a model, the shape of the unknown and the transform to simulate are stacked and solved
together. A tensor that one of them does not match has weight 0 there and costs nothing but its place. An update
of several local steps is matched as one step with their mean gradient; ``fedavg`` unrolls the steps instead.

A client whose batch norm is in train mode moves its running statistics towards those of its own batches,
r <- (1 - m) r + m s. The server knows r, m and the number of steps, so that it reads s off what comes back: at every
batch norm the mean and the variance of each channel over the client's batch, exactly for one step, averaged with known
weights over several. No defence of the gradient touches them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.attacks.base import check_seen
from gradveil.errors import AttackError
from gradveil.gradients.functional import Form, per_problem, trial_gradients
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.modules import copied_state
from gradveil.tree import Params, parameters
from gradveil.types import Observation

BLUR = 0.03  # of Adam's steps: how far from mere signs a trial's are taken, so that they have slopes
SMALLEST_NOISE = 1e-2  # a tensor counts as known to this part of its rms, however little noise it carries


def stack_key(s: Observation) -> tuple[object, ...]:
    """Return what observations that can be stacked have in common."""
    unknown = (s.input_shape, s.num_classes, s.num_examples, s.labels is None, s.bounds)
    return (id(s.model), id(s.simulate), s.loss, *unknown)


@dataclass(frozen=True)
class Matching:
    """P problems that share a model, stacked. ``Matching.of`` makes it; ``take`` repeats or drops problems."""

    model: nn.Module
    names: tuple[str, ...]  # of the tensors that are matched by at least one problem
    target: Params  # name: (P, *shape)
    weights: Params  # name: (P, *shape) or (P, 1, ...); absent: 1 for all
    floor: Tensor  # (P,) what known noise leaves of the weighted squared distance at the truth
    trial: Callable[[Tensor, Tensor], Params]  # x (P, N, *shape), y (P, N, K) -> name: (P, *shape)

    @classmethod
    def of(cls, seen: Sequence[Observation], form: Form = "auto") -> "Matching":
        """Stack observations of one group."""
        check_seen(seen)
        seen = [s.as_one_step() for s in seen]
        first = seen[0]
        names = tuple(n for n in parameters(first.model) if any(n in s.visible for s in seen))
        like = parameters(first.model)
        target = {n: _targets(seen, n, like[n]) for n in names}
        each = [_weights(s, names, like) for s in seen]
        weights = {n: _stacked([w[n] for w in each]) for n in names}
        weights = {n: w for n, w in weights.items() if not bool((w == 1).all())}
        floor = torch.stack([_floor(s, w, like) for s, w in zip(seen, each, strict=True)])
        return cls(first.model, names, target, weights, floor, _simulated(first, names, form))

    def __len__(self) -> int:
        return len(self.floor)

    def take(self, rows: Tensor) -> "Matching":
        target, weights = pick(self.target, rows), pick(self.weights, rows)
        return replace(self, target=target, weights=weights, floor=self.floor.index_select(0, rows))

    def gradients(self, x: Tensor, y: Tensor, own: Tensor) -> Params:
        """Return the trial gradients of x (P, N, *shape) with targets y; ``own``: an attack's further unknowns."""
        return self.trial(x, y)

    @cached_property
    def energy(self) -> Tensor:
        """The weighted squared norm of each target (P,): what a trial gradient of zero would score."""
        return inner_product(self.weigh_rows(self.rows), self.rows)

    def weigh(self, name: str, value: Tensor) -> Tensor:
        return value * self.weights[name] if name in self.weights else value

    @cached_property
    def rows(self) -> list[Tensor]:
        return self.as_rows(self.target)

    @cached_property
    def _row_weights(self) -> list[Tensor] | None:
        """What rows are weighed with; None for 1 everywhere."""
        if not self.weights:
            return None
        one = self.floor.new_ones(1)
        return self.as_rows({n: self.weights.get(n, one).expand_as(g) for n, g in self.target.items()})

    def as_rows(self, tree: Params) -> list[Tensor]:
        """Return the matched tensors (P, *shape) as rows (P, ·): on a GPU all in one, as launches count there."""
        rows = [tree[n].flatten(1) for n in self.names]
        return [torch.cat(rows, 1)] if rows[0].is_cuda else rows

    def as_tensors(self, rows: list[Tensor]) -> Params:
        parts = rows[0].split([self.target[n][0].numel() for n in self.names], 1) if rows[0].is_cuda else rows
        return {n: part.view_as(self.target[n]) for n, part in zip(self.names, parts, strict=True)}

    def weigh_rows(self, rows: list[Tensor]) -> list[Tensor]:
        weights = self._row_weights
        return rows if weights is None else [r * w for r, w in zip(rows, weights, strict=True)]


def pick(tree: Params, rows: Tensor) -> Params:
    """Return the problems at these positions of stacked tensors; of the only one there is, without a copy."""
    return {n: value if len(value) == len(rows) == 1 else value.index_select(0, rows) for n, value in tree.items()}


Distance = Callable[[Matching, Params], tuple[Tensor, Params]]  # values (P,), and derivatives by the gradients


def inner_product(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return the inner product of rows, per problem (P,)."""
    return torch.stack([torch.linalg.vecdot(x, y) for x, y in zip(a, b, strict=True)]).sum(0)


def squared_distance(matching: Matching, trial: Params) -> tuple[Tensor, Params]:
    """Return Σ w (trial - target)² per problem (P,), and its derivative by each tensor of the trial gradient."""
    away = [g - target for g, target in zip(matching.as_rows(trial), matching.rows, strict=True)]
    weighed = matching.weigh_rows(away)
    return inner_product(away, weighed), matching.as_tensors([2 * r for r in weighed])


def cosine_distance(matching: Matching, trial: Params) -> tuple[Tensor, Params]:
    """Return 1 - cos(trial, target) per problem (P,) over all tensors together, and its derivative.

    The inner product is the weighted one. Where the trial gradient vanishes the distance is 1 and flat.
    """
    rows, target = matching.as_rows(trial), matching.rows
    weighed, toward = matching.weigh_rows(rows), matching.weigh_rows(target)
    inner, squared = inner_product(weighed, target), inner_product(weighed, rows)
    tiny = torch.finfo(inner.dtype).tiny
    scale = (squared * matching.energy).clamp_min(tiny).rsqrt()
    along = scale * inner / squared.clamp_min(tiny)
    slopes = [(along[:, None] * w).addcmul_(scale[:, None], t, value=-1) for w, t in zip(weighed, toward, strict=True)]
    return 1 - inner * scale, matching.as_tensors(slopes)


def _targets(seen: Sequence[Observation], name: str, like: Tensor) -> Tensor:
    found = [s.update.gradient.get(name) for s in seen]
    each = [torch.zeros_like(like) if g is None else g.detach().to(like) for g in found]
    return each[0][None] if len(each) == 1 else torch.stack(each)  # an update can be a gigabyte


def _weights(s: Observation, names: tuple[str, ...], like: Params) -> Params:
    """Return the weight of each tensor: as given, over the noise variance; one number where it is the same."""
    precision = precisions(s, like)
    out = {}
    for n in names:
        one = like[n].new_full([1] * like[n].ndim, precision[n] if n in s.visible else 0.0)
        out[n] = one * s.weights[n].to(one) if n in s.weights and n in s.visible else one
    return out


def _stacked(weights: list[Tensor]) -> Tensor:
    largest = max(weights, key=lambda w: w.numel())
    return torch.stack([w.expand(largest.shape) for w in weights])


def precisions(s: Observation, like: Params) -> dict[str, float]:
    """Return 1/σ² per tensor, the largest being 1; without any known noise, 1 for all."""
    if not any(std > 0 for std in s.noise.values()):
        return dict.fromkeys(like, 1.0)
    rms = {n: float(g.square().mean().sqrt()) for n, g in s.update.gradient.items()}
    std = {n: max(s.noise.get(n, 0.0), SMALLEST_NOISE * rms[n]) for n in s.visible}
    least = min((v for v in std.values() if v > 0), default=1.0)
    return {n: (least / max(v, least)) ** 2 for n, v in std.items()}


def _floor(s: Observation, w: Params, like: Params) -> Tensor:
    parts = [w[n].expand(like[n].shape).sum() * s.noise.get(n, 0.0) ** 2 for n in w]
    return torch.stack(parts).sum()


def _simulated(s: Observation, names: tuple[str, ...], form: Form) -> Callable[[Tensor, Tensor], Params]:
    if s.simulate is None and s.update.rule.is_plain:
        return trial_gradients(s.model, names, form, s.loss)
    plain = trial_gradients(s.model, tuple(parameters(s.model)), form, s.loss)

    def trial(x: Tensor, y: Tensor) -> Params:
        gradient = plain(x, y)
        try:
            sent: Params = vmap(partial(s.sent, blur=BLUR), randomness=s.randomness)(gradient)
        except (RuntimeError, AttackError):  # the transform looks at values, so it cannot be batched
            alone = [s.sent({n: g[i] for n, g in gradient.items()}, BLUR) for i in range(len(x))]
            sent = {n: torch.stack([a[n] for a in alone]) for n in names}
        return {n: sent[n] for n in names}

    return trial


class Penalty(Protocol):
    """A term on the images alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term of each problem (P,) for x (P, N, *shape), differentiable."""

    def take(self, rows: Tensor) -> "Penalty": ...


@dataclass(frozen=True)
class Unknowns:
    """How one problem's unknowns lie in a vector: the images, free numbers behind their targets, an attack's own."""

    images: tuple[int, ...]  # (N, *shape)
    classes: int
    bounds: tuple[float, float]
    labels: bool  # whether the targets are unknown too
    loss: Loss = CROSS_ENTROPY  # which says what targets are
    own: int = 0  # further numbers that an attack looks for

    @classmethod
    def of(cls, seen: Observation, own: int = 0) -> "Unknowns":
        """Read the layout off an observation; labels that the server knows are no unknowns."""
        images = (seen.num_examples, *seen.input_shape)
        return cls(images, seen.num_classes, seen.bounds, seen.labels is None, seen.loss, own)

    @property
    def pixels(self) -> int:
        return int(torch.Size(self.images).numel())

    @property
    def size(self) -> int:
        return self.pixels + (self.images[0] * self.classes if self.labels else 0) + self.own

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (P, N, *shape) and the free numbers of targets (P, N, K or 0) of z (P, d)."""
        x, free = z[:, : self.pixels], z[:, self.pixels : self.size - self.own]
        return x.reshape(-1, *self.images), free.reshape(len(z), self.images[0], -1)


@dataclass(frozen=True)
class MatchingObjective:
    """Distance of the trial gradient to what was seen, plus penalties; P problems."""

    matching: Matching
    unknowns: Unknowns
    labels: Tensor | None  # (P, N, K) targets as rows, where they are no unknowns
    distance: Distance
    penalties: tuple[Penalty, ...] = ()

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        z = point.detach().requires_grad_()
        with torch.enable_grad():
            x, trial = self._trial(z)
            extra = torch.stack([penalty(x) for penalty in self.penalties]).sum(0) if self.penalties else None
        with torch.no_grad():
            value, slopes = self.distance(self.matching, trial)
        outputs, cotangents = list(trial.values()), [slopes[n] for n in trial]
        if extra is not None:
            outputs, cotangents = [*outputs, extra], [*cotangents, torch.ones_like(extra)]
            value = value + extra.detach()
        # A weight that the loss does not depend on has a zero gradient for every trial: nothing to steer by.
        moving = [(out, slope) for out, slope in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if not moving:
            return value, torch.zeros_like(point)
        outs, slopes_of = zip(*moving, strict=True)
        # The images may have no say either.
        return value, torch.autograd.grad(outs, z, slopes_of, materialize_grads=True)[0]

    def residual(self, point: Tensor) -> Tensor:
        with torch.no_grad():
            return self.distance(self.matching, self._trial(point)[1])[0]

    def take(self, rows: Tensor) -> "MatchingObjective":
        labels = None if self.labels is None else self.labels.index_select(0, rows)
        penalties = tuple(penalty.take(rows) for penalty in self.penalties)
        return replace(self, matching=self.matching.take(rows), labels=labels, penalties=penalties)

    def _trial(self, z: Tensor) -> tuple[Tensor, Params]:
        x, free = self.unknowns.split(z)
        y = self.unknowns.loss.squash(free) if self.labels is None else self.labels
        own = z[:, self.unknowns.size - self.unknowns.own :]  # (P, own)
        return x, self.matching.gradients(x, y, own)


@dataclass(frozen=True)
class TotalVariation:
    """weight x (mean |difference of neighbouring rows| + mean |difference of neighbouring columns|)."""

    weight: float | Tensor  # for all problems, or one for each (P,)

    def __call__(self, x: Tensor) -> Tensor:
        rows = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
        columns = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)
        return self.weight * (rows + columns)

    def take(self, rows: Tensor) -> "TotalVariation":
        return self if isinstance(self.weight, float) else TotalVariation(self.weight.index_select(0, rows))


SENT = 0.1  # the weight beside a distance of at most 2, unless told otherwise
SMALLEST = 1e-5  # a variance below it counts as this much


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the model's batch norm layers that carry running statistics, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


def sending_norms(model: nn.Module) -> int:
    """Return how many batch norm layers of a model in training move their running statistics, which are then sent."""
    return sum(norm.training for norm in batch_norms(model).values())


def sent_statistics(seen: Observation) -> Params:
    """Return the client's own batch statistics by buffer name, (C,) each, as the sent buffers show them."""
    found: Params = {}
    for layer, norm in batch_norms(seen.model).items():
        if not norm.training:
            continue
        steps = seen.update.num_steps
        before = int(norm.num_batches_tracked or 0) if norm.momentum is None else 0
        kept = before / (before + steps) if norm.momentum is None else (1 - norm.momentum) ** steps
        for name in ("running_mean", "running_var"):
            after = seen.update.buffers.get(f"{layer}.{name}")
            if after is not None and kept < 1:
                old = norm.get_buffer(name)
                found[f"{layer}.{name}"] = (after.to(old) - kept * old) / (1 - kept)
    return found


@dataclass(frozen=True)
class SentStatistics:
    """weight x distance of the images' batch statistics, at each batch norm, from those of the client's batch.

    Per layer the mean over channels of (μ - mean)² / var + (σ² / var - 1)², so that the weight means the same at every
    layer. Taken at the first weights, over all examples.
    """

    weight: float
    client: Params  # name: (P, C)
    of: Callable[[Tensor], Params]  # x (P, N, *shape) -> name: (P, C)

    def __call__(self, x: Tensor) -> Tensor:
        trial, parts = self.of(x), []
        for name, mean in self.client.items():
            if name.endswith("running_mean"):
                spread = name.removesuffix("mean") + "var"
                var = self.client[spread].clamp_min(SMALLEST)
                far = (trial[name] - mean).square() / var + (trial[spread] / var - 1).square()
                parts.append(far.mean(1))
        return self.weight * torch.stack(parts).mean(0)

    def take(self, rows: Tensor) -> "SentStatistics":
        return replace(self, client=pick(self.client, rows))


def statistics_term(seen: Sequence[Observation], owner: Tensor, weight: float) -> tuple[SentStatistics, ...]:
    """Return the term for problems of these owners, where every client sent its statistics; else nothing."""
    known = [sent_statistics(s) for s in seen] if weight > 0 else [{}]
    if not all(known):
        return ()
    stacked = {n: torch.stack([k[n] for k in known])[owner.to(v.device)] for n, v in known[0].items()}
    return (SentStatistics(weight, stacked, per_problem(seen[0].model, _no_loss, _statistics(seen[0].model))),)


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("statistics need no loss")


def _statistics(model: nn.Module) -> Callable[[object, Tensor], Params]:
    """Return x (N, *shape) -> mean and unbiased variance of each channel at every batch norm, by buffer name."""
    norms = batch_norms(model)

    def one(_: object, x: Tensor) -> Params:
        found: Params = {}

        def look(layer: str, inputs: Tensor) -> None:
            over = [d for d in range(inputs.ndim) if d != 1]
            found[f"{layer}.running_mean"] = inputs.mean(over)
            found[f"{layer}.running_var"] = inputs.var(over)

        with ExitStack() as stack:
            for layer, norm in norms.items():
                stack.enter_context(norm.register_forward_pre_hook(lambda _, args, n=layer: look(n, args[0])))
            functional_call(model, copied_state(model), (x,))
        return found

    return one
