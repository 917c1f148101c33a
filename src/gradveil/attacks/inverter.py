"""Learning to invert (Wu et al. 2023): a regression from updates to images, learned through the defence.

The server runs the client, defence and all, on public examples with random draws of its own. The regression that errs
least in the square is the posterior mean, whatever the defence does: noise, signs, rounding, pruning. Nothing of the
defence has to be declared, and none of it is differentiated.

Departures from the paper: kernel regression, linear and Gaussian, is in the place of a perceptron; with the two
thousand examples that a server is taken to have it errs less, in a fraction of the time. Where there are fewer examples
than pairs to learn from, the server makes others, mixtures of two, moved by a pixel. Where the client draws random
numbers, it learns from the updates without a defence as well, each tensor scaled to what is left of it on
average: noise in what one learns from only hides what is to be learned. Of a fully connected layer it learns from what
went into it as well, which one example's gradient says whatever its class. All that can be set is chosen by the error
on public examples that were held out, as they are sent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Annotated

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

from gradveil import pace
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_seen, in_groups
from gradveil.attacks.labels import recover_labels, with_labels
from gradveil.errors import AttackError
from gradveil.gradients.functional import loss_of, per_problem, trial_update
from gradveil.ranges import Count, Range
from gradveil.seeds import Seeds
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Observation, Reconstruction

CHOOSE_AT = 700  # pairs that settings are chosen with; the best are used with all
KERNELS: tuple[tuple[float | None, int | None], ...] = (
    (2.0, None), (0.5, None), (8.0, None), (2.0, 256), (2.0, 64), (2.0, 16),
)  # fmt: skip
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
HELD, PUBLIC, MADE = 0, 1, 2  # kinds of pairs: held out, from public examples, from examples that the server made


@dataclass(frozen=True)
class Settled:
    """The settings of a regression."""

    lesson: int = 0  # which of several lessons
    scale: int = 0  # which of its inner products
    made: bool = True  # whether to learn from made examples as well
    by_label: bool = False  # whether examples of the same labels count twice
    width: float | None = None  # of a Gaussian kernel, in medians of the squared distance; None: the linear one
    parts: int | None = None  # principal directions of the updates; None: all
    ridge: float = 1.0  # in means of the kernel's diagonal
    error: float = inf  # mean squared, of the pairs held out


@dataclass(frozen=True)
class Lesson:
    """Pairs of an update and the images behind it, and updates whose images are asked for."""

    updates: Tensor  # (P + V, F), the asked last
    images: Tensor  # (P, d)
    kinds: Tensor  # (P,)
    labels: Tensor | None  # (P + V, L), as rows, where those of the asked can be told
    sizes: list[int]  # of the tensors of an update: F in all
    noise: list[float]  # variance of what is random in each of them
    bounds: tuple[float, float]

    @cached_property
    def products(self) -> list[Tensor]:
        """Inner products of all updates (P + V, P + V): as sent, tensors alike, by their noise."""
        learned = (self.kinds != HELD).nonzero()[:, 0]
        parts = (self.updates - self.updates[learned].mean(0)).split(self.sizes, 1)
        spread = [float(part[learned].square().mean()) for part in parts]
        scales = [[1.0] * len(parts), [1 / v if v > 0 else 0.0 for v in spread]]
        if any(self.noise):
            scales.append([1 / (n + 1e-3 * v) if n + v > 0 else 0.0 for n, v in zip(self.noise, spread, strict=True)])
        sums = [self.updates.new_zeros(len(self.updates), len(self.updates)) for _ in scales]
        for i, part in enumerate(parts):
            inner = part @ part.T
            for total, scale in zip(sums, scales, strict=True):
                total.add_(inner, alpha=scale[i])
        return [total / total.diagonal().mean().clamp_min(torch.finfo(total.dtype).tiny) for total in sums]

    @cached_property
    def alike(self) -> Tensor | None:
        """How far labels are the same (P + V, P + V), 1 where all are and 1/2 where none is."""
        if self.labels is None:
            return None
        rows = normalize(self.labels)
        return (1 + rows @ rows.T) / 2

    @property
    def held(self) -> Tensor:
        return (self.kinds == HELD).nonzero()[:, 0]

    def learned(self, made: bool, most: int | None = None) -> Tensor:
        """Return the positions of the pairs to learn from, at most so many, spread over all."""
        of_kind = (self.kinds != HELD if made else self.kinds == PUBLIC).nonzero()[:, 0]
        if most is None or len(of_kind) <= most:
            return of_kind
        return of_kind[torch.linspace(0, len(of_kind) - 1, most).long().to(of_kind.device)]

    def told(
        self, choice: Settled, learned: Tensor, at: Tensor, ridges: Iterable[float]
    ) -> Iterator[tuple[float, Tensor]]:
        """Yield what a regression on the learned pairs tells of others (·, d), for each ridge that rounding allows."""
        inner, cross = self._kernel(choice, learned, at)
        mean = self.images[learned].mean(0)
        targets = (self.images[learned] - mean).double()
        unit = float(inner.diagonal().mean()) or 1.0
        for ridge in ridges:
            summed = inner.double()
            summed.diagonal().add_(ridge * unit)
            factor, failed = torch.linalg.cholesky_ex(summed)
            if not bool(failed):
                dual = torch.cholesky_solve(targets, factor)
                yield ridge, (mean + (cross.double() @ dual).float()).clamp(*self.bounds)

    def _kernel(self, choice: Settled, learned: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernel between learned pairs, and between others and these, centred at the learned ones."""
        products = self.products[choice.scale]
        inner, cross = products[learned][:, learned], products[at][:, learned]
        norms, others = inner.diagonal(), products.diagonal()[at]
        if choice.parts is not None:
            values, vectors = torch.linalg.eigh(inner)
            top = vectors[:, -choice.parts :] / values[-choice.parts :].clamp_min(1e-6 * values[-1]).sqrt()
            points, new = inner @ top, cross @ top
            inner, cross, norms, others = points @ points.T, new @ points.T, points.square().sum(1), new.square().sum(1)
        if choice.width is not None:
            away = (norms[:, None] + norms - 2 * inner).clamp_min(0)
            width = choice.width * away.median().clamp_min(torch.finfo(away.dtype).tiny)
            inner = (-away / width).exp()
            cross = (-(others[:, None] + norms - 2 * cross).clamp_min(0) / width).exp()
        if choice.by_label and self.alike is not None:
            inner, cross = inner * self.alike[learned][:, learned], cross * self.alike[at][:, learned]
        mean = inner.mean(0)
        cross = cross - cross.mean(1, keepdim=True) - mean + mean.mean()
        return inner - mean - mean[:, None] + mean.mean(), cross


def regress(lessons: Sequence[Lesson]) -> tuple[Settled, Tensor, bool]:
    """Return the settings that err least, the images asked for (V, d), and whether the time was over before all.

    What to learn from is chosen with the linear kernel, and then the kernel, with few pairs; at last, with all of them,
    whether made examples help: they do the more, the more there are.
    """
    best, done = Settled(), 0
    first = [
        Settled(i, scale, made, by_label)
        for i, lesson in enumerate(lessons)
        for scale, made, by_label in product(
            range(len(lesson.products)),
            (True, False) if bool((lesson.kinds == MADE).any()) else (False,),
            (False, True) if lesson.labels is not None else (False,),
        )
    ]
    last = sorted({choice.made for choice in first})
    total = len(first) + len(KERNELS) + len(last)

    def choices() -> Iterator[tuple[Settled, int | None]]:
        yield from ((choice, CHOOSE_AT) for choice in first)
        yield from ((replace(best, width=width, parts=parts), CHOOSE_AT) for width, parts in KERNELS)
        yield from ((replace(best, made=made), None) for made in last)

    pace.step(0, total)
    for done, (choice, most) in enumerate(choices(), 1):
        best = min(best, _tried(lessons[choice.lesson], choice, most), key=lambda c: c.error)
        if pace.step(done, total):
            break
    lesson = lessons[best.lesson]
    learned = torch.cat([lesson.learned(best.made), lesson.held])
    asked = torch.arange(len(lesson.images), len(lesson.updates), device=learned.device)
    larger = (best.ridge * 10**k for k in range(9))  # with more pairs, rounding may ask for more
    _, images = next(lesson.told(best, learned, asked, larger))
    return best, images, done < total


def _tried(lesson: Lesson, choice: Settled, most: int | None) -> Settled:
    """Return the settings with the ridge that errs least on the pairs held out, and that error."""
    held, learned = lesson.held, lesson.learned(choice.made, most)
    errors = {
        ridge: float((images - lesson.images[held]).square().mean())
        for ridge, images in lesson.told(choice, learned, held, RIDGES)
    }
    ridge = min(errors, key=errors.__getitem__, default=1.0)
    return replace(choice, ridge=ridge, error=errors.get(ridge, inf))


MOST_EXAMPLES = 8  # of one update
HELD_OUT, MOST_HELD_OUT = 8, 250  # one in so many public examples is not learned from, and no more than so many
TWICE = 8  # examples that are sent twice, to see what the client draws
COLLECTING = 0.6  # share of a limited time that pairs are made in
POWERS = 4  # steps towards the leading directions of a layer's gradient: of one example the first is right
TOGETHER = 64  # updates without a defence that are made at once


@ATTACKS.register("inverter")
@dataclass(frozen=True)
class Inverter(Attack):
    """Regress images on the updates that a client with public examples would send (Wu et al. 2023, learning to invert).

    For servers that know the defence and have public examples (``seen.client``, ``seen.public``). Updates that share a
    model and a client share what is learned. Of several examples, at most 8, each comes at its place by label.
    """

    kind = "learned"
    applies_to = (AppliesTo(signs=True, tier="adaptive"),)

    pairs: Annotated[int, Range(2)] = 2000  # updates made from public examples
    features: Count = 32768  # numbers that are kept of an update; beyond that it is hashed

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        check_seen(seen)
        for s in seen:
            _check_public(s)
        found = in_groups(seen, rngs, _group, lambda group, _: self._solve(group))
        labels = [_rising(s.labels) for s in with_labels(seen, rngs)]
        return [replace(r, labels=y) for r, y in zip(found, labels, strict=True)]

    def _solve(self, seen: Sequence[Observation]) -> list[Reconstruction]:
        first, course = seen[0], Course(seen[0], self.features)
        late = course.collect(self.pairs)
        choice, images, over = regress(course.lessons(seen))
        details = {"pairs": float(len(course.batches)), "held_out": choice.error}
        details |= {"out_of_time": 1.0} if late or over else {}
        shape = (first.num_examples, *first.input_shape)
        content = not (late or over)
        return [Reconstruction(x.reshape(shape), None, choice.error, content, dict(details)) for x in images]


def _check_public(s: Observation) -> None:
    if s.client is None or s.public is None:
        raise AttackError(
            "inverter learns from what a client would send for public examples: it needs both, as a server that knows "
            "the defence has them (seen.client, seen.public)."
        )
    if s.num_examples > MOST_EXAMPLES:
        raise AttackError(f"inverter tells at most {MOST_EXAMPLES} examples apart; the update has {s.num_examples}.")
    if not s.public.inputs.is_floating_point() or tuple(s.public.inputs.shape[1:]) != s.input_shape:
        raise AttackError(f"inverter needs public examples of shape {s.input_shape}, in floating point numbers.")
    least = 2 * HELD_OUT * s.num_examples
    if len(s.public) < least:
        raise AttackError(f"inverter needs {least} public examples or more for this update; there are {len(s.public)}.")


def _group(s: Observation) -> tuple[object, ...]:
    shared = (id(s.model), id(s.client), id(s.public), s.loss, s.labels is None)
    return (*shared, s.num_examples, s.num_classes, s.input_shape, s.bounds, s.visible)


class Sketch:
    """An update as one row of numbers: all of them, or of large tensors as many random signed sums as there is room."""

    def __init__(self, shapes: dict[str, int], room: int, rng: Generator, device: torch.device) -> None:
        level, left = room, room
        for i, size in enumerate(sorted(shapes.values())):  # small tensors whole, large ones alike
            level = max(1, left // (len(shapes) - i))
            left -= min(size, level)
        self.sizes = [min(size, level) for size in shapes.values()]
        self._hashes: dict[str, tuple[Tensor, Tensor] | None] = {}
        for (name, size), kept in zip(shapes.items(), self.sizes, strict=True):
            place = torch.randint(kept, (size,), generator=rng)
            sign = torch.randint(2, (size,), generator=rng) * 2.0 - 1.0
            self._hashes[name] = None if kept == size else (place.to(device), sign.to(device))

    def __call__(self, stacked: Params) -> Tensor:
        """Return the rows (P, F) of updates, name: (P, *shape)."""
        parts = []
        for (name, hashed), kept in zip(self._hashes.items(), self.sizes, strict=True):
            g = stacked[name].detach().flatten(1).float()
            if hashed is not None:
                place, sign = hashed
                g = g.new_zeros(len(g), kept).index_add_(1, place, g * sign)
            parts.append(g)
        return torch.cat(parts, 1)

    def one(self, gradient: Params) -> Tensor:
        return self({name: gradient[name][None] for name in self._hashes})[0]


class Course:
    """Pairs of an update and the examples behind it, made by a client with public examples."""

    def __init__(self, seen: Observation, features: int) -> None:
        assert seen.client is not None
        assert seen.public is not None
        self.seen, self.client = seen, seen.client
        self.rng = Seeds()("inverter")  # one for all updates: what is learned is the same in any company
        like = next(seen.model.parameters())
        self.device = like.device
        order = torch.randperm(len(seen.public), generator=self.rng).to(self.device)
        public = seen.public.to(self.device)
        public = Batch(public.inputs.to(like)[order], public.labels[order])
        held = max(seen.num_examples, min(MOST_HELD_OUT, len(public) // HELD_OUT))
        self.held, self.known = public[:held], public[held:]
        shapes = {n: seen.update.gradient[n].numel() for n in seen.visible}
        self.sketch = Sketch(shapes, features, self.rng, self.device)
        self.batches: list[Batch] = []
        self.rows: list[Tensor] = []
        self.labels: list[Tensor | None] = []  # of those held out as the server reads them
        self.kinds: list[int] = []
        self.noise: list[float] = []  # variance of what the client draws, by tensor

    def collect(self, count: int) -> bool:
        """Make the held-out pairs and so many others; return whether the time for it was over before."""
        n, reserve = self.seen.num_examples, pace.left() * (1 - COLLECTING)
        held = len(self.held) if n == 1 else min(MOST_HELD_OUT, max(len(self.held), count // HELD_OUT))
        twice = [self.sketch.one(self._sent(self.known[i * n : i * n + n])) for i in range(TWICE) for _ in range(2)]
        apart = torch.stack(twice[::2]) - torch.stack(twice[1::2])
        self.noise = [float(part.square().mean() / 2) for part in apart.split(self.sketch.sizes, 1)]
        total = held + count
        pace.step(0, total)
        for i in range(total):
            kind, batch = self._examples(i, held)
            sent = self._sent(batch)
            self.batches.append(batch)
            self.rows.append(self.sketch.one(sent))
            self.labels.append(batch.labels if kind != HELD or self.seen.labels is not None else self._read(sent))
            self.kinds.append(kind)
            over = pace.step(i + 1, total) or pace.left() < reserve
            if over and i > held:
                return i + 1 < total
        return False

    def lessons(self, asked: Sequence[Observation]) -> list[Lesson]:
        """Return what can be learned: the updates as sent and, where these are random, as they were before."""
        shown = torch.stack([self.sketch.one(s.update.gradient) for s in asked])
        images = torch.stack([b.inputs.flatten().float() for b in self.batches])
        kinds, rows = torch.tensor(self.kinds, device=self.device), torch.stack(self.rows)
        if not bool(rows.isfinite().all()):
            raise AttackError(
                "A client with public examples would send NaN or infinite values: nothing can be learned."
            )
        labels = self.labels + [s.labels if s.labels is not None else self._read(s.update.gradient) for s in asked]
        known = None if any(y is None for y in labels) else torch.stack([self._row(y) for y in labels if y is not None])
        sources = [rows, *([self.undefended(rows, kinds)] if any(self.noise) else [])]
        rest = (images, kinds, known, self.sketch.sizes, self.noise, self.seen.bounds)
        found = [Lesson(torch.cat([source, shown]), *rest) for source in sources]
        layers = self._layers()
        return [*found, *(_folded(lesson, layers) for lesson in found if any(layers))]

    def _layers(self) -> list[torch.Size | None]:
        """Return, by tensor, the shape of a fully connected layer's weight that is kept whole, of one example."""
        shapes = [self.seen.update.gradient[name].shape for name in self.seen.visible]
        whole = (kept == shape.numel() for kept, shape in zip(self.sketch.sizes, shapes, strict=True))
        one = self.seen.num_examples == 1
        return [s if one and w and len(s) == 2 and min(s) > 1 else None for s, w in zip(shapes, whole, strict=True)]

    def _sent(self, batch: Batch) -> Params:
        with pace.Limit():  # the steps of a client are no steps of the attack
            return self.client(batch, self.rng)

    def _read(self, gradient: Params) -> Tensor | None:
        update = replace(self.seen.update, gradient={n: gradient[n] for n in self.seen.update.gradient})
        return recover_labels(replace(self.seen, update=update), self.rng)

    def _row(self, labels: Tensor) -> Tensor:
        rising = _rising(labels)
        assert rising is not None
        return self.seen.loss.rows(rising, self.seen.num_classes).flatten().to(self.device, torch.float32)

    def undefended(self, rows: Tensor, kinds: Tensor) -> Tensor:
        """Return the updates (P, F) as they are without a defence, each tensor as large as is sent on average."""
        bare, weights = replace(self.seen, simulate=None), parameters(self.seen.model)
        step = loss_of(self.seen.model, weights, self.seen.loss)
        many = per_problem(self.seen.model, step, lambda g, x, y: trial_update(bare, g, weights, x, y))
        made = []
        for i in range(0, len(self.batches), TOGETHER):
            part = self.batches[i : i + TOGETHER]
            x = torch.stack([b.inputs for b in part]).to(next(iter(weights.values())))
            y = torch.stack([self.seen.loss.rows(b.labels, self.seen.num_classes) for b in part]).to(x)
            made.append(self.sketch(many(x, y)))
        clean = torch.cat(made)
        learned, sizes = kinds != HELD, self.sketch.sizes
        for sent, part in zip(rows.split(sizes, 1), clean.split(sizes, 1), strict=True):
            energy = float(part[learned].square().sum())
            part.mul_(float((sent[learned] * part[learned]).sum()) / energy if energy > 0 else 0.0)
        return torch.where(learned[:, None], clean, rows)  # those held out are told as they were sent

    def _examples(self, i: int, held: int) -> tuple[int, Batch]:
        """Return the examples of pair i: those held out, then the known ones, and then made ones."""
        n, kind, batch = self.seen.num_examples, HELD if i < held else PUBLIC, self.held if i < held else self.known
        if n > 1:
            chosen = torch.randperm(len(batch), generator=self.rng)[:n].to(self.device)
            return kind, _ordered(Batch(batch.inputs[chosen], batch.labels[chosen]))
        at = i if kind == HELD else i - held
        one = batch[at % len(batch) :][:1]
        if at < len(batch):
            return kind, one
        other = batch.inputs[torch.randint(len(batch), (1,), generator=self.rng).to(self.device)]
        share = 0.5 * float(torch.rand(1, generator=self.rng))
        return MADE, Batch(self._moved(one.inputs).lerp(self._moved(other), share), one.labels)

    def _moved(self, x: Tensor) -> Tensor:
        """Return images (1, C, H, W) moved by at most a pixel; other inputs as they are."""
        if x.ndim != 4:
            return x
        down, right = (torch.randint(3, (2,), generator=self.rng) - 1).tolist()
        return x.roll((down, right), (2, 3))


def _folded(lesson: Lesson, layers: Sequence[torch.Size | None]) -> Lesson:
    """Return the lesson with what went into each fully connected layer in place of its gradient.

    Of one example the gradient is δ rᵀ, and r is the same whatever the class was; the gradient is not. In float64: it
    is told so well that rounding, which differs in other company, would show.
    """
    parts = lesson.updates.double().split(lesson.sizes, 1)
    rows = [
        part if shape is None else entered(part.view(-1, *shape)) for part, shape in zip(parts, layers, strict=True)
    ]
    return replace(lesson, updates=torch.cat(rows, 1), sizes=[row.shape[1] for row in rows])


def entered(gradients: Tensor) -> Tensor:
    """Return ||δ|| r (P, I) of gradients δ rᵀ (P, O, I), or of the nearest to them of that form.

    The largest entry of δ is taken to be below 0, as that of the right class is.
    """
    strongest = gradients.square().sum(2).argmax(1)
    r = gradients[torch.arange(len(gradients), device=gradients.device), strongest]  # (P, I)
    for _ in range(POWERS):
        delta = normalize(torch.einsum("poi,pi->po", gradients, r))
        r = torch.einsum("poi,po->pi", gradients, delta)
    largest = delta.gather(1, delta.abs().argmax(1, keepdim=True))
    return -largest.sign() * r


def _rising(labels: Tensor | None) -> Tensor | None:
    return labels if labels is None or labels.ndim > 1 else labels.sort().values


def _ordered(batch: Batch) -> Batch:
    """Return the examples by class, and those of one class by brightness: an update does not tell their order."""
    order = batch.inputs.flatten(1).mean(1).argsort(stable=True)
    if batch.labels.ndim == 1:
        order = order[batch.labels[order].argsort(stable=True)]
    return Batch(batch.inputs[order], batch.labels[order])
