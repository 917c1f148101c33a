"""Kernel ridge regression from updates to images, its settings chosen by the error on pairs that were held out.

All that it needs are the inner products of the updates, once; every setting is a function of these. A Gaussian kernel
sees what is not linear in an image; principal directions leave out most of a noise that lies in all directions.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gradveil import pace

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
        """Positions of the pairs that are held out."""
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
    best, over, done = Settled(), False, 0
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
    pace.step(0, total)
    while done < total and not over:
        if done < len(first):
            choice = first[done]
        elif done < len(first) + len(KERNELS):
            width, parts = KERNELS[done - len(first)]
            choice = replace(best, width=width, parts=parts)
        else:
            choice = replace(best, made=last[done - total])
        most = None if done >= total - len(last) else CHOOSE_AT
        best = min(best, _tried(lessons[choice.lesson], choice, most), key=lambda c: c.error)
        done += 1
        over = pace.step(done, total)
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
