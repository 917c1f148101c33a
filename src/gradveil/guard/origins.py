"""Where the gradients and weights of a model came from: through the defence, or past it."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradveil.guard.defense import Place
from gradveil.guard.trace import Bits, Kind, Trace, foreign_to_releases
from gradveil.tree import Params


class Part:
    """Weights that the same optimizer steps on, as they should be: by the sum of their bits."""

    def __init__(self, traces: dict[str, Trace]) -> None:
        self.traces = traces
        self.bits = Bits(trace.p for trace in traces.values())
        self.account()

    def account(self) -> None:
        """Take the weights as they are now."""
        self.sum = self.bits.sum()

    def moved(self) -> bool:
        """Whether the weights are others than they should be."""
        now = self.bits.sum()
        return bool(now != self.sum.to(now.device))

    def explained(self) -> bool:
        """Whether they are where steps by hand on defended gradients lead."""
        return False

    def replace(self, traces: dict[str, Trace]) -> None:
        """Follow other tensors in the place of these."""
        self.traces = {name: traces.get(name, trace) for name, trace in self.traces.items()}
        self.bits = Bits(trace.p for trace in self.traces.values())


class LayerPart(Part):
    """The weight of a defended layer, as it should be: by its values, which may move along known gradients."""

    def __init__(self, traces: dict[str, Trace]) -> None:
        super().__init__(traces)
        self.account()

    @property
    def trace(self) -> Trace:
        """The only one."""
        return next(iter(self.traces.values()))

    def account(self) -> None:
        """Take the weight as it is now."""
        self.values = self.anchor = self.trace.keep(self.trace.p)
        self.version = self.trace.p._version

    def moved(self) -> bool:
        """Whether the weight is another than it should be: after steps by hand it may go back as well."""
        now = self.trace.look(self.trace.p)
        return not torch.equal(now, self.values.to(now)) and not torch.equal(now, self.anchor.to(now))

    def explained(self) -> bool:
        """Whether it is where a step by hand on defended gradients leads; then account for it."""
        if not self.trace.is_step_by_hand(self.values):
            return False
        self.values, self.version = self.trace.keep(self.trace.p), self.trace.p._version
        return True


class Traces:
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
        """Yield each weight with what has to be known of its gradients."""
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
            self.parts += self._parts_of({n: t for n, t in self.by_name.items() if n not in old})
        self.has_passes = any(trace.kind == "pass" for trace in self.by_name.values())

    def _parts_of(self, traces: dict[str, Trace]) -> list[Part]:
        """Return weights in parts: those of layers apart, unless only the step of an optimizer is defended."""
        alone = {n for n, t in traces.items() if t.kind == "layer" and "gradient" not in self.acts_on}
        rest = {name: trace for name, trace in traces.items() if name not in alone}
        return [LayerPart({name: traces[name]}) for name in traces if name in alone] + ([Part(rest)] if rest else [])

    def untie(self) -> None:
        """Take the hooks off the weights."""
        while self.handles:
            self.handles.popitem()[1].remove()

    def begin(self) -> None:
        """A pass or a gradient: from here on steps alone change weights. What they were before came from outside."""
        if self.begun:
            return
        self.begun = True
        self.parts = self._parts_of(self.by_name)
        for name, trace in self.by_name.items():
            trace.begin()
            if trace.kind == "step" and name in self.handles:
                self.handles.pop(name).remove()

    def touched(self) -> list[Part]:
        """Return the parts that torch counted a write to since the last step, which may be a step by hand."""
        layers = (part for part in self.parts if isinstance(part, LayerPart))
        return [part for part in layers if part.trace.p._version != part.version]

    def moved_past(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts that are not what steps on defended gradients made; those may be taken by hand."""
        return [part for part in parts if part.moved() and not part.explained()]

    def held_by(self, optimizer: Optimizer) -> list[Part]:
        """Return the parts that an optimizer steps on."""
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
        """Return those of a module itself."""
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

    def carrier(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight for a defended layer to use, which tells what gradient comes back through it."""
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
        for t in tree_leaves(output):
            for part in [t] if isinstance(t, Tensor) else vars(t).values() if hasattr(t, "__dict__") else ():
                if isinstance(part, Tensor) and part.requires_grad:
                    part.register_hook(partial(self._passes, through))

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
    """Return the number of the backward pass under way, -1 outside of one."""
    return torch._C._current_graph_task_id()
