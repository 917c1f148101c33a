"""What an attack is: from observations to reconstructions, many problems at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Generator

from gradveil.registry import Registry
from gradveil.types import Observation, Reconstruction

ATTACKS: Registry["Attack"] = Registry("attack", "gradveil.attacks")


class Attack(ABC):
    """Settings are the dataclass fields; the call gets what the server sees and a generator."""

    spec_name: ClassVar[str]

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        """Rebuild the inputs behind one update."""
        return self.reconstruct_many([seen], [rng])[0]

    @abstractmethod
    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates at once.

        Each problem draws from its own generator, so that it gives the same answer alone and in company.
        """


def build(spec: str | Attack) -> Attack:
    """Return the attack that a spec describes, e.g. ``dlg:steps=300,restarts=8``."""
    return ATTACKS.build(spec)
