"""Zero part of a layer's input: exactly so many entries, live ones only, ties by index."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure, drop, mask, use
from gradveil.modules import find_layer
from gradveil.privacy.noise import Source, uniform
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.passes import weight_name
from gradveil.ranges import Share, Whole
from gradveil.representation.selection import largest_live
from gradveil.tree import parameters

Layers = tuple[str, ...] | str | None


class LayerDefense(Defense):
    """Change the input r of some layers, in their weight gradient only; ``layer`` is a setting of each subclass."""

    draws: ClassVar[bool] = False

    layer: Layers

    def __post_init__(self) -> None:
        if isinstance(self.layer, str):
            object.__setattr__(self, "layer", tuple(self.layer.split("/")))

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        names = self.layer if isinstance(self.layer, tuple) else (self.layer,)
        return tuple(dict.fromkeys(find_layer(model, name) for name in names))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        defended = self.layers(model)
        weights = [weight_name(layer) for layer in defended]
        others = set(parameters(model)) - set(weights)
        return (*([drop(*weights)] if others else []), mask(*weights), *_divide(model, defended))


def _divide(model: nn.Module, defended: tuple[str, ...]) -> list[Countermeasure]:
    """Return the exact reading of a dense layer's input, where some dense layer has a bias."""
    biased = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    free = [name for name in biased if name not in defended]
    if free:
        return [use("analytic", f"Divides dW by db in the undefended {', '.join(free)}: its input, exactly.")]
    if biased:
        return [use("analytic", f"Divides dW by db in {', '.join(biased)}: the entries that were kept, exactly.")]
    return []


@dataclass(frozen=True)
class LayerMask(LayerDefense):
    """Zero the entries of r that rank highest, example by example; a subclass ranks them."""

    share: Share = 0.4  # of the entries of r, per example: the paper's epsilon / L
    count: Whole | None = None  # that many entries, in place of a share
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one

    @property
    def idle(self) -> bool:
        return (self.share if self.count is None else self.count) == 0

    def budget(self, r: Tensor) -> int:
        """Return how many entries of each example of r (N, ...) to zero."""
        length = r[0].numel()
        return min(length, round(self.share * length) if self.count is None else self.count)

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        return len(r) * self.budget(r)

    @abstractmethod
    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return a key for each entry (N, L), zero or more: the largest are zeroed first."""

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        flat, count = r.flatten(1), self.budget(r)  # (N, L)
        if count == 0:
            return r
        chosen = largest_live(flat, self.ranking(model, layer, x, r, rng), count)
        return flat.masked_fill(chosen, 0.0).view_as(r)


@DEFENSES.register("random_mask")
@dataclass(frozen=True)
class RandomMask(LayerMask):
    """Zero live entries of the representation at random, as many as the paper's rule would.

    The control for the score: if this does as well as ``representation``, the score does not matter.
    """

    title = "Random entries hidden"

    draws: ClassVar[bool] = True
    draws_on_device: ClassVar[bool] = True

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        return uniform(r.flatten(1).shape, rng).to(r.device)
