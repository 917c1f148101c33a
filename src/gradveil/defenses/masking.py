"""Zero part of a layer's input: exactly so many entries, live ones only, ties by index."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure, drop, mask, use
from gradveil.modules import find_layer, under_transform
from gradveil.privacy.draws import Source, uniform
from gradveil.protection.defense import DEFENSES, Defense, check_choice
from gradveil.protection.passes import weight_name
from gradveil.ranges import Share, Whole
from gradveil.tree import parameters

LONG = 2**14  # entries of a row from which one block of a CUDA device is too few
_DEAD = -1.0  # below every score, and scores are never negative

Layers = tuple[str, ...] | str | None


def largest(keys: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest keys of each row; of equal ones the first come first."""
    length = keys.shape[1]
    if count <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)  # (N, L)
    if count >= length:
        return torch.ones_like(keys, dtype=torch.bool)  # (N, L)
    last = last_by_top(keys, count) if keys.is_cuda and length > LONG else last_by_rank(keys, count)
    if not keys.is_cuda and not under_transform():
        chosen = keys >= last
        if int(chosen.sum()) == count * len(keys):  # no row has more that are equal to its last
            return chosen
    above, equal = keys > last, keys == last  # (N, L)
    left = count - above.sum(1, keepdim=True)  # (N, 1), places for those equal to it
    return above | (equal & (equal.cumsum(1) <= left))


def last_by_rank(keys: Tensor, count: int) -> Tensor:
    """Return the smallest of the ``count`` largest keys of each row (N, 1)."""
    place = keys.shape[1] - count
    if keys.is_cuda or keys.dtype not in (torch.float32, torch.float64) or under_transform():
        return keys.kthvalue(place + 1, dim=1, keepdim=True).values
    # numpy's partition takes a tenth of the time of torch's on a CPU
    return torch.from_numpy(np.partition(keys.detach().numpy(), place, axis=1)[:, place : place + 1].copy())


def last_by_top(keys: Tensor, count: int) -> Tensor:
    """Return the same; on CUDA a row is shared by many blocks here, where ``kthvalue`` gives it to one."""
    return keys.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)


def largest_live(r: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the mask (N, L) of the ``count`` largest scores of each row among its live entries, r_i ≠ 0.

    A dead entry is zero already: it never spends the budget. A row with fewer live entries gives them all.
    """
    return largest(_keys(r, scores, _DEAD), count) & (r != 0)


def largest_live_each(r: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
    """Return the mask (K, B, L) of ``largest_live`` with a count of its own (K, 1, 1) for each of K batches.

    ``counts`` may lie on a device: nothing waits for it.
    """
    order = _keys(r, scores, _DEAD).argsort(dim=-1, descending=True, stable=True)
    taken = (torch.arange(r.shape[-1], device=r.device) < counts).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, taken) & (r != 0)


def largest_live_together(r: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return one mask for the whole batch (N, L): the ``count`` largest sums of scores over it.

    An entry is live here when it is live for any example.
    """
    total = _keys(r, scores, 0.0).sum(0, keepdim=True)  # (1, L)
    chosen = largest_live((r != 0).any(0, keepdim=True).to(total.dtype), total, count)
    return chosen.expand_as(r)


def _keys(r: Tensor, scores: Tensor, dead: float) -> Tensor:
    """Return what live entries are ordered by, and ``dead`` for the others; an undefined score is the highest."""
    return torch.where(r != 0, scores.nan_to_num(nan=torch.inf, posinf=torch.inf), dead)


class LayerDefense(Defense):
    """Change the input r of some layers, in their weight gradient only; ``layer`` is a setting of each subclass."""

    draws: ClassVar[bool] = False

    layer: Layers

    def __post_init__(self) -> None:
        if isinstance(self.layer, str):
            object.__setattr__(self, "layer", tuple(self.layer.split("/")))

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return the defended layers' paths in the model."""
        names = self.layer if isinstance(self.layer, tuple) else (self.layer,)
        return tuple(dict.fromkeys(find_layer(model, name) for name in names))

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return: leave the defended weights out, read the mask off them, and read dW/db off other layers."""
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
class EntryDefense(LayerDefense):
    """Zero so many entries of r; a subclass chooses which."""

    share: Share = 0.4  # of the entries of r, per example: the paper's epsilon / L
    count: Whole | None = None  # that many entries, in place of a share
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one

    def __post_init__(self) -> None:
        super().__post_init__()

    @property
    def idle(self) -> bool:
        """Whether no entry is to be zeroed."""
        return (self.share if self.count is None else self.count) == 0

    def budget(self, r: Tensor) -> int:
        """Return how many entries of each example of r (N, ...) to zero."""
        length = r[0].numel()
        return min(length, round(self.share * length) if self.count is None else self.count)

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries of r (N, ...) were asked for; fewer are taken where fewer are live."""
        return len(r) * self.budget(r)


@dataclass(frozen=True)
class LayerMask(EntryDefense):
    """Zero the entries of r that rank highest; a subclass ranks them."""

    scope: Literal["sample", "batch"] = "sample"  # every example its own mask (the paper), or one for the batch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scope", self.scope, ("sample", "batch"))

    @abstractmethod
    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return a key for each entry (N, L), zero or more: the largest are zeroed first."""

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return r with its highest-ranked live entries set to zero."""
        flat, count = r.flatten(1), self.budget(r)  # (N, L)
        if count == 0:
            return r
        choose = largest_live if self.scope == "sample" else largest_live_together
        chosen = choose(flat, self.ranking(model, layer, x, r, rng), count)
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
        """Return uniform random keys (N, L)."""
        return uniform(r.flatten(1).shape, rng).to(r.device)
