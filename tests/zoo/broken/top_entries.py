"""The largest entries only, without noise."""

from dataclasses import dataclass

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("What is sent is exact, and where it is zero can be seen.", "leaving out", "plain")


@DEFENSES.register("top_entries")
@dataclass(frozen=True)
class TopEntries(Defense):
    """Send the tenth of each tensor that is largest."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            least = g.abs().flatten().topk(-(-g.numel() // 10)).values[-1]
            return g * (g.abs() >= least)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
