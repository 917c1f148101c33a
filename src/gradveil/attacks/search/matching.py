"""Observations as one stack of matching problems: their targets, weights, and the gradients of a trial.

Observations that share a model, the shape of the unknown and the transform to simulate are stacked and solved
together. A tensor that one of them does not match has weight 0 there and costs nothing but its place. An update
of several local steps is matched as one step with their mean gradient; ``fedavg`` unrolls the steps instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.attacks.base import check_seen
from gradveil.errors import AttackError
from gradveil.gradients.functional import Form, trial_gradients
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
        target = {n: _side_by_side([_target(s, n, like[n]) for s in seen]) for n in names}
        each = [_weights(s, names, like) for s in seen]
        weights = {n: _stacked([w[n] for w in each]) for n in names}
        weights = {n: w for n, w in weights.items() if not bool((w == 1).all())}
        floor = torch.stack([_floor(s, w, like) for s, w in zip(seen, each, strict=True)])
        return cls(first.model, names, target, weights, floor, _simulated(first, names, form))

    def __len__(self) -> int:
        return len(self.floor)

    def take(self, rows: Tensor) -> "Matching":
        """Return the problems at these positions; a position may come more than once."""

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
        """Return the weighted value (P, *shape) of one tensor."""
        return value * self.weights[name] if name in self.weights else value

    @cached_property
    def rows(self) -> list[Tensor]:
        """The target as rows; see ``as_rows``."""
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
        """Return rows as the tensors that they stand for."""
        parts = rows[0].split([self.target[n][0].numel() for n in self.names], 1) if rows[0].is_cuda else rows
        return {n: part.view_as(self.target[n]) for n, part in zip(self.names, parts, strict=True)}

    def weigh_rows(self, rows: list[Tensor]) -> list[Tensor]:
        """Return weighted rows."""
        weights = self._row_weights
        return rows if weights is None else [r * w for r, w in zip(rows, weights, strict=True)]


def pick(tree: Params, rows: Tensor) -> Params:
    """Return the problems at these positions of stacked tensors; of the only one there is, without a copy."""
    return {n: value if len(value) == len(rows) == 1 else value.index_select(0, rows) for n, value in tree.items()}


Distance = Callable[[Matching, Params], tuple[Tensor, Params]]  # values (P,), and derivatives by the gradients


def sum_per_problem(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of all entries of (P, ...) tensors, per problem (P,)."""
    return torch.stack([value.flatten(1).sum(1) for value in values]).sum(0)


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


def differentiated(values: Callable[[Matching, Params], Tensor]) -> Distance:
    """Return a distance from its values (P,) alone: torch works its derivative out."""

    def distance(matching: Matching, trial: Params) -> tuple[Tensor, Params]:
        with torch.enable_grad():
            free = {n: g.detach().requires_grad_() for n, g in trial.items()}
            value = values(matching, free)
            slopes = torch.autograd.grad(value.sum(), list(free.values()))
        return value.detach(), dict(zip(free, slopes, strict=True))

    return distance


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)  # an update can be a gigabyte


def _target(s: Observation, name: str, like: Tensor) -> Tensor:
    g = s.update.gradient.get(name)
    return torch.zeros_like(like) if g is None else g.detach().to(like)


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
