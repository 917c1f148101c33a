"""The paper's defence and its kin: part of a layer's input hidden, in that layer's weight gradient alone."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure, drop, mask, use
from gradveil.errors import DefenseError
from gradveil.modules import find_layer
from gradveil.privacy.noise import Source, uniform
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.passes import weight_name
from gradveil.ranges import MOST, Among, Norm, Positive, Range, Share, Whole
from gradveil.representation.rules.base import wide
from gradveil.representation.scores import METHODS, leak_scores, row_norms
from gradveil.representation.selection import (
    best_direction,
    jacobian,
    largest_live,
    zeroed,
    zeroing_order,
)
from gradveil.tree import parameters

Method = Annotated[str, Among(METHODS)]
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


@DEFENSES.register("representation")
@dataclass(frozen=True)
class RepresentationPerturbation(LayerMask):
    """Zero the entries of the representation that give most of the input away, in one weight gradient only.

    The weight gradient of the defended layer is Σ δ_j r'_jᵀ in place of Σ δ_j r_jᵀ; r' is r with the ε entries of
    highest score |r_i| / ||∂r_i/∂x||₂ set to zero, per example (Sun et al. 2020, algorithms 1 and 2). Forward pass,
    bias gradient and all other gradients are unchanged.

    **A server that leaves the defended weight out of its matching, or reads the mask off it, undoes this.**

    Departures: entries that are zero already are never chosen; p other than the paper's 2 takes ||∂r_i/∂x||_p.
    """

    title = "Revealing entries hidden (the paper's defence)"

    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    method: Method = "auto"  # how leak scores are computed: auto, exact, sketch, ...

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        return leak_scores(model, layer, x, method=self.method, p=float(self.p), seen=r)


@DEFENSES.register("representation_authors")
@dataclass(frozen=True)
class RepresentationAuthors(LayerDefense):
    """Zero entries of the representation by the rule of the authors' code: one mask for the whole batch.

    Score ||∇r_i|| / (r_i + offset), with the sign of r, summed over the batch; the threshold is the percentile
    100 × share of these signed sums, and entries whose sum is *in absolute value* strictly below it are zeroed.
    So dead entries (sum 0) go first, nothing goes while the threshold is zero or less, and one entry with
    0 / 0 (dead, offset 0) makes the threshold NaN, and nothing goes at all.
    """

    title = "Revealing entries hidden (the authors' code)"

    share: Share = 0.4  # the percentile, as a part of 1
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    offset: Annotated[float, Range(-MOST)] = 0.0  # added to r_i below the fraction; their second script has 0.1
    method: Method = "auto"  # how the norms are computed: auto, exact, sketch, ...

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        return len(r) * round(self.share * r[0].numel())

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        if self.share == 0:
            return r
        flat = r.flatten(1)
        _, norms = row_norms(model, layer, x, self.method, seen=r)  # (N, L)
        sums = (norms / (flat + self.offset)).sum(0)  # (L,)
        threshold = torch.quantile(sums, self.share)
        return flat.masked_fill(sums.abs() < threshold, 0.0).view_as(r)


@DEFENSES.register("representation_certified")
@dataclass(frozen=True)
class RepresentationCertified(LayerDefense):
    """Zero the fewest entries of each example, in the paper's order, whose certificate reaches ``target_mse``.

    Raises where no number of entries does. The certificate is that of the weights as they are, so it is computed anew
    at each step.
    """

    title = "Revealing entries hidden, up to a certificate"

    target_mse: Positive = 1e-6  # of pixels in [0, 1], for every example
    kind: Literal["local", "global", "box"] = "global"  # the certificate that has to reach it
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    method: Method = "exact"  # how leak scores are computed: exact, auto, sketch, ...

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        from gradveil.representation.certify import needed_counts

        _check(model, x)
        flat, p = r.flatten(1), float(self.p)  # (N, L)
        order = zeroing_order(flat, leak_scores(model, layer, x, method=self.method, p=p, seen=r))
        with torch.no_grad():
            needed = needed_counts(model, layer, x, flat, order, self.target_mse, self.kind, p)
        if not needed.reachable:
            raise DefenseError(
                f"No share reaches target_mse={self.target_mse:g} by kind={self.kind} and p={p:g}: with all of the "
                f"representation zeroed, {float(needed.most.min()):.3g} is certified. Ask for less, or for another "
                f"kind."
            )
        return zeroed(flat, order, needed.counts.to(flat.device)).view_as(r)


def _check(model: nn.Module, x: Tensor) -> None:
    """Raise unless the certificate is about the function and the inputs that are trained on."""
    from gradveil.representation.problem import has_modes

    if model.training and has_modes(model):
        raise DefenseError(
            "target_mse: dropout and batch norm make the representation another function in training than the one a "
            "certificate is about. Give a share instead, or train with these layers in eval mode."
        )
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise DefenseError(
            f"target_mse is the error of pixels in [0, 1], and inputs lie in [{float(x.min()):.3g}, "
            f"{float(x.max()):.3g}]. Put the normalisation into the model as its first layer; token ids have no "
            "pixels: defend text with veil, gaussian or pruning."
        )


@DEFENSES.register("representation_direction")
@dataclass(frozen=True)
class RepresentationDirection(LayerDefense):
    """Move the representation by share × ||r||₂ in the direction that moves the input most, example by example."""

    title = "A direction of a layer hidden"

    share: Share = 0.4  # of ||r||₂: how far r is moved
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        if not self.share:
            return r
        moved = []
        for j, row in zip(jacobian(model, layer, x, r), wide(r.flatten(1)), strict=True):
            u = best_direction(wide(j))
            if u is not None:
                u = -u if torch.dot(u.to(row), row) > 0 else u  # both do the same to first order: this one shrinks r
                row = row + self.share * row.norm() * u.to(row)
            moved.append(row)
        return torch.stack(moved).view_as(r)
