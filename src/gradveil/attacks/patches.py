"""The pictures that a vision transformer saw, from the spans of its layers' inputs; also behind low-rank factors.

The gradient of a linear layer's weight is Σ δ xᵀ over all tokens of all pictures, that of a factor B (W x + B A x) is
Σ δ (A x)ᵀ, and that of A is Σ (Bᵀ δ) xᵀ. Where there are fewer tokens than the weight has rows and columns, some
directions n have no input in them: n · x = 0 for every token of every picture. These are equations for a picture by
itself. They hold no target, no slope of the loss, and no other picture of the batch, and in the first layer they are
nearly linear in the pixels, so that a few steps of Gauss-Newton solve them, where a search for the whole update
(``newton``) may end at another picture. Later layers add equations, and tell the pictures of a batch apart. Where the
equations are too few, or some pictures were not found, what there is becomes the start of ``newton``.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil import pace
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, differentiating
from gradveil.attacks.newton import Newton, ready
from gradveil.attacks.search.equations import Equations, Prior
from gradveil.attacks.search.gauss_newton import DenseStep, Descent, MatrixFree, Solver
from gradveil.attacks.sequences import directions, linear_calls, shown_inputs
from gradveil.attacks.span import read_labels
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.ranges import Count
from gradveil.types import Observation, Reconstruction

GAP = 5.0  # ratio of the last singular value that an input makes to the first of rounding
FAINT = 1e-8  # of the largest singular value: below it is rounding
ENOUGH = 1.3  # equations for each pixel of the batch; layers behind are not looked at
BLOCK = 4  # inputs of a transformer's block: of attention, of its output, and of two layers behind
APART = 0.1  # in units of the prior's spread: pictures nearer than that are the same
SOLVED = 3e-3  # of the first residual
DENSE = 4096  # pixels up to which the Jacobian is written out
CG_STEPS = 60  # of conjugate gradients per step, beyond that


@ATTACKS.register("patches")
@dataclass(frozen=True)
class PatchSpan(Attack):
    """Pictures whose tokens lie in the spans of a transformer's inputs; exact for whole batches, by factors as well.

    For models of images that cut them into tokens, trained as a whole or by low-rank factors. It needs fewer tokens in
    a batch than the rank of the factors and the width of the model.
    """

    kind = "closed form"
    applies_to = (AppliesTo(("image",), "tokens", steps=(1, 1), default="", turn=2),)

    steps: Count = 40  # of Gauss-Newton on the spans, at most
    restarts: Count = 8  # rounds of as many starts as there are pictures, until all are found

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        (seen,) = ready([seen], [rng], "patches")
        model = copy.deepcopy(seen.model).double().requires_grad_(False)
        spans, enough = clear_spans(seen, model)
        with differentiating(seen.model):
            found, off = self._pictures(seen, model, spans, rng)
        solved = off < SOLVED
        details = {"layers": float(len(spans)), "off": float(off.mean()), "found": float(solved.sum())}
        details |= {"out_of_time": 1.0} if pace.left() <= 0 and not bool(solved.all()) else {}
        labels = _in_order(seen, found)
        if (enough and bool(solved.all())) or pace.left() <= 0:
            inputs = found.reshape(-1, *seen.input_shape).to(torch.float32).clamp(*seen.bounds)
            return Reconstruction(inputs, labels, float(off.mean()), bool(solved.all()), details)
        (whole,) = Newton().solve([replace(seen, labels=labels)], [rng], found.reshape(1, -1))
        return replace(whole, details=whole.details | details)

    def _pictures(
        self, seen: Observation, model: nn.Module, spans: Sequence["Beside"], rng: Generator
    ) -> tuple[Tensor, Tensor]:
        """Return pictures (N, d) that come nearest to the spans' equations, and how far each is off (N,)."""
        alone = replace(seen, update=replace(seen.update, num_examples=1))
        own = Prior.of(alone, 0, next(model.parameters()).device)
        prior = replace(own, mean=torch.zeros_like(own.mean))  # of what a picture differs by from where it starts
        direction = DenseStep(prior) if prior.pixels <= DENSE else MatrixFree(prior, CG_STEPS)
        solver = Solver(prior, Descent(self.steps, last=1e-4), direction, slice(None))
        apart = APART * float(own.draw(64, rng).norm(dim=1).mean())
        count, points, off = seen.num_examples, own.mean[:0, None], own.mean[:0]
        for again in range(self.restarts):
            start = own.center() + (0.0 if again + count == 1 else 1.0) * own.draw(count, rng)
            rows = span_rows(seen, model, spans, start)
            best = solver.best(rows, torch.zeros_like(start)[:, None])
            found, residual = best.point + start, rows.residual(best.point, None)
            outside = (found - found.clamp(*seen.bounds)).square().mean(1).sqrt()  # of the range: no picture is there
            points = torch.cat([points.reshape(-1, prior.pixels), found])
            off = torch.cat([off, residual.square().mean(1).sqrt() / rows.rms[:, 0] + outside])
            order = _distinct(points, off, apart)[:count]
            if (bool((off[order] < SOLVED).all()) and len(order) == count) or pace.left() <= 0:
                break
        missing = start[: count - len(order)]  # all starts led to fewer pictures than there are
        points, off = torch.cat([points[order], missing]), torch.cat([off[order], missing.new_ones(len(missing))])
        return points, off


@dataclass(frozen=True)
class Beside:
    """The directions beside the span of a layer's inputs."""

    layer: str
    directions: Tensor  # (width, k)
    places: Tensor  # (tokens,) bool: whether a token depends on the picture


def clear_spans(seen: Observation, model: nn.Module) -> tuple[list[Beside], bool]:
    """Return what the first layers show, and whether that is enough; raise where no layer shows anything.

    The first input alone would leave mixtures of the pictures of a batch, as each of its tokens hangs on one patch, and
    attention at its first weights little more than averages: a batch has to fit the layers of a whole block.
    """
    low, high = (torch.full((1, *seen.input_shape), end).to(next(model.parameters())) for end in seen.bounds)
    with quiet(model):
        calls, others = linear_calls(model, low), linear_calls(model, high)
    names = [name for name, _, _ in calls]
    pairs = [
        (name, x, other) for (name, x, _), (_, other, _) in zip(calls, others, strict=True)
        if x.ndim == 3 and len(x) == 1 and names.count(name) == 1
    ]  # fmt: skip
    if not pairs:
        raise AttackError(
            f"{type(model).__name__} has no linear layer that sees a picture as tokens. Use newton or gs."
        )
    found, inputs, needed, enough = list[Beside](), list[Tensor](), list[tuple[int, int]](), False
    least, wanted = (
        1 if seen.num_examples == 1 else BLOCK,
        ENOUGH * seen.num_examples * torch.Size(seen.input_shape).numel(),
    )
    for name, x, other in pairs:
        places = (x != other).any(-1)[0]
        tokens = int(seen.num_examples * places.sum() + (~places).sum())
        shown = shown_inputs(seen, name)
        needed += [(tokens, min(one.gradient.shape)) for one in shown]
        clear = [(one.through, beside) for one in shown if (beside := _beside(one.gradient, tokens)) is not None]
        whole = next((beside for through, beside in clear if through is None), None)
        if whole is not None and not any(x is one for one in inputs):  # of layers that see the same, all show the same
            found.append(Beside(name, whole, places))
        if whole is None:
            found += [Beside(name, through.T @ beside, places) for through, beside in clear if through is not None]
        inputs += [x] if clear else []
        told = sum(int(one.places.sum()) * one.directions.shape[1] for one in found)
        enough = len({id(one) for one in inputs}) >= least and told >= wanted
        if enough:
            break
    if not found:
        raise AttackError(_missing(needed))
    return found, enough


def _missing(needed: Sequence[tuple[int, int]]) -> str:
    """Return why no layer shows a span: ``needed`` has the tokens and the rank of each gradient."""
    if not needed:
        return "The update has no gradient of a layer that sees tokens: they are frozen or were dropped. Use analytic."
    tokens, rank = min(needed, key=lambda one: one[0] - one[1])
    if rank <= tokens:
        return (
            f"patches needs fewer tokens than the weights or factors have rows and columns, and a batch has {tokens} "
            f"tokens where they have {rank}. Attack fewer pictures at once, or use newton."
        )
    return (
        "No layer's inputs of tokens leave a clear gap beside their span: noise, rounding or a mask fills it, or some "
        "tokens have no gradient there. Use newton."
    )


def _beside(gradient: Tensor, tokens: int) -> Tensor | None:
    """Return the directions (width, k) in which no input lies, of so many; None where they cannot be told."""
    if tokens >= min(gradient.shape):
        return None
    s, vt = directions(gradient)
    if s[tokens - 1] <= max(GAP * float(s[tokens]), FAINT * float(s[0])):
        return None
    beside: Tensor = vt[tokens:].mT
    return beside


def span_rows(seen: Observation, model: nn.Module, spans: Sequence[Beside], start: Tensor) -> Equations:
    """Return the equations of what pictures differ by from ``start`` (B, d)."""
    last = spans[-1].layer

    def one(z: Tensor, start: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        calls = {name: x for name, x, _ in linear_calls(model, (z + start).reshape(1, *seen.input_shape), last)}
        told = [(calls[span.layer][0][span.places], span.directions) for span in spans]
        return torch.cat([(x / x.norm(dim=-1, keepdim=True) @ beside).flatten() for x, beside in told])

    count = sum(int(span.places.sum()) * span.directions.shape[1] for span in spans)
    ones, no_kinks = start.new_ones(len(start), count), start.new_zeros(len(start), 0)
    rows = Equations(model, one, (start,), no_kinks, 0 * ones, ones, 0 * ones, ones)
    level = rows.residual(torch.zeros_like(start), None).square().mean(1, keepdim=True).sqrt()
    return replace(rows, rms=level.expand_as(ones))


def _in_order(seen: Observation, found: Tensor) -> Tensor | None:
    """Return the update's labels in the order of pictures (N, d), by what each makes of the last layer's gradient."""
    read = read_labels(seen, found.reshape(-1, *seen.input_shape))
    if seen.labels is None or read is None or seen.loss.targets != "classes":
        return read if seen.labels is None else seen.labels
    left, labels = seen.labels.tolist(), seen.labels.clone()
    own = [left.pop(left.index(label)) if label in left else None for label in read.tolist()]
    for i, label in enumerate(own):
        labels[i] = left.pop() if label is None else label
    return labels


def _distinct(points: Tensor, off: Tensor, apart: float) -> Tensor:
    """Return which of the points (M, d) are pictures of their own, those that are least off first."""
    taken = list[int]()
    for i in off.argsort().tolist():
        if all(float((points[i] - points[j]).norm()) > apart for j in taken):
            taken.append(i)
    return torch.tensor(taken, dtype=torch.long, device=points.device)
