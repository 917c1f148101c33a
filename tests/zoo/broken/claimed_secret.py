"""Noise from a seed in the code, which is called a secret of the client."""

from dataclasses import dataclass, replace

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("A seed that everybody installs is no secret.", "noise from a known seed", "whiten")


@DEFENSES.register("claimed_secret")
@dataclass(frozen=True)
class ClaimedSecret(Defense):
    """Add Gaussian noise of standard deviation 5 from a seed that comes with the package."""

    seed: int = 31415

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, Generator().manual_seed(self.seed), 5.0)

    def for_server(self) -> Defense:
        return replace(self, seed=0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
