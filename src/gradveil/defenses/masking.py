"""What the defences that zero entries of a representation share: how many, where, and what a server does about it."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, drop, mask, use
from gradveil.defenses.base import Defense
from gradveil.defenses.checks import check_choice, check_positive, check_share
from gradveil.defenses.selection import budget, largest_live, largest_live_together
from gradveil.defenses.substitution import weight_name
from gradveil.layers import find_layer
from gradveil.tree import parameters


@dataclass(frozen=True)
class LayerMask(Defense):
    """Zero part of the input r of some layers, in their weight gradient only; a subclass ranks the entries."""

    share: float = 0.4  # of the entries of r, per example: the paper's epsilon / L
    count: int | None = None  # that many entries, in place of a share
    layer: tuple[str, ...] | str | None = None  # the defended layers, joined by "/"; None: the last linear one
    scope: Literal["sample", "batch"] = "sample"  # every example its own mask (the paper), or one for the batch

    def __post_init__(self) -> None:
        check_share(self.share)
        check_positive("count", self.count or 0)
        check_choice("scope", self.scope, ("sample", "batch"))
        if isinstance(self.layer, str):
            object.__setattr__(self, "layer", tuple(self.layer.split("/")))

    @abstractmethod
    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        """Return a key for each entry (N, L), zero or more: the largest are zeroed first."""

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return the defended layers' paths in the model."""
        names = self.layer if isinstance(self.layer, tuple) else (self.layer,)
        return tuple(dict.fromkeys(find_layer(model, name) for name in names))

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries of r (N, ...) were asked for; fewer are taken where fewer are live."""
        return len(r) * budget(r[0].numel(), self.share, self.count)

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        """Return r with its highest-ranked live entries set to zero."""
        flat = r.flatten(1)  # (N, L)
        count = budget(flat.shape[1], self.share, self.count)
        if count == 0:
            return r
        choose = largest_live if self.scope == "sample" else largest_live_together
        chosen = choose(flat, self.ranking(model, layer, x, r, rng), count)
        return flat.masked_fill(chosen, 0.0).view_as(r)

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return: leave the defended weights out, read the mask off them, and read dW/db off other layers."""
        defended = self.layers(model)
        weights = [weight_name(layer) for layer in defended]
        found = [drop(*weights)] if set(parameters(model)) - set(weights) else []
        return (*found, mask(*weights), *_divide(model, defended))


def _divide(model: nn.Module, defended: tuple[str, ...]) -> list[Countermeasure]:
    """Return the exact reading of a dense layer's input, where some dense layer has a bias."""
    biased = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    free = [name for name in biased if name not in defended]
    if free:
        return [use("analytic", f"Divides dW by db in the undefended {', '.join(free)}: its input, exactly.")]
    if biased:
        return [use("analytic", f"Divides dW by db in {', '.join(biased)}: the entries that were kept, exactly.")]
    return []
