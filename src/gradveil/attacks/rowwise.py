"""A batch example by example: whatever was in it lies, as a layer sees it, in the span of that layer's gradient.

A fully connected layer's gradients are dW = Σ δ rᵀ and db = Σ δ over the N examples, with r(x) what the layer gets of
x. The rows of dW so span the N vectors r (m numbers each), and all of them lie on the plane p · r = 1 with dW p = db.
That is m - N + 1 equations for the d numbers of one example, whatever the others are: behind a hidden layer wider than
d + N they single out the examples of the batch, one by one. An example that was found is taken off: with u the slope of
its loss by the layer's output, dW - c u rᵀ has one rank less for exactly one c, and c is 1/N if its label is right.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Generator, Tensor

from gradveil import pace
from gradveil.attacks.analytic import Mixture, behind, mixed
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_alone, check_seen, differentiating
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.equations import Prior, input_equations, refuse_recurrent
from gradveil.attacks.search.gauss_newton import DenseStep, Descent, Solver
from gradveil.attacks.tableak import refuse_all_but_tables
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.modules import prefix, trace
from gradveil.ranges import Count, Weight
from gradveil.tree import named
from gradveil.types import Observation, Reconstruction

AT_ONCE = 64  # draws that are led together
STEPS = Descent(40, 3, 1.0, 1e-6)  # of a draw
CLEAR = 1e-5  # of the first singular value: what lies beyond the N-th is rounding, and the span is exact
SHARE = 0.05  # of 1/N, by which what an example adds to the gradient may differ from it


@dataclass(frozen=True)
class _Span:
    """What a layer's gradient is made of, less the examples that were found."""

    dw: Tensor  # (o, m)
    db: Tensor  # (o,)
    left: int  # how many examples

    @cached_property
    def basis(self) -> Tensor:
        """Orthonormal directions (left, m) that the representations of the examples span."""
        directions: Tensor = torch.linalg.svd(self.dw, full_matrices=False).Vh
        return directions[: self.left]

    @cached_property
    def equations(self) -> tuple[Tensor, Tensor]:
        """A (m - left + 1, m) and b with A r = b for the representation r of every example that is left."""
        beside = torch.linalg.svd(self.basis).Vh[self.left :]
        plane = torch.linalg.lstsq(self.dw @ self.basis.T, self.db[:, None]).solution[:, 0] @ self.basis
        b = torch.zeros(len(beside) + 1).to(plane)
        b[-1] = 1 / plane.norm()
        return torch.cat([beside, plane[None] / plane.norm()]), b

    def off(self, r: Tensor) -> Tensor:
        """Return how far representations r (K, m) are off the span and the plane, relative to their length (K,)."""
        a, b = self.equations
        off: Tensor = (r @ a.T - b).norm(dim=1) / r.norm(dim=1).clamp_min(1e-30)
        return off

    def shares(self, r: Tensor, slopes: Tensor) -> Tensor:
        """Return 1 / c (S,) for the slopes (S, o) of an example r (m,): the rank falls without c slope rᵀ."""
        inverse: Tensor = torch.linalg.pinv(self.dw @ self.basis.T)
        return slopes @ inverse.T @ (self.basis @ r)

    def without(self, r: Tensor, slope: Tensor) -> "_Span":
        """Return what is left without an example r (m,) that has this slope (o,)."""
        return _Span(self.dw - slope[:, None] * r, self.db - slope, self.left - 1)


@ATTACKS.register("rowwise")
@dataclass(frozen=True)
class Rowwise(Attack):
    """Find the examples of a batch one by one: each lies, by itself, in the span of a hidden layer's gradient.

    For rows of a table, of fewer numbers than the model has hidden units. Draws of the prior are led to what the
    layer's gradient could hold, by Levenberg-Marquardt; what is found is exact and is taken off the gradient. Several
    local steps or noise blur the span, and it refuses. Examples that are not found are answered by the prior's mean.
    """

    kind = "closed form"
    applies_to = (AppliesTo(("table",), steps=(1, 1), default="draws=2048"),)

    draws: Count = 8192  # at most
    tol: Weight = 1e-3  # relative distance from the span at which an example is found

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        refuse_all_but_tables([seen], "rowwise")
        check_seen([seen], sizes_for="rowwise")
        (seen,) = with_labels(at_one_model([seen]), [rng])
        labels = seen.labels
        seen = replace(seen.as_one_step(), model=deepcopy(seen.model).double().requires_grad_())
        layer = _hidden_layer(seen)
        refuse_recurrent(seen.model)
        mixture = mixed(seen, layer)
        if torch.linalg.svdvals(mixture.dw)[seen.num_examples] > CLEAR * mixture.rows.norm():
            raise AttackError(
                "rowwise needs the exact span of one local step, and several steps or noise blur this update's. Use "
                "tableak, surrogate or newton."
            )
        prior = Prior.of(replace(seen, update=replace(seen.update, num_examples=1)), 0, mixture.basis.device)
        with differentiating(seen.model), quiet(seen.model):
            found, draws = self._found(mixture, prior, rng)
        count, residual = len(found), math.inf
        x = torch.cat([found, prior.center().expand(seen.num_examples - count, -1)]).reshape(-1, *seen.input_shape)
        x = x.clamp(*seen.bounds)
        if count == mixture.rank == seen.num_examples:
            with torch.no_grad(), quiet(seen.model):
                y = prefix(seen.model, layer)(x) @ mixture.basis.T
            targets = mixture.targets(x, y)
            labels, residual = (labels if targets is None else targets), mixture.residual(x, targets)
        details = {"draws": float(draws), "found": float(count)}
        return Reconstruction(x.float(), labels, residual, count == seen.num_examples, details)

    def _found(self, mixture: Mixture, prior: Prior, rng: Generator) -> tuple[Tensor, int]:
        """Return the examples found (n, d), and how many draws they took."""
        span, draws, found = _Span(mixture.dw, mixture.db, mixture.rank), 0, prior.center()[None][:0]
        while span.left and draws < self.draws and not pace.step(draws, self.draws):
            x = _led(mixture, span, prior, prior.center() + prior.draw(AT_ONCE, rng))
            new, span = _accepted(mixture, span, x, self.tol)
            found, draws = torch.cat([found, new]), draws + AT_ONCE
        return found, draws


def _accepted(mixture: Mixture, span: _Span, x: Tensor, limit: float) -> tuple[Tensor, _Span]:
    """Return which of x (K, d) are examples, the nearest to the span first, and what is left of the gradient."""
    with torch.no_grad():
        r = prefix(mixture.seen.model, mixture.layer)(x.reshape(-1, *mixture.seen.input_shape))
    new: list[Tensor] = []
    for i in span.off(r).argsort().tolist():
        if not span.left:
            break
        if float(span.off(r[i : i + 1])) > limit:  # of what is left by now
            continue
        slopes = _slopes(mixture, x[i].reshape(1, *mixture.seen.input_shape)) / mixture.seen.num_examples
        share = span.shares(r[i], slopes)
        if len(slopes) == 1:  # how long it is does not hang on a class
            slopes, share = slopes / share, torch.ones_like(share)
        at = int((share - 1).abs().argmin())
        if abs(float(share[at]) - 1) < SHARE:
            new.append(x[i])
            span = span.without(r[i], slopes[at])
    return torch.stack(new) if new else x[:0], span


def _led(mixture: Mixture, span: _Span, prior: Prior, starts: Tensor) -> Tensor:
    """Return where starts (K, d) are led by the span's equations and the prior."""
    f, (a, b), x = (
        prefix(mixture.seen.model, mixture.layer),
        span.equations,
        starts.reshape(-1, *mixture.seen.input_shape),
    )
    with torch.no_grad():
        level = (f(x) @ a.T - b).square().mean().sqrt()
    rows = input_equations(mixture.seen.model, lambda z: f(z) @ a.T, x, b.expand(len(x), -1), level)
    return Solver(prior, STEPS, DenseStep(prior), slice(None)).best(rows, starts[:, None]).point


def _slopes(mixture: Mixture, x: Tensor) -> Tensor:
    """Return the slopes (S, o) that the loss of one example can have by the layer's output: one for each class."""
    _, output, jacobian = behind(mixture.seen.model, mixture.layer, x)  # (1, o, K)
    if jacobian.shape[2] == 1:
        return jacobian[..., 0]
    one_hot = torch.eye(jacobian.shape[2]).to(output)
    by_output = torch.stack([torch.func.grad(mixture.seen.loss.soft)(output, y[None])[0] for y in one_hot])  # (K, K)
    return by_output @ jacobian[0].T


def _hidden_layer(seen: Observation) -> str:
    """Return the fully connected layer whose gradient says most of a single example; raise where none says enough."""
    if seen.num_classes > 1 and seen.loss.targets != "classes":
        raise AttackError("rowwise needs a loss of classes, or of one number. Use tableak or newton.")
    size, count = int(torch.Size(seen.input_shape).numel()), seen.num_examples
    told = [
        visit for visit in trace(seen.model, seen.input_shape).dense()
        if len(visit.input_shape) == 1 and {named(visit.path, "weight"), named(visit.path, "bias")} <= set(seen.visible)
        and all(bool(seen.weights[n].all()) for n in seen.weights if n.startswith(named(visit.path, "")))
    ]  # fmt: skip
    wide = [v for v in told if v.output_shape[0] > count and v.input_shape[0] - count + 1 >= size]
    if not wide:
        most = max((min(v.input_shape[0] - size + 1, v.output_shape[0] - 1) for v in told), default=0)
        raise AttackError(
            f"rowwise needs a fully connected layer, seen whole, with at least {size + count - 1} inputs and "
            f"{count + 1} outputs for {count} examples of {size} numbers; this update shows up to {max(most, 0)} "
            "examples in this way. Use tableak, spear or gs."
        )
    layer = max(wide, key=lambda v: v.input_shape[0]).path
    check_alone(seen, layer)
    return layer
