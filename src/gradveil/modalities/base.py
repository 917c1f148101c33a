"""What an example is: how one is measured, guessed blindly and shown, and what it is called."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.registry import Registry

MODALITIES: Registry["Modality"] = Registry("modality", "modalities")

Bounds = tuple[float, float]  # the data range


@dataclass(frozen=True)
class Metric:
    """A function (found, truth, *told) -> (N,): one value per example, no reduction inside."""

    name: str
    function: Callable[..., Tensor]  # (found, truth); `identification` takes the gallery as well
    better: Literal["lower", "higher"]  # for the attacker
    description: str
    is_rate: bool = False  # values are 0 or 1, and their mean is a share
    title: str = ""  # over a column
    form: str = ""  # how its numbers are written


def by_name(*metrics: Metric) -> dict[str, Metric]:
    """Return metrics by their names."""
    return {metric.name: metric for metric in metrics}


@dataclass(frozen=True)
class Cell:
    """A part of an example as a person reads it: what stands there, and whether it is right, where that is known."""

    text: str
    right: bool | None = None
    off: float | None = None  # how far it is off, where it is a number


class Modality(ABC):
    """One kind of examples. What it needs to know of them (columns, a vocabulary) are its dataclass fields."""

    spec_name: ClassVar[str]
    one: ClassVar[str]  # the words for an example
    many: ClassVar[str]
    part: ClassVar[str]  # and for one of its numbers
    guesses: ClassVar[tuple[str, str, str]]  # names of the blind guesses: knowing nothing, public examples, the class
    metrics: ClassVar[Mapping[str, Metric]]  # beside labels and identification, which all have
    error: ClassVar[str]  # the metric that verdicts are made of: 0 is exact, lower is better
    error_name: ClassVar[str]  # in a sentence: "MSE"
    error_axis: ClassVar[str]  # under a figure
    error_text: ClassVar[str]  # and what it is, for a page
    guess_text: ClassVar[str]  # what the blind guesses are: "What somebody who never saw the update would answer: ..."
    is_share: ClassVar[bool] = False  # of cells or tokens, so that figures need no logarithm
    default_model: ClassVar[str]

    @abstractmethod
    def unit(self, x: Tensor, bounds: Bounds) -> Tensor:
        """Return examples (N, *shape) as they are measured, whatever an attack made of them."""

    @abstractmethod
    def ignorant(self, like: Tensor, bounds: Bounds) -> Tensor:
        """Return what somebody who knows nothing would answer, as many as there are."""

    @abstractmethod
    def typical(self, public: Tensor) -> Tensor:
        """Return the one example that is the best guess where these (M, *shape) are known."""

    def order(self, found: Tensor, truth: Tensor) -> Tensor:
        """Return which of those found goes with each of the true ones (N,), both as they are measured."""
        return pair(found, truth)

    def identified(self, found: Tensor, truth: Tensor, gallery: Tensor) -> Tensor:
        """Return 1 where one found is nearer to its original than to every other example: -> (N,)."""
        return identification(found, truth, gallery)

    def measure(
        self, found: Tensor, truth: Tensor, gallery: Tensor | None, bounds: Bounds
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return every metric by name, each (N,), and the examples found as they were measured, beside their own."""
        true, mine = self.unit(truth, bounds), self.unit(found, bounds)
        mine = mine[self.order(mine, true)]
        values = {name: metric.function(mine, true, *self.told) for name, metric in self.metrics.items()}
        unknown = torch.full((len(truth),), torch.nan)
        values["identified"] = unknown if gallery is None else self.identified(mine, true, self.unit(gallery, bounds))
        return values, mine

    @property
    def told(self) -> tuple[Any, ...]:
        return ()

    @property
    def scaling(self) -> tuple[list[float], list[float]] | None:
        """The mean and the standard deviation of each number of an example, which a model standardises by; public."""
        return None

    @property
    def last(self) -> float:
        """The highest id of an example of tokens; 0 where its numbers are no ids."""
        return 0.0

    @property
    def heads(self) -> tuple[str, ...]:
        """What stands over the cells of an example; nothing where they are no columns."""
        return ()

    def cells(self, x: Tensor, truth: Tensor | None = None) -> list[Cell] | None:
        """Return one example as it was measured, cell by cell, marked by its original; None: it is a picture."""
        return None

    def own_words(self, text: str) -> str:
        """Return a sentence about images as one about examples of this kind."""
        article = "an" if self.one[0] in "aeiou" else "a"
        text = re.sub(r"\ban image\b", f"{article} {self.one}", text)
        return re.sub(r"(?<![-\w])image(?=s?\b)", self.one, text)  # not the option --images

    def row(self) -> dict[str, Any]:
        """Return what a run folder keeps of it; ``from_row`` reads it."""
        return {}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Modality":
        return cls()


CLOSE = 0.02  # relative distance at which a number counts as recovered


def pair(found: Tensor, truth: Tensor) -> Tensor:
    """Return ``order`` (N,) such that ``found[order]`` lies nearest to ``truth`` in total squared error.

    The optimal assignment, not a greedy one. It favours the attack, as a privacy measure must.
    """
    from scipy.optimize import linear_sum_assignment  # not before it is needed: every command imports this file

    cost = torch.cdist(truth.flatten(1).double(), found.flatten(1).double()).square()  # (N, N)
    _, order = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(order)


def identification(found: Tensor, truth: Tensor, gallery: Tensor) -> Tensor:
    """Return 1 where a reconstruction is nearer to its original than to every other example: -> (N,).

    ``gallery`` (M, *shape) holds other examples of the same kind, so each original stands among M + 1. Nearest in
    mean squared error; a tie counts against the attack. Guessing scores 1 / (M + 1).
    """
    flat = found.flatten(1).double()
    own = (flat - truth.flatten(1).double()).square().sum(dim=1)  # (N,)
    others = (flat[:, None] - gallery.flatten(1).double()[None]).square().sum(dim=2)  # (N, M)
    return (own[:, None] < others).all(dim=1).float()


def label_accuracy(found: Tensor, truth: Tensor) -> Tensor:
    """Return 1 for each true label (N, ...) that is among the labels found, each found label used once: -> (N,).

    The order is disregarded: an update does not tell in which order its examples came. Of several labels all must be
    right, and numbers to ``CLOSE``.
    """
    left, true = (y.detach().cpu().double().reshape(len(y), -1) for y in (found, truth))
    allowed = CLOSE if truth.is_floating_point() or found.is_floating_point() else 0.0
    hits = torch.zeros(len(truth))
    for i, label in enumerate(true):
        apart = (left - label).norm(dim=1)
        if len(left) and float(apart.min()) <= allowed * (float(label.norm()) or 1.0):
            left = left[torch.arange(len(left)) != apart.argmin()]
            hits[i] = 1.0
    return hits
