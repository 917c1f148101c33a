"""What is secret in a defence, found by running it."""

from dataclasses import dataclass

from torch import nn

from gradveil.countermeasures import Countermeasure
from gradveil.defenses.base import Defense
from gradveil.federated.settings import Local
from gradveil.seeds import Seeds
from gradveil.types import Batch


@dataclass(frozen=True)
class Probed:
    """What running a defence says about it."""

    servers: tuple[Countermeasure, ...] = ()  # what a server can do that its author did not declare
    errors: tuple[str, ...] = ()  # what its author declared and is not so
    notes: tuple[str, ...] = ()
    assessed: bool = True  # False: something secret is neither declared nor explained
    drawn: bool = True  # whether it sends something else in every round


def probe(
    defense: Defense, model: nn.Module, public: Batch, local: Local, lr: float, seeds: Seeds, num_classes: int
) -> Probed:
    """Run a defence on public examples a few times, and compare what it sends with what its author declares."""
    return Probed()
