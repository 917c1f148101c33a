"""Provenance of gradients and weights: whether they came through the defence, or past it."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradveil.modules import tensors_in
from gradveil.protection.defense import Place
from gradveil.protection.passes import weight_name, weight_of
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


def fits(value: Tensor, columns: list[Tensor], w: Tensor, start: Tensor, size: Tensor) -> bool:
    """Return whether a vector is made of others and of the gradients of penalties on the weights w."""
    penalties = [w, w - start.to(w), w.sign()]
    if len(w) > _FREE:
        return is_combination(value, columns + penalties, size)
    few = [columns, *([*columns, one] for one in penalties)]  # one at a time: little can be told of few entries
    return any(is_combination(value, some, size) for some in few if len(w) > len(some) + 1 or some == columns)


def is_made_of(now: Tensor, old: Tensor, w: Tensor, start: Tensor) -> bool:
    """Return whether a gradient is another one but for a factor, a limit on its entries, or a penalty on weights w."""
    most = now.abs().max()
    return fits(now, [old], w, start, now) or is_combination(now - old.clamp(-most, most), [], now)


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
        for old in (before.to(now.device) for before in known):
            if torch.equal(old != now, old.isnan() & now.isnan()):
                return True
            if is_made_of(now, old, self.look(self.p), self.start):
                return True
        return False

    def is_penalty(self, g: Tensor, part: Tensor | None = None) -> bool:
        """Return whether a gradient, less a part, is that of a penalty on the weights alone: L1, L2, proximal."""
        whole = self.look(g)
        known = torch.zeros_like(whole) if part is None else self.look(part)
        return fits(whole - known, [], self.look(self.p), self.start, whole.abs() + known.abs())


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


class Part:
    """Weights that the same optimizer steps on, as they should be: by the sum of their bits."""

    def __init__(self, traces: dict[str, Trace]) -> None:
        self.traces = traces
        self.bits = Bits(trace.p for trace in traces.values())
        self.account()

    def account(self) -> None:
        self.sum = self.bits.sum()

    def moved(self) -> bool:
        now = self.bits.sum()
        return bool(now != self.sum.to(now.device))

    def replace(self, traces: dict[str, Trace]) -> None:
        self.traces = {name: traces.get(name, trace) for name, trace in self.traces.items()}
        self.bits = Bits(trace.p for trace in self.traces.values())


class Provenance:
    """The weights that a defence answers for, by name, from the first pass or gradient on.

    For a defence of representations these are the weights of the defended layers: all other gradients go out as they
    are. For a defence of the batch or of the gradient they are all weights that are trained.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], acts_on: frozenset[Place]) -> None:
        self.model, self.layers, self.acts_on = model, tuple(layers), acts_on
        self.by_name: dict[str, Trace] = {}
        self.parts: list[Part] = []
        self.handles: dict[str, RemovableHandle] = {}  # by name of the weight
        self.begun = False
        self._owners: list[tuple[nn.Module, str, Tensor, bool]] = []
        self._layer_parts: tuple[int, dict[str, list[Tensor]]] = (-1, {})  # of the backward pass under way, by name
        self._through: dict[int, bool] = {}  # backward passes: whether all they are of is defended
        self.tie()

    def _kinds(self, old: dict[str, Trace]) -> Iterator[tuple[str, nn.Parameter, Kind]]:
        layers = [f"{layer}." if layer else "" for layer in self.layers]
        own = {f"{prefix}weight" for prefix in layers}
        for name, p in self.model.named_parameters():
            known = old.get(name)
            if known is not None and not isinstance(p, nn.Parameter):
                p = known.p  # another is in its place for a while, as under functional_call
            if not isinstance(p, nn.Parameter) or not (p.requires_grad or known is not None):
                continue
            if "records" in self.acts_on:
                yield name, p, "records"
            elif name in own:
                yield name, p, "layer"
            elif "batch" in self.acts_on or any(_makes_weight(name, prefix) for prefix in layers):
                yield name, p, "pass"
            elif "gradient" in self.acts_on:
                yield name, p, "step"

    def tie(self) -> None:
        """Follow the weights that the model has now; some may be others than before."""
        if self._owners and all(m._parameters.get(n) is p and p.requires_grad == r for m, n, p, r in self._owners):
            return
        self._tie_anew()

    def named(self, held: set[int]) -> dict[str, nn.Parameter]:
        """Return those of the model's parameters whose ids are given, by name."""
        if not held <= self._ids and {id(p) for p in self.model.parameters()} != self._ids:
            self._tie_anew()  # a part is new
        return {name: p for name, p in self._named.items() if id(p) in held}

    def _tie_anew(self) -> None:
        self._named = dict(self.model.named_parameters())
        self._ids = {id(p) for p in self._named.values()}
        owned = [(m, n, p) for m in self.model.modules() for n, p in m._parameters.items() if p is not None]
        self._owners = [(m, n, p, p.requires_grad) for m, n, p in owned]
        self.untie()
        old, self.by_name = self.by_name, {}
        for name, p, kind in self._kinds(old):
            trace = self.by_name[name] = Trace(p, kind)
            if self.begun and name in old and old[name].p.shape == p.shape:  # another tensor in the same place
                trace.known, trace.start = old[name].known, old[name].start
            if p.requires_grad and not (self.begun and kind == "step"):
                self.handles[name] = p.register_hook(partial(self._arrived, name))
        for part in self.parts:
            part.replace(self.by_name)
        if self.begun:
            new = {name: trace for name, trace in self.by_name.items() if name not in old}
            self.parts += [Part(new)] if new else []
        self.has_passes = any(trace.kind == "pass" for trace in self.by_name.values())

    def untie(self) -> None:
        while self.handles:
            self.handles.popitem()[1].remove()

    def begin(self) -> None:
        """A pass or a gradient: from here on steps alone change weights. What they were before came from outside."""
        if self.begun:
            return
        self.begun = True
        self.parts = [Part(self.by_name)] if self.by_name else []
        for name, trace in self.by_name.items():
            trace.begin()
            if trace.kind == "step" and name in self.handles:
                self.handles.pop(name).remove()

    def held_by(self, optimizer: Optimizer) -> list[Part]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = []
        for part in list(self.parts):
            names = [name for name, trace in part.traces.items() if id(trace.p) in held]
            if names and len(names) < len(part.traces) and not part.moved():  # else it stays whole, and is refused
                self.parts.remove(part)
                both = [{n: t for n, t in part.traces.items() if (n in names) == inside} for inside in (True, False)]
                self.parts += (halves := [Part(half) for half in both])
                part = halves[0]
            if names:
                found.append(part)
        return found

    def owned_by(self, module: nn.Module) -> list[Trace]:
        own = {id(p) for p in module._parameters.values()}
        return [trace for trace in self.by_name.values() if id(trace.p) in own]

    def of(self, module: nn.Module) -> list[Part]:
        """Return the parts that have weights of a module itself."""
        own = self.owned_by(module)
        return [part for part in self.parts if any(trace in own for trace in part.traces.values())]

    def load(self, module: nn.Module) -> None:
        """A round begins with the weights that were loaded into a module."""
        self.tie()
        for trace in self.owned_by(module):
            trace.begin()
        for part in self.of(module):
            part.account()

    def foreign(self, gradient: Params) -> list[str]:
        """Return the names whose gradient did not come through the defence, though it should have."""
        traces = {n: t for n, t in self.by_name.items() if n in gradient and t.kind != "step"}
        if "records" in self.acts_on:
            return foreign_to_releases(traces, gradient)
        known = [trace.known[-1] for trace in traces.values() if trace.known]
        if len(known) == len(traces) and (
            not traces or _equal([trace.look(gradient[name]) for name, trace in traces.items()], known)
        ):
            return []
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return [n for n, trace in traces.items() if not trace.known]  # the rest is the mean over processes
        return [name for name, trace in traces.items() if not trace.holds_scaled()]

    def take(self, gradient: Params) -> None:
        """The defence has changed these gradients (for records: copies of them): they are what weights may hold now."""
        for name, g in gradient.items():
            if (trace := self.by_name.get(name)) is not None and trace.kind != "step":
                trace.known = [g.reshape(-1) if trace.kind == "records" else trace.keep(g)]

    # Gradients on their way.

    def carrier(self, layer: str, module: nn.Module) -> Tensor:
        """Return the weight for a defended layer to use, which tells what gradient comes back through it."""
        name, weight = weight_name(layer), weight_of(module)
        if not weight.requires_grad:
            return weight
        alias = weight.view_as(weight)
        trace = self.by_name.get(name)
        if trace is not None and trace.kind == "layer":
            alias.register_hook(partial(self._part, name, trace.p is weight))
        return alias

    def _part(self, name: str, own: bool, g: Tensor) -> None:
        if not own:  # the layer ran with another tensor in place of its weight, as under functional_call
            self.by_name[name].known.append(self.by_name[name].keep(g))
            return
        task = _task()
        if self._layer_parts[0] != task:
            self._layer_parts = (task, {})
        self._layer_parts[1].setdefault(name, []).append(g.detach())

    def mark(self, output: Any, *, through: bool) -> None:
        """A backward pass that comes through this output is defended, or (``through=False``) is not."""
        for t in tensors_in(output):
            if t.requires_grad:
                t.register_hook(partial(self._passes, through))

    def within_defended(self) -> bool:
        """Whether this is inside a backward pass that is defended: checkpointed parts run again there."""
        return self._through.get(_task(), False)

    def _passes(self, through: bool, g: Tensor) -> None:
        task = _task()
        self._through = {t: ok for t, ok in self._through.items() if t > task - 100}
        self._through[task] = through and self._through.get(task, True)

    def _arrived(self, name: str, g: Tensor) -> None:
        if not self.begun:
            self.begin()
        trace = self.by_name[name]
        if trace.kind != "step":
            trace.arrived(g, self._is_defended(name, trace, g))

    def _is_defended(self, name: str, trace: Trace, g: Tensor) -> bool:
        task = _task()
        if trace.kind == "pass":
            return self._through.get(task, False) or trace.is_penalty(g)
        parts = self._layer_parts[1].pop(name, []) if self._layer_parts[0] == task else []
        if len(parts) == 1 and parts[0].data_ptr() == g.data_ptr():
            return True
        return trace.is_penalty(g, torch.stack(parts).sum(0) if parts else None)


def _makes_weight(name: str, prefix: str) -> bool:
    """Whether a parameter is one that a defended layer's weight is made of (weight norm, a parametrization)."""
    return name.startswith(prefix) and name != f"{prefix}weight" and name != f"{prefix}bias"


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two lists of vectors are the same, asked once where they lie on one device."""
    if len(some) > 1 and len({(t.device, t.dtype) for t in some}) == 1:
        return torch.equal(torch.cat(some), torch.cat(others).to(some[0]))
    return all(torch.equal(a, b.to(a.device)) for a, b in zip(some, others, strict=True))


def _task() -> int:
    return torch._C._current_graph_task_id()
