"""Look into any model: find a layer, run the part before it, list the layers in the order they run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as hooks_of_all
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradveil.errors import LayerError, did_you_mean

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")  # state that no gradient step makes


def is_trained(name: str, value: Tensor) -> bool:
    """Return whether a tensor of a state dict is a weight, not a counter or a running statistic."""
    return value.is_floating_point() and not any(fnmatch(name, pattern) for pattern in BUFFERS)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's linear and convolutional layers by path, in registration order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LINEAR)}


def find_layer(model: nn.Module, name: str | None = None) -> str:
    """Return the path of a linear or convolutional layer; ``None``: the last fully connected one."""
    known = linear_layers(model)
    if name is None:
        dense = [path for path, m in known.items() if isinstance(m, nn.Linear)] or list(known)
        if not dense:
            raise LayerError(f"{type(model).__name__} has no linear or convolutional layer to defend.")
        return dense[-1]
    if name not in known:
        raise LayerError(
            f"{type(model).__name__} has no linear or convolutional layer {name!r}. {did_you_mean(name, known)}"
            f"It has: {', '.join(known) or 'none'}. Pass one of these as layer=..., or leave it out to take the last."
        )
    return name


class _Reached(Exception):
    """Raised at the defended layer to skip the rest of the forward pass."""


class _HeldNorm:
    """Two hooks of one batch norm layer: within its forward pass, the batch's statistics are constants in eval mode."""

    def __init__(self) -> None:
        self._own: tuple[bool, Tensor | None, Tensor | None] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        over = [d for d in range(x.ndim) if d != 1]
        dtype = x.dtype if module.weight is None else module.weight.dtype
        buffers = module._buffers
        self._own = (module.training, buffers["running_mean"], buffers["running_var"])
        fixed = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        mean = fixed.mean(over, keepdim=True)
        buffers["running_mean"] = mean.flatten().to(dtype)  # type: ignore[arg-type]
        var = (fixed - mean).square_().mean(over)  # twenty times as fast on a CPU as torch's own function
        buffers["running_var"] = var.to(dtype)  # type: ignore[arg-type]
        module.training = False

    def after(self, module: nn.Module, *_: Any) -> None:
        if self._own is not None:
            module.training, module._buffers["running_mean"], module._buffers["running_var"] = self._own
            self._own = None


@contextmanager
def held_statistics(model: nn.Module) -> Iterator[None]:
    """Within, batch norm that looks at the batch takes its mean and variance as constants, and keeps its buffers."""
    handles = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            held = _HeldNorm()
            handles.append(module.register_forward_pre_hook(held.before, with_kwargs=True))
            handles.append(module.register_forward_hook(held.after, prepend=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def under_transform() -> bool:
    """Whether this runs inside a transform of torch.func (vmap, grad, ...), where tensors stand for others."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def plain_attention() -> Iterator[None]:
    """Within, attention is made of matrix products, which can be differentiated twice and vectorised."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


_CHECKPOINTS = {
    name: getattr(checkpoint, name, None) for name in ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
}


class _PlainCheckpoint:
    """Stands in for the checkpoint that runs its function without gradients, and again in the backward pass."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*_: Any, **__: Any) -> Iterator[None]:
    """Stand in for what wraps a checkpointed function with hooks on the tensors that it saves."""
    yield


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Within, activation checkpointing is off: what it would run again would run with the model's state of then."""
    plain = dict(zip(_CHECKPOINTS, (_PlainCheckpoint, _no_checkpoint), strict=True))
    try:
        for name, original in _CHECKPOINTS.items():
            if original is not None:
                setattr(checkpoint, name, plain[name])
        yield
    finally:
        for name, original in _CHECKPOINTS.items():
            if original is not None:
                setattr(checkpoint, name, original)


_LOOKING: ContextVar[tuple[nn.Module, ...]] = ContextVar("layers whose input is looked for", default=())


def input_of(model: nn.Module, layer: str, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Run the model on x as far as ``layer`` and return that layer's (first) input.

    Batch statistics are held and the random state is left as it was. ``state`` stands in for parameters and
    buffers of these names. A model that writes to its input writes to x.
    """
    caught: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(args[0] if args else next(iter(kwargs.values())))
        raise _Reached

    target, within = find_module(model, layer), _LOOKING.get()
    # Behind the layer's own hooks, which may change its input; before them where one of them asks for this.
    handle = target.register_forward_pre_hook(catch, prepend=target in within, with_kwargs=True)
    token = _LOOKING.set((*within, target))
    devices = [x.device] if x.is_cuda else []
    try:
        with torch.random.fork_rng(devices), held_statistics(model), plain_checkpoints():
            functional_call(model, state, (x,))
    except _Reached:
        return caught[0]
    finally:
        handle.remove()
        _LOOKING.reset(token)
    raise LayerError(f"The forward pass of {type(model).__name__} never reached layer {layer!r}.")


def find_module(model: nn.Module, layer: str) -> nn.Module:
    """Return the module of that path; any module will do, not only linear ones."""
    try:
        return model.get_submodule(layer)
    except AttributeError:
        known = [name for name, _ in model.named_modules() if name]
        raise LayerError(
            f"{type(model).__name__} has no module {layer!r}. {did_you_mean(layer, known)}It has: {', '.join(known)}."
        ) from None


def check_ready(model: nn.Module) -> None:
    """Raise where a lazy layer has no weights yet."""
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise LayerError(f"{lazy[0]!r} of {type(model).__name__} has no values yet. Run the model once on some inputs.")


def copied_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters without gradients, and a copy of every buffer, so that a forward pass may write to it."""
    return {name: p.detach() for name, p in model.named_parameters()} | copied_buffers(model)


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every buffer by name."""
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def prefix(model: nn.Module, layer: str) -> Callable[[Tensor], Tensor]:
    """Return f: x -> r, the input of ``layer``, as a function free of side effects.

    Parameters are detached, buffers are copied, batch statistics are held, and the random state is left
    as it was, so that dropout draws the masks that the caller's own forward pass draws from the same state.
    """
    find_module(model, layer)

    def f(x: Tensor) -> Tensor:
        return input_of(model, layer, x.clone(), copied_state(model))

    return f


def representation(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """Return r (N, ...), the input of ``layer``, without gradients."""
    with torch.no_grad():
        return prefix(model, layer)(x)


def ways_into(output: Any, weights: Sequence[Tensor]) -> tuple[list[int], set[Node]]:
    """Return at how many places each weight enters what a model gave, and all that was done on the way.

    ``output`` is a tensor, a tree of some, or an object that holds some.
    """
    places = {get_gradient_edge(w).node: i for i, w in enumerate(weights)}
    ways = [0] * len(weights)
    todo = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    reached = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node in places:
                ways[places[node]] += 1
            elif node is not None and node not in reached:
                reached.add(node)
                todo.append(node)
    return ways, reached


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in what a model gave: a tensor, a tree of some, or an object that holds some."""
    found = []
    for leaf in tree_leaves(output):
        inside = [leaf] if isinstance(leaf, Tensor) else tree_leaves(dict(getattr(leaf, "__dict__", {})))
        found += [t for t in inside if isinstance(t, Tensor)]
    return found


@dataclass(frozen=True)
class Visit:
    """One layer that ran, and the shapes it saw for one example."""

    path: str
    layer: nn.Module
    input_shape: tuple[int, ...]  # of one example
    output_shape: tuple[int, ...]


@dataclass(frozen=True)
class Visited:
    """The layers in the order they ran; a layer that ran twice is named twice."""

    visits: tuple[Visit, ...]
    output: str | None  # path of the layer whose output is the model's output, untouched

    def paths(self) -> tuple[str, ...]:
        return tuple(visit.path for visit in self.visits)

    def dense(self) -> tuple[Visit, ...]:
        """Return the fully connected layers that ran once, in running order."""
        return tuple(v for v in self.visits if isinstance(v.layer, nn.Linear) and self.paths().count(v.path) == 1)


def trace(model: nn.Module, input_shape: tuple[int, ...]) -> Visited:
    """Run the model on one blank input, leaving it and the random state as they were, and say what ran."""
    visits: list[Visit] = []
    outputs: list[Tensor] = []

    def note(path: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        visits.append(Visit(path, layer, tuple(args[0].shape[1:]), tuple(output.shape[1:])))
        outputs.append(output)

    def hook(path: str) -> Any:
        return lambda layer, args, output: note(path, layer, args, output)

    layers = linear_layers(model)
    handles = [layer.register_forward_hook(hook(path)) for path, layer in layers.items()]
    modes = {module: module.training for module in model.modules()}
    first = next(model.parameters())
    try:
        model.eval()
        with torch.no_grad():
            result = model(torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    same = outputs and isinstance(result, Tensor) and result is outputs[-1]
    return Visited(tuple(visits), visits[-1].path if same else None)


@dataclass(frozen=True)
class Link:
    """One layer of a chain and its path in the model."""

    path: str
    module: nn.Module

    @property
    def has_parameters(self) -> bool:
        """Whether the layer has parameters, so a gradient of its own."""
        return next(self.module.parameters(), None) is not None


def sequential(model: nn.Module, until: str | None = None) -> list[Link] | None:
    """Return the layers in the order they run, or those before the layer ``until``; None where the model is no chain.

    A chain is an ``nn.Sequential`` (nested ones are opened) in which no hook and no replaced ``forward`` could act
    before the end is reached. What the layers themselves are is for the caller to check.
    """
    target = None if until is None else model.get_submodule(until)
    if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
        return None
    links: list[Link] = []
    for link in _opened(model, "", target):
        if link is None:
            return None
        if link.module is target:
            return links
        links.append(link)
    return links if target is None else None


def _opened(module: nn.Module, path: str, target: nn.Module | None) -> Iterator[Link | None]:
    if module is target:
        yield Link(path, module)
    elif (
        module._forward_pre_hooks
        or "forward" in module.__dict__
        or _hooked_on_the_way(module, target)
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        yield None
    elif type(module).forward is not nn.Sequential.forward:
        yield Link(path, module)
    else:
        for name, child in module._modules.items():  # named_children() skips a module that comes twice
            if child is not None:
                yield from _opened(child, f"{path}.{name}" if path else name, target)


def _hooked_on_the_way(module: nn.Module, target: nn.Module | None) -> bool:
    return bool(module._forward_hooks) and not any(part is target for part in module.modules())


@contextmanager
def lifted(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Within, these hooks are off: the model runs, and looks, as if it had none of them."""
    own = [(table, handle.id) for handle in handles if (table := handle.hooks_dict_ref()) is not None]
    tables = {id(table): table for table, _ in own}
    before = [(table, dict(table)) for table in tables.values()]
    for table, number in own:
        table.pop(number, None)
    try:
        yield
    finally:
        for table, hooks in before:
            for number, hook in hooks.items():  # in the order they were, and never without those that stay
                table[number] = hook
                table.move_to_end(number)
