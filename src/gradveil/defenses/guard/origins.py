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

from gradveil.defenses.base import Place
from gradveil.defenses.guard.trace import Kind, Trace, checksum
from gradveil.tree import Params


class Traces:
    """The weights that a defence answers for, by name, from the first pass or gradient on.

    For a defence of representations these are the weights of the defended layers: all other gradients go out as they
    are. For a defence of the batch or of the gradient they are all weights that are trained.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], acts_on: frozenset[Place]) -> None:
        self.model, self.layers, self.acts_on = model, tuple(layers), acts_on
        self.by_name: dict[str, Trace] = {}
        self.handles: dict[str, RemovableHandle] = {}  # by name of the weight
        self.begun = False
        self._by_hand = "gradient" not in acts_on  # else only the step of an optimizer is defended
        self._parts: tuple[int, dict[str, list[Tensor]]] = (-1, {})  # of the backward pass under way, by name
        self._through: dict[int, bool] = {}  # backward passes: whether all they are of is defended
        self.tie()

    def _kinds(self) -> Iterator[tuple[str, nn.Parameter, Kind]]:
        """Yield each weight with what has to be known of its gradients."""
        layers = [f"{layer}." if layer else "" for layer in self.layers]
        own = {f"{prefix}weight" for prefix in layers}
        for name, p in self.model.named_parameters():
            known = self.by_name.get(name)
            if known is not None and not isinstance(p, nn.Parameter):
                p = known.p  # in its place for a while, as under functional_call
            if not isinstance(p, nn.Parameter) or not (p.requires_grad or known is not None):
                continue
            if name in own:
                yield name, p, "layer"
            elif "batch" in self.acts_on or any(_makes_weight(name, prefix) for prefix in layers):
                yield name, p, "pass"
            elif "gradient" in self.acts_on:
                yield name, p, "step"

    @property
    def has_passes(self) -> bool:
        """Whether some weight is told by the pass that its gradient came through."""
        return any(trace.kind == "pass" for trace in self.by_name.values())

    def tie(self) -> None:
        """Follow the weights that the model has now; some may be new."""
        now = {name: (p, kind) for name, p, kind in self._kinds()}
        if now.keys() == self.by_name.keys() and all(self.by_name[name].p is p for name, (p, _) in now.items()):
            return
        self.untie()
        old, self.by_name = self.by_name, {}
        for name, (p, kind) in now.items():
            trace = self.by_name[name] = Trace(p, kind)
            if self.begun and name in old and old[name].p.shape == p.shape:  # another tensor in the same place
                before = old[name]
                trace.sum, trace.anchor, trace.known = before.sum, before.anchor, before.known
                trace.values, trace.start = before.values, before.start
            if p.requires_grad and not (self.begun and kind == "step"):
                self.handles[name] = p.register_hook(partial(self._arrived, name))

    def untie(self) -> None:
        """Take the hooks off the weights."""
        while self.handles:
            self.handles.popitem()[1].remove()

    def begin(self) -> None:
        """A pass or a gradient: from here on steps alone change weights. What they were before came from outside."""
        if not self.begun:
            self.begun = True
            self.account(self.by_name, loaded=True)
            for name in [name for name, trace in self.by_name.items() if trace.kind == "step" and name in self.handles]:
                self.handles.pop(name).remove()

    def account(self, names: Iterable[str], *, loaded: bool = False, by_hand: bool = False) -> None:
        """Take these weights as they are now; ``loaded``: a round begins with them."""
        for name in names:
            trace = self.by_name[name]
            trace.account(by_hand=by_hand)
            trace.start = trace.values if loaded else trace.start

    def touched(self) -> bool:
        """Whether torch counted a write to a weight since it was accounted for, and it may be a step by hand."""
        return (
            self.begun and self._by_hand and any(trace.p._version != trace.version for trace in self.by_name.values())
        )

    def moved(self, names: Iterable[str]) -> list[str]:
        """Return those of the weights that are not what steps on defended gradients made, by hand or not."""
        traces = {name: self.by_name[name] for name in names} if self.begun else {}
        sums = {name: checksum(trace.p) for name, trace in traces.items()}
        if not traces or bool((_stacked(sums.values()) == _stacked(t.sum for t in traces.values())).all()):
            return []
        odd = [name for name, trace in traces.items() if int(sums[name]) not in (int(trace.sum), int(trace.anchor))]
        return [name for name in odd if not (self._by_hand and traces[name].steps_by_hand())]

    def held_by(self, optimizer: Optimizer) -> list[str]:
        """Return the names of those that an optimizer steps on."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [name for name, trace in self.by_name.items() if id(trace.p) in held]

    def of(self, module: nn.Module) -> list[str]:
        """Return the names of those that a module has itself."""
        own = {id(p) for p in module._parameters.values()}
        return [name for name, trace in self.by_name.items() if id(trace.p) in own]

    def foreign(self, gradient: Params) -> list[str]:
        """Return the names whose gradient did not come through the defence, though it should have."""
        traces = {n: t for n, t in self.by_name.items() if n in gradient and t.kind != "step"}
        if not traces or bool(_stacked(trace.holds_known() for trace in traces.values()).all()):
            return []
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return [
                name for name, trace in traces.items() if not trace.known
            ]  # the mean over processes, not ours alone
        return [name for name, trace in traces.items() if not trace.holds_scaled()]

    def take(self, gradient: Params) -> None:
        """The defence has changed these gradients: they are what weights may hold now."""
        for name, g in gradient.items():
            if (trace := self.by_name.get(name)) is not None and trace.kind != "step":
                trace.known = [trace.keep(g)]

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
        if self._parts[0] != task:
            self._parts = (task, {})
        self._parts[1].setdefault(name, []).append(g.detach())

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
        self.begin()
        trace = self.by_name[name]
        if trace.kind != "step":
            trace.arrived(g, self._is_defended(name, trace, g))

    def _is_defended(self, name: str, trace: Trace, g: Tensor) -> bool:
        task = _task()
        if trace.kind == "pass":
            return self._through.get(task, False) or trace.is_penalty(g)
        parts = self._parts[1].pop(name, []) if self._parts[0] == task else []
        if len(parts) == 1 and parts[0].data_ptr() == g.data_ptr():
            return True
        return trace.is_penalty(g, torch.stack(parts).sum(0) if parts else None)


def _makes_weight(name: str, prefix: str) -> bool:
    """Whether a parameter is one that a defended layer's weight is made of (weight norm, a parametrization)."""
    return name.startswith(prefix) and name != f"{prefix}weight" and name != f"{prefix}bias"


def _stacked(scalars: Iterable[Tensor]) -> Tensor:
    some = list(scalars)
    return torch.stack(some if len({s.device for s in some}) == 1 else [s.cpu() for s in some])


def _task() -> int:
    """Return the number of the backward pass under way, -1 outside of one."""
    return torch._C._current_graph_task_id()
