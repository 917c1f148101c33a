"""One weight under a defence: the gradients that the defence let through to it, and what became of it since."""

from typing import Literal

import torch
from torch import Tensor, nn

SAMPLE = 256  # entries of a gradient that are compared where every entry is changed by the defence
_FREE = 16  # entries beyond which a fit of a few numbers says something
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What has to be known of a gradient: that it came through a defended layer, through a defended pass, or nothing, since
# the defence acts on whatever a step finds.
Kind = Literal["layer", "pass", "step"]


def checksum(t: Tensor) -> Tensor:
    """Return the sum of a tensor's bits (): what moves an entry moves it, a rearrangement does not."""
    flat = t.detach().contiguous().reshape(-1)
    size = flat.element_size()
    wide = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64 if wide else _INTEGERS[size]).sum()


def is_combination(value: Tensor, columns: list[Tensor], size: Tensor) -> bool:
    """Return whether a vector is a linear combination of others.

    Entry by entry, up to what rounding does to them and to numbers of the given ``size``.
    """
    if not value.numel():
        return True
    eps = torch.finfo(value.dtype).eps
    wide, size = value.double(), size.double().abs()
    within = 32 * eps * wide.abs() + 8 * eps * size + eps * size.max()
    units = [c.double() / c.double().norm() for c in columns if bool(c.any()) and bool(c.isfinite().all())]
    if units:
        a = torch.stack(units, 1)  # (n, k)
        wide = wide - a @ (torch.linalg.pinv(a.T @ a, rtol=1e-8, hermitian=True) @ (a.T @ wide))
    return bool((wide.abs() <= within).all())


class Trace:
    """One weight: the gradients that the defence let through to it, and its values when last accounted for."""

    def __init__(self, p: nn.Parameter, kind: Kind) -> None:
        self.p, self.kind = p, kind
        n = p.numel()
        self.places = None if kind == "layer" or n <= SAMPLE else torch.arange(SAMPLE) * 2654435761 % n
        self.known: list[Tensor] = []  # what ``p.grad`` may hold now; the last is the likeliest
        self.anchor = torch.zeros((), dtype=torch.int64)  # the checksum after the last step of an optimizer
        self.account()
        self.start = self.values

    def look(self, t: Tensor) -> Tensor:
        """Return the entries that are compared (n,), of the tensor itself where that can be."""
        flat = (t.detach().to_dense() if t.is_sparse else t.detach()).reshape(-1)
        if self.places is None:
            return flat
        self.places = self.places.to(flat.device)
        return flat[self.places]

    def keep(self, t: Tensor) -> Tensor:
        """Return a copy of these entries."""
        return self.look(t).clone() if self.places is None else self.look(t)

    def account(self, *, by_hand: bool = False) -> None:
        """Take the weight as it is now for what it should be; after steps by hand it may go back as well."""
        self.sum, self.version = checksum(self.p), self.p._version
        self.anchor = self.anchor if by_hand else self.sum
        self.values = torch.empty(0) if self.kind == "step" else self.keep(self.p)

    def arrived(self, g: Tensor, through: bool) -> None:
        """Take note of a gradient that is about to be added to ``p.grad``, or to be returned."""
        held = self.p.grad
        before = [self.keep(held)] if held is not None and bool(held.any()) and self._is(held, self.known) else []
        new = [self.keep(g)] if through else []
        self.known = [*before, *new, *(old + last for old in before for last in new)]

    def holds_known(self) -> Tensor:
        """Return whether ``p.grad`` is what the last gradient through the defence left there (), on its device."""
        assert self.p.grad is not None
        if not self.known:
            return torch.zeros((), dtype=torch.bool, device=self.p.grad.device)
        return (self.look(self.p.grad) == self.known[-1]).all()

    def holds_scaled(self) -> bool:
        """Return whether ``p.grad`` is a known gradient but for a factor, a limit on its entries, or weight decay."""
        assert self.p.grad is not None
        return not bool(self.p.grad.any()) or self._is(self.p.grad, self.known)

    def _is(self, gradient: Tensor, known: list[Tensor]) -> bool:
        now = self.look(gradient)
        for before in known:
            old = before.to(now.device)
            if torch.equal(old != now, old.isnan() & now.isnan()):
                return True
            most = now.abs().max()
            if self._fits(now, [old], self.look(self.p), now) or is_combination(now - old.clamp(-most, most), [], now):
                return True
        return False

    def is_penalty(self, g: Tensor, part: Tensor | None = None) -> bool:
        """Return whether a gradient, less a part, is that of a penalty on the weights alone: L1, L2, proximal."""
        whole = self.look(g)
        known = torch.zeros_like(whole) if part is None else self.look(part)
        return self._fits(whole - known, [], self.look(self.p), whole.abs() + known.abs())

    def _fits(self, value: Tensor, columns: list[Tensor], w: Tensor, size: Tensor) -> bool:
        """Return whether a vector is made of others and of the gradients of penalties on the weights w."""
        penalties = [w, w - self.start.to(w), w.sign()]
        if len(w) > _FREE:
            return is_combination(value, columns + penalties, size)
        few = [columns, *([*columns, one] for one in penalties)]  # one at a time: little can be told of few entries
        return any(is_combination(value, some, size) for some in few if len(w) > len(some) + 1 or some == columns)

    def steps_by_hand(self) -> bool:
        """Return whether the weight moved along gradients that went through the defence, and nowhere else."""
        if self.kind == "step":
            return False
        now = self.look(self.p)
        old = self.values.to(now)
        return any(self._fits(now - old, [known.to(now)], old, old) for known in self.known)
