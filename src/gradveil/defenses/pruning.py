"""Gradient compression: send the largest entries only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure, mask, simulate
from gradveil.modules import under_transform
from gradveil.privacy.noise import Source
from gradveil.protection.defense import DEFENSES, Defense, Place
from gradveil.ranges import Share
from gradveil.representation.selection import largest, last_of
from gradveil.tree import Params
from gradveil.types import Update


@DEFENSES.register("pruning")
@dataclass(frozen=True)
class Pruning(Defense):
    """Zero the smallest entries of each tensor of the gradient or the update, in size (GC in Sun et al. 2020, table 2).

    Exactly ``round(share × size)`` entries go, of equal ones the first; the others are sent as they are.
    """

    title = "Smallest gradients left out (pruning)"

    draws: ClassVar[bool] = False

    share: Share = 0.8  # of the entries set to zero
    on: Literal["gradient", "update"] = "gradient"  # of each local step, or of what is sent

    @property
    def acts_on(self) -> frozenset[Place]:
        return frozenset({self.on})

    def prune(self, gradient: Params) -> Params:
        """Return the gradient without its smallest entries; differentiable in the entries kept."""
        grads = list(gradient.values())
        whole = [g.flatten() for g in grads]
        counts = [round(self.share * entries.numel()) for entries in whole]
        if under_transform() or any(g.requires_grad for g in grads):
            parts = [entries * _kept(entries, count) for entries, count in zip(whole, counts, strict=True)]
        elif all(g.is_cuda for g in grads):
            parts = list(_pruned_together(whole, counts).split([g.numel() for g in grads]))
        else:
            parts = [_pruned(entries, count) for entries, count in zip(whole, counts, strict=True)]
        return {name: part.view_as(g) for (name, g), part in zip(gradient.items(), parts, strict=True)}

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        return self.prune(gradient) if self.on == "gradient" else gradient

    def on_update(self, update: Update, rng: Source) -> Update:
        return replace(update, gradient=self.prune(update.gradient)) if self.on == "update" else update

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = "Prunes its own trial gradients by the same rule inside the objective."
        return (mask("*"), simulate(self.prune, why, self.on))


def _kept(entries: Tensor, count: int) -> Tensor:
    """Return 0 for the ``count`` smallest entries, of equal ones the first, and 1 for the others (n,)."""
    zeroed = largest(-entries.detach().abs()[None], count)[0]
    return torch.logical_not(zeroed).to(entries.dtype)


def _pruned(entries: Tensor, count: int) -> Tensor:
    """Return the entries (n,) without the ``count`` smallest; by numpy, which orders faster than torch on a CPU."""
    if entries.is_cuda or not count or entries.dtype not in (torch.float32, torch.float64):
        return entries * _kept(entries, count)
    sizes = entries.abs().numpy()
    cut = np.partition(sizes, count - 1)[count - 1]
    if not cut > 0:  # those that go are zero already; or the gradient is not finite
        return entries.clone() if cut == 0 else entries * _kept(entries, count)
    equal = np.flatnonzero(sizes == cut)
    left = count - (np.count_nonzero(sizes <= cut) - len(equal))  # places for equal ones
    pruned = F.hardshrink(entries, float(cut if left == len(equal) else np.nextafter(cut, cut.dtype.type(0))))
    if left < len(equal):
        pruned[torch.from_numpy(equal[:left])] = 0.0
    return pruned


def _pruned_together(tensors: list[Tensor], counts: list[int]) -> Tensor:
    """Return the tensors end to end, pruned, by few calls on all of them together; never waits for the device."""
    flat = torch.cat([t.detach() for t in tensors])
    size = flat.abs()
    sizes = tuple(t.numel() for t in tensors)
    lengths, wanted, ends = _on_device(sizes, tuple(counts), str(flat.device))
    last = _lasts(size.split(sizes), counts).repeat_interleave(lengths, output_size=len(flat))
    below, equal = size < last, size == last
    # Running numbers over all tensors, one vector at a time: rows of a matrix get one block of a CUDA device each.
    under, number = (F.pad(mask.cumsum(0, dtype=torch.int32), (1, 0)) for mask in (below, equal))
    left = wanted - under[ends].diff() + number[ends[:-1]]  # the number of the last equal one that goes
    stays = number[1:] > left.repeat_interleave(lengths, output_size=len(flat))
    return flat.masked_fill_(below | equal & ~stays, 0.0)


def _lasts(sizes: Sequence[Tensor], counts: list[int]) -> Tensor:
    """Return the largest of the ``count`` smallest entries of each tensor (T,), at once for those of one length."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (t, count) in enumerate(zip(sizes, counts, strict=True)):
        alike.setdefault((len(t), count), []).append(i)
    found: dict[int, Tensor] = {}
    for (length, count), places in alike.items():
        rows = torch.stack([sizes[i] for i in places])
        least = length - count + 1  # the same as the smallest of so many of the largest
        values = last_of(rows, least) if count else rows.new_full((len(places), 1), -1.0)
        found.update(zip(places, values, strict=True))
    return torch.cat([found[i] for i in range(len(sizes))])


@lru_cache(maxsize=16)
def _on_device(sizes: tuple[int, ...], counts: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return lengths, counts, and where the running numbers up to each tensor stand: kept, so that nothing waits."""
    ends = list(accumulate(sizes, initial=0))
    return torch.tensor(sizes, device=device), torch.tensor(counts, device=device), torch.tensor(ends, device=device)
