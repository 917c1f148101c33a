"""What a defence is: four places where it may act, and what a server that knows it would do."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.registry import Registry, split_specs
from gradveil.tree import Params
from gradveil.types import Batch, Update

DEFENSES: Registry["Defense"] = Registry("defense", "gradveil.defenses")

Place = Literal["batch", "representation", "gradient", "update"]
_METHOD_OF: dict[Place, str] = {
    "batch": "on_batch",
    "representation": "perturb",
    "gradient": "on_gradient",
    "update": "on_update",
}


class Defense(ABC):
    """Override the places where the defence acts; the others change nothing.

    In order: on the batch before a local step, on the representation that the weight gradient of a
    layer is built from (Sun et al.), on the gradient of the step, on the update that is sent.
    """

    spec_name: ClassVar[str]

    @property
    def acts_on(self) -> frozenset[Place]:
        """Where this defence acts: the methods it overrides."""
        return frozenset(
            place for place, name in _METHOD_OF.items() if getattr(type(self), name) is not getattr(Defense, name)
        )

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Change the examples before a local step."""
        return batch

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return the layers whose weight gradient is built from a perturbed input."""
        return ()

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        """Return r' for the inputs x (N, ...) and the layer's inputs r (N, ...)."""
        return r

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries of r (N, ...) this defence sets out to zero; reports set it beside what it did."""
        return 0

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        """Change the gradient of one local step."""
        return gradient

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Change the update before it is sent."""
        return update

    @abstractmethod
    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what a server that knows this defence would do; never empty."""


def build(spec: str | Defense) -> Defense:
    """Return the defence that a spec describes, e.g. ``representation:share=0.4``; ``a+b`` composes."""
    if isinstance(spec, str) and len(parts := split_specs(spec)) > 1:
        from gradveil.defenses.compose import Compose

        return Compose(tuple(DEFENSES.build(part) for part in parts))
    return DEFENSES.build(spec)
