"""The update in another basis: Hadamard's."""

from dataclasses import dataclass

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("A change of basis hides nothing from who knows the basis.", "another basis", "undeclared")


@DEFENSES.register("hadamard")
@dataclass(frozen=True)
class Hadamard(Defense):
    """Transform as many entries of each tensor as a power of two has; the rest stays."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, _transformed)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


def _transformed(g: Tensor) -> Tensor:
    changed = g.flatten().clone()
    length = 2 ** (g.numel().bit_length() - 1)
    part, half = changed[:length], 1
    while half < length:
        pairs = part.view(-1, 2, half)
        part = (0.5**0.5 * (pairs.flip(1) + pairs * pairs.new_tensor([[1.0], [-1.0]]))).reshape(-1)
        half *= 2
    changed[:length] = part
    return changed.view_as(g)
