"""What an attack is: from observations to reconstructions, many problems at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Generator

from gradveil.errors import AttackError
from gradveil.registry import Registry
from gradveil.types import Observation, Reconstruction, check_update

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

        Each problem draws from its own generator, so that it gives the same answer alone and among others.
        """


def build(spec: str | Attack) -> Attack:
    """Return the attack that a spec describes, e.g. ``dlg:steps=300,restarts=8``."""
    return ATTACKS.build(spec)


def check_seen(seen: Sequence[Observation]) -> None:
    """Raise unless each update fits its model and shows something to match."""
    for s in seen:
        check_update(s.update, s.model)
        if not s.visible:
            raise AttackError("Every tensor of the update has weight 0: there is nothing to match.")


def in_groups(
    seen: Sequence[Observation],
    rngs: Sequence[Generator],
    key: Callable[[Observation], object],
    solve: Callable[[list[Observation], list[Generator]], list[Reconstruction]],
) -> list[Reconstruction]:
    """Solve the observations of each key together; the answers come in the order of the observations."""
    groups: dict[object, list[int]] = {}
    for i, s in enumerate(seen):
        groups.setdefault(key(s), []).append(i)
    solved: dict[int, Reconstruction] = {}
    for members in groups.values():
        answers = solve([seen[i] for i in members], [rngs[i] for i in members])
        solved |= dict(zip(members, answers, strict=True))
    return [solved[i] for i in range(len(seen))]
