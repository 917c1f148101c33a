"""Units of the representation that are nearly dead are set to zero."""

from dataclasses import dataclass

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, drop
from gradveil.modules import find_layer
from gradveil.protection.defense import DEFENSES, Defense
from zoo.keeper import Truth

TRUTH = Truth("The smallest entries carry least, and all other layers are untouched.", "leaving out", "drop")


@DEFENSES.register("dead_units")
@dataclass(frozen=True)
class DeadUnits(Defense):
    """Zero the tenth of the last layer's input that is smallest."""

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        return (find_layer(model, None),)

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        flat = r.flatten(1)
        count = max(1, flat.shape[1] // 10)
        return flat.scatter(1, flat.abs().topk(count, largest=False).indices, 0.0).view_as(r)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (drop(next(iter(dict(model.named_parameters())))),)
