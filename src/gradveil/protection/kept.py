"""Copies and checksums of gradients and of a model's other state, which tell them again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradveil.protection.provenance import Bits
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


_BLOCK = 2**20  # words that are looked at at once


class Carried:
    """The state of a model beside its trained weights, as it was when the round began: no noise will be on it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.looking = False  # a look of its own at the state, which is not to be sent
        self.begin()

    def begin(self) -> None:
        """A round begins with the state as it is."""
        self._at_start = self._now()

    def loaded(self, part: nn.Module) -> None:
        """A round begins with what was loaded into a part; the rest stays under watch."""
        if part is self.model:
            self.begin()
            return
        path = next((name for name, module in self.model.named_modules() if module is part), None)
        if path is not None:
            kept = {name: mark for name, mark in self._at_start.items() if not name.startswith(f"{path}.")}
            self._at_start = kept | {n: mark for n, mark in self._now().items() if n.startswith(f"{path}.")}

    def changed(self) -> list[str]:
        """Return the names of what is other than it was, or new, or gone."""
        now = self._now()
        return sorted(n for n in {*now, *self._at_start} if n not in now or now[n] != self._at_start.get(n))

    def _now(self) -> dict[str, Any]:
        return {name: _mark(value) for name, value in self._state()}

    def _state(self) -> Iterator[tuple[str, Any]]:
        trained = {name: p.data_ptr() for name, p in self.model.named_parameters() if p.requires_grad}
        self.looking = True
        try:
            state = self.model.state_dict()
        finally:
            self.looking = False
        for name, value in state.items():
            if not (isinstance(value, Tensor) and trained.get(name) == value.data_ptr()):
                yield name, value


def _mark(value: Any) -> Any:
    """Return what tells a value from others of its kind; of an object that says nothing of itself, which one it is."""
    if isinstance(value, Tensor):
        return _bits(value)
    return repr(tree_map(_leaf, value))


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _bits(value)
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def _bits(t: Tensor) -> tuple[Any, ...]:
    """Return kind, shape and a checksum of a tensor's bytes, in their order."""
    t = t.detach()
    kind = (t.dtype, tuple(t.shape))
    t = t.to_dense() if t.layout is not torch.strided else t.int_repr() if t.is_quantized else t
    raw = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).contiguous().reshape(-1).view(torch.uint8)
    whole = torch.cat([raw, raw.new_zeros(-len(raw) % 8)]).view(torch.int64)
    odd = 2 * torch.arange(min(len(whole), _BLOCK), device=whole.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    for block in whole.split(_BLOCK):
        mixed = (block ^ (block >> 29)) * (odd[: len(block)] * 0x9E3779B97F4A7C1)
        total = total * 0x2545F4914F6CDD1D + (mixed ^ (mixed >> 32)).sum()
    return (*kind, int(total))
