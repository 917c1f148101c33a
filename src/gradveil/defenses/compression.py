"""Compression by rounding: signs, few levels, few levels at random. It saves bandwidth; does it hide anything?"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, simulate, whiten
from gradveil.privacy.noise import Source, uniform
from gradveil.protection.defense import DEFENSES, Defense, Place
from gradveil.ranges import Range
from gradveil.tree import Params
from gradveil.types import Observation, Update

TINY = 1e-37  # below every size of a gradient: zeros stay zeros
MANY = 64  # entries of a tensor, among which one lies at the lowest level


@dataclass(frozen=True)
class Compression(Defense):
    """Round each tensor by itself; a subclass says how."""

    draws: ClassVar[bool] = False

    on: Literal["gradient", "update"] = "gradient"  # of each local step, or of what is sent

    @property
    def acts_on(self) -> frozenset[Place]:
        return frozenset({self.on})

    @abstractmethod
    def rounded(self, g: Tensor, rng: Source) -> Tensor:
        """Return one tensor as it is sent."""

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        return self._rounded(gradient, rng) if self.on == "gradient" else gradient

    def on_update(self, update: Update, rng: Source) -> Update:
        return replace(update, gradient=self._rounded(update.gradient, rng)) if self.on == "update" else update

    def _rounded(self, gradient: Params, rng: Source) -> Params:
        return {name: self.rounded(g, rng) for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = "Rounds its own trial gradients by the same rule, and follows the slopes that they have before rounding."
        return (simulate(self._trial, why, self.on),)

    def _trial(self, gradient: Params) -> Params:
        """Return what is sent for a trial gradient; slopes pass straight through (Bengio et al. 2013)."""
        unused = Generator()
        return {name: g + (self.rounded(g, unused) - g).detach() for name, g in gradient.items()}


@DEFENSES.register("sign")
@dataclass(frozen=True)
class Sign(Compression):
    """Send the sign of each entry (signSGD, Bernstein et al. 2018), times its tensor's mean absolute value.

    The mean is the scale of Karimireddy et al. 2019: without it every step has the same length.
    """

    title = "Signs alone"

    def rounded(self, g: Tensor, rng: Source) -> Tensor:
        return g.sign() * g.abs().mean()

    def _trial(self, gradient: Params) -> Params:
        """Return signs of a trial, with slopes that are steep near zero and end where the sign is certain."""
        found = {}
        for name, g in gradient.items():
            size = g.abs().mean()
            soft = g / (g.square() + 0.1 * size.square() + TINY).sqrt() * size
            found[name] = soft + (self.rounded(g, Generator()) - soft).detach()
        return found


@DEFENSES.register("quantise")
@dataclass(frozen=True)
class Quantise(Compression):
    """Round each entry to the nearest of 2^bits - 1 levels, evenly from minus to plus its tensor's largest entry."""

    title = "Rounding to few levels"

    bits: Annotated[int, Range(2, 16)] = 4  # of an entry; two are the levels -1, 0 and 1

    def rounded(self, g: Tensor, rng: Source) -> Tensor:
        unit: Tensor = g.abs().amax().clamp_min(TINY) / (2 ** (self.bits - 1) - 1)
        return (g / unit).round() * unit


@DEFENSES.register("qsgd")
@dataclass(frozen=True)
class Qsgd(Compression):
    """Round each entry at random to one of the two levels around it, right on average (QSGD, Alistarh et al. 2017).

    Levels are multiples of ||g|| / ``levels``, with the tensor's Euclidean norm, or with its largest entry, which
    rounds less away; ``levels=1,norm=max`` is TernGrad (Wen et al. 2017).
    """

    title = "Random rounding"

    draws: ClassVar[bool] = True
    draws_on_device: ClassVar[bool] = True

    levels: Annotated[int, Range(1, 4096)] = 16  # above zero
    norm: Literal["l2", "max"] = "l2"  # of a tensor, that the highest level stands for

    def rounded(self, g: Tensor, rng: Source) -> Tensor:
        unit = self._size(g).clamp_min(TINY) / self.levels
        chance = uniform(g.shape, rng).to(g)
        return g.sign() * (g.abs() / unit + chance).floor() * unit

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(self._known),)

    @property
    def fingerprint(self) -> Callable[[Observation], Observation]:
        return self._by_size

    def _by_size(self, seen: Observation) -> Observation:
        sent = seen.update.gradient if self._is_last(seen) else {}
        sizes = {
            name: self._told(g).expand_as(g) for name, g in sent.items() if self.norm == "max" or g.numel() >= MANY
        }
        if not sizes:
            return seen
        update = replace(seen.update, gradient=sizes)
        return replace(seen, update=update, simulate=self._sizes, simulate_on=self.on, client=None)

    def _size(self, g: Tensor) -> Tensor:
        return g.norm() if self.norm == "l2" else g.abs().amax()

    def _sizes(self, gradient: Params) -> Params:
        return {name: self._size(g).expand_as(g) for name, g in gradient.items()}

    def _told(self, sent: Tensor) -> Tensor:
        """Return the size that what was sent tells: the largest entry is never rounded, and some are one unit."""
        there = _there(sent)
        return sent.abs().max() if self.norm == "max" or not len(there) else self.levels * there.min()

    def _is_last(self, seen: Observation) -> bool:
        """Whether what was sent was rounded last: no steps were added up after it."""
        update = seen.update
        return self.on == "update" or (update.num_steps == 1 and update.rule.is_plain)

    def _known(self, seen: Observation) -> dict[str, float]:
        """Return the standard deviation of each tensor's rounding; nothing where steps were added up after it."""
        return {name: _spread(g) for name, g in seen.update.gradient.items()} if self._is_last(seen) else {}


def _there(sent: Tensor) -> Tensor:
    """Return the sizes of the entries that are not zero; the least is one unit, where many were sent."""
    size = sent.abs()
    return size[size > 1e-4 * size.max()]


def _spread(sent: Tensor) -> float:
    """Return the standard deviation of random rounding, by what was sent.

    Entries below the first level, of which a share p is sent as one unit, are taken to lie evenly between 0 and 2p
    units: p (1 - 4p/3) unit² of noise. Those above lie anywhere between two levels: a sixth of unit².
    """
    size, there = sent.abs(), _there(sent)
    if not len(there):
        return 0.0
    unit = float(there.min())
    low, first = (float((size < at * unit).double().mean()) for at in (1.5, 0.5))
    share = 1 - first / low
    return float(unit * (low * share * max(1 - 4 * share / 3, 0) + (1 - low) / 6) ** 0.5)
