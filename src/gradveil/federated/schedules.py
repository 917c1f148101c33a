"""How the learning rate changes from round to round. Within a round it is constant: the server sends it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from gradveil.ranges import Count, Range
from gradveil.registry import Registry

SCHEDULES: Registry["Schedule"] = Registry("schedule", "federated")


class Schedule(ABC):
    """Settings are the dataclass fields; the call gets the base rate and the round."""

    spec_name: ClassVar[str]

    @abstractmethod
    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return the learning rate of a round; rounds are numbered from 1."""


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The base rate in every round."""

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return the base rate."""
        return base


@SCHEDULES.register("inverse")
@dataclass(frozen=True)
class Inverse(Schedule):
    """2 / (mu (gamma + t)), t the number of local steps before the round (Li et al. 2020; Sun et al. 2020).

    The base rate is not used. In the theory t grows with every local step; here it grows from round to round.
    """

    mu: Annotated[float, Range(1e-9)] = 1.0
    gamma: Annotated[float, Range(1e-9)] = 8.0
    steps: Count = 1  # local steps per round

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return 2 / (mu (gamma + steps * rounds before))."""
        return 2.0 / (self.mu * (self.gamma + self.steps * (round_number - 1)))


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(Schedule):
    """The base rate times ``factor`` for every round before."""

    factor: Annotated[float, Range(0, 2)] = 0.99

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return base * factor ** (rounds before)."""
        return float(base * self.factor ** (round_number - 1))


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(Schedule):
    """From the base rate down to almost zero along half a cosine (Loshchilov and Hutter 2017)."""

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return base * (1 + cos(pi * rounds before / rounds)) / 2."""
        return base * 0.5 * (1 + math.cos(math.pi * (round_number - 1) / max(rounds, 1)))
