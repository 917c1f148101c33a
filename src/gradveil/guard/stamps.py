"""A gradient told again that a defence has made, and copied at once where that can be."""

import torch
from torch import Tensor

from gradveil.guard.trace import Bits
from gradveil.tree import Params

SMALL = 2**20  # entries of a gradient up to which it is kept whole, for comparison
Stamp = tuple[list[tuple[str, int, int]], Params | Tensor]  # names, which tensors, how often written; what they hold


def stamp(gradient: Params, changed: Params) -> Stamp:
    """Return what tells a gradient again that holds what a defence made of it."""
    small = sum(g.numel() for g in changed.values()) <= SMALL
    return _tensors(gradient), changed if small else Bits(gradient.values()).sum()


def is_stamped(gradient: Params, last: Stamp | None) -> bool:
    """Whether a gradient is the one that was stamped."""
    if last is None or _tensors(gradient) != last[0]:
        return False
    if isinstance(last[1], Tensor):
        return bool((Bits(gradient.values()).sum() == last[1].to(next(iter(gradient.values())).device)).all())
    return all(torch.equal(g, last[1][name]) for name, g in gradient.items())


def _tensors(gradient: Params) -> list[tuple[str, int, int]]:
    return [(name, id(g), g._version) for name, g in gradient.items()]


def alike(gradient: Params) -> bool:
    """Whether all tensors lie plainly on one device in one precision, so that one call does for all."""
    return len({(g.device, g.dtype, g.layout) for g in gradient.values()}) == 1 and not any(
        g.is_sparse for g in gradient.values()
    )


def copied(gradient: Params) -> Params:
    """Return a copy, made at once where that can be."""
    return Kept(gradient).parts


class Kept:
    """A copy of a gradient, to compare it with."""

    def __init__(self, gradient: Params) -> None:
        self._flat = _flat(gradient) if alike(gradient) else None
        if self._flat is None:
            self.parts: Params = {name: g.detach().clone() for name, g in gradient.items()}
            return
        parts = self._flat.split([g.numel() for g in gradient.values()])
        self.parts = {name: part.view(g.shape) for (name, g), part in zip(gradient.items(), parts, strict=True)}

    def is_same(self, gradient: Params) -> bool:
        """Whether a gradient is this one, bit for bit."""
        if gradient.keys() != self.parts.keys():
            return False
        if self._flat is not None and alike(gradient) and next(iter(gradient.values())).dtype is self._flat.dtype:
            return torch.equal(_flat(gradient).to(self._flat.device), self._flat)
        return all(torch.equal(g.to(self.parts[name]), self.parts[name]) for name, g in gradient.items())


def _flat(gradient: Params) -> Tensor:
    return torch.cat([g.detach().reshape(-1) for g in gradient.values()])
