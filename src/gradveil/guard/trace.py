"""One weight under a defence: the gradients that the defence let through to it, and what became of it since."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.tree import Params

SAMPLE = 128  # entries of a gradient that are compared where every entry is changed by the defence
_FREE = 16  # entries beyond which a fit of a few numbers says something
_SHORT = {"cpu": 2**14, "cuda": 2**22}  # entries of a tensor up to which a call costs more than a copy
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What has to be known of a gradient: that it came through a defended layer, through a defended pass, that it was made
# of the records, or nothing, since the defence acts on whatever a step finds.
Kind = Literal["layer", "pass", "records", "step"]

CHANGED = (
    "Weights changed between steps, by other hands than an optimizer's step on defended gradients. Train with a torch "
    "optimizer, load weights by load_state_dict(), and change them, where it must be, in "
    "optimizer.register_step_post_hook()."
)


class Bits:
    """The bits of some tensors, summed: what moves an entry moves the sum, a rearrangement does not."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self._at: list[int] = []  # where in memory they were when the views were made
        self._long: list[Tensor] = []  # views of whole words
        self._short: list[list[Tensor]] = []  # views that are cheaper to copy together than to sum one by one

    def sum(self) -> Tensor:
        """Return the sum of all words ()."""
        at = [t.data_ptr() for t in self.tensors]
        if at != self._at:
            self._view()
            self._at = at if all(t.is_contiguous() for t in self.tensors) else []
        sums = [words.sum() for words in self._long] + [torch.cat(some).view(torch.int64).sum() for some in self._short]
        if len(sums) == 1:
            return sums[0]
        one = len({part.device for part in sums}) == 1
        return torch.stack(sums if one else [part.cpu() for part in sums]).sum()

    def _view(self) -> None:
        short: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._long = []
        for t in self.tensors:
            flat, size = t.detach().contiguous().view(-1), t.element_size()
            words = flat.numel() * size // 8 * 8 // size
            if flat.numel() <= _SHORT.get(t.device.type, 0) or flat.storage_offset() * size % 8:
                words = 0
            if words:
                self._long.append(flat[:words].view(torch.int64))
            short.setdefault((size, t.device), []).append(flat[words:].view(_INTEGERS[size]))
        for (size, device), some in short.items():
            odd = sum(part.numel() for part in some) * size % 8
            some += [torch.zeros((8 - odd) // size, dtype=_INTEGERS[size], device=device)] if odd else []
        self._short = [some for some in short.values() if any(part.numel() for part in some)]


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


def factor_of(now: Tensor, old: Tensor) -> Tensor:
    """Return the number by which a vector's largest entry was multiplied."""
    at = old.abs().argmax()
    return now[at] / old[at]


def is_scaled(now: Tensor, old: Tensor, factor: Tensor) -> bool:
    """Return whether a vector is another one times a number, up to rounding."""
    apart = torch.sub(now, old * factor).abs_()
    return bool(apart.sub_(now.abs().mul_(8 * torch.finfo(now.dtype).eps)).max() <= torch.finfo(now.dtype).tiny)


def is_made_of(now: Tensor, old: Tensor, w: Tensor, start: Tensor) -> bool:
    """Return whether a gradient is another one but for a factor, a limit on its entries, or a penalty on weights w."""
    if is_combination(now - old.clamp(-(most := now.abs().max()), most), [], now):
        return True
    penalties = [w, w - start, w.sign()]
    some = [penalties] if len(now) > _FREE else [[one] for one in penalties if len(now) > 2]
    return any(is_combination(now, [old, *few], now) for few in [*some, []])


class Trace:
    """One weight: the gradients that the defence let through to it, and its values when last accounted for."""

    def __init__(self, p: nn.Parameter, kind: Kind) -> None:
        self.p, self.kind = p, kind
        n = p.numel()
        places = torch.arange(n) if n <= SAMPLE else torch.arange(SAMPLE) * 2654435761 % n
        self.places = None if kind in ("layer", "records") else places.to(p.device)
        self.known: list[Tensor] = []  # what ``p.grad`` may hold now; the last is the likeliest
        self.begin()

    def begin(self) -> None:
        """A round begins with the weight as it is."""
        self.start = torch.empty(0) if self.kind == "step" else self.keep(self.p)

    def look(self, t: Tensor) -> Tensor:
        """Return the entries that are compared (n,), of the tensor itself where that can be."""
        if t.requires_grad or t.is_sparse:
            t = t.detach().to_dense() if t.is_sparse else t.detach()
        if self.places is None:
            return t.reshape(-1)
        if self.places.device != t.device:
            self.places = self.places.to(t.device)
        return torch.take(t, self.places)

    def keep(self, t: Tensor) -> Tensor:
        """Return a copy of these entries."""
        return self.look(t).clone() if self.places is None else self.look(t)

    def arrived(self, g: Tensor, through: bool) -> None:
        """Take note of a gradient that is about to be added to ``p.grad``, or to be returned."""
        held = self.p.grad
        new = [self.keep(g)] if through else []
        if held is None or not bool(held.any()):
            self.known = new
        else:
            before = [self.keep(held)] if self._is(held, self.known) else []
            self.known = [*before, *new, *(old + last for old in before for last in new)]

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

    def is_step_by_hand(self, old: Tensor) -> bool:
        """Return whether the weight moved from ``old`` along gradients that went through the defence alone."""
        now = self.look(self.p)
        old = old.to(now)
        return any(self._fits(now - old, [known.to(now)], old, old) for known in self.known)


def foreign_to_releases(traces: dict[str, Trace], gradient: Params) -> list[str]:
    """Return the names whose gradients are not those of a release, but for what is done to all of them or to a tensor.

    Of a tensor with few entries little can be told by itself: it must be as it was left, or have the factor of another.
    """
    some = {n: t for n, t in traces.items() if bool(gradient[n].any())}
    foreign = [n for n, t in some.items() if not t.known]
    if foreign or not some:
        return foreign
    pairs = {n: (t.look(gradient[n]), t.known[-1]) for n, t in some.items()}
    longest = max(pairs.values(), key=lambda pair: len(pair[0]))
    if len(longest[0]) < 2 or len({(now.device, now.dtype) for now, _ in pairs.values()}) > 1:
        return [n for n, pair in pairs.items() if not torch.equal(*pair)]  # any number is another one times something
    if all(is_scaled(*pair, factor_of(*longest)) for pair in pairs.values()):
        return []
    made = {n: (*pair, some[n].look(some[n].p), some[n].start) for n, pair in pairs.items()}
    if is_made_of(*map(torch.cat, zip(*made.values(), strict=True))):
        return []
    factors = [factor_of(*pair) for pair in pairs.values() if len(pair[0]) > _FREE]
    return [
        n
        for n, pair in pairs.items()
        if not any(is_scaled(*pair, factor) for factor in [torch.ones_like(pair[0][0]), *factors])
        and not (len(pair[0]) > _FREE and is_made_of(*made[n]))
    ]
