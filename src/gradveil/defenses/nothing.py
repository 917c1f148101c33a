"""No defence: the control of every comparison."""

from dataclasses import dataclass

from torch import nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.base import DEFENSES, Defense


@DEFENSES.register("none")
@dataclass(frozen=True)
class NoDefense(Defense):
    """Send the gradient as it is."""

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return the one view there is: nothing is hidden."""
        return (plain(),)
