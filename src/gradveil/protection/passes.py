"""A pass in which a defended layer's weight gradient is built from r' in place of r; all else stays as it is."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from gradveil.errors import DefenseError, LayerError
from gradveil.modules import LINEAR, find_layer, lifted, under_transform, ways_into
from gradveil.privacy.noise import Source
from gradveil.protection.defense import Defense, own_draws
from gradveil.tree import named
from gradveil.types import Batch

_PLAIN_FORWARDS = {kind.forward for kind in LINEAR}


def weight_name(layer: str) -> str:
    """Return the name of a layer's weight among the model's parameters."""
    return named(layer, "weight")


def check_layer(model: nn.Module, layer: str) -> None:
    """Raise unless the layer's weight gradient can be rebuilt from another input."""
    module = model.get_submodule(find_layer(model, layer))
    if type(module).forward not in _PLAIN_FORWARDS or "forward" in module.__dict__:
        raise LayerError(
            f"Layer {layer!r} is a {type(module).__name__} with a forward pass of its own; its weight gradient cannot "
            f"be rebuilt from a perturbed input. Defend a plain linear or convolutional layer."
        )
    weight = weight_of(module)
    if not weight.requires_grad:
        raise DefenseError(
            f"The weight of layer {layer!r} is frozen, so it has no gradient to defend. Leave this layer out, or "
            f"unfreeze it before protecting the model."
        )
    shared = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
    if len(shared) > 1:
        raise DefenseError(
            f"The weight of layer {layer!r} is shared ({', '.join(shared)}), so part of its gradient would stay as it "
            f"is. Untie the weights, or defend another layer."
        )


def apply(module: nn.Module, r: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run a plain linear or convolutional layer on r with the given weight and bias."""
    if isinstance(module, nn.Linear):
        return F.linear(r, weight, bias)
    return module._conv_forward(r, weight, bias)  # type: ignore[operator, no-any-return]


def substitute(module: nn.Module, r: Tensor, r_perturbed: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the layer's output on r, whose gradient w.r.t. the weight comes from r' alone.

    ``layer(r; W held) + (layer(r'; W) - the same, held)``: the second term is zero and carries dW = Σ δ r'ᵀ.
    The gradients w.r.t. r and the bias are those of the plain layer. Works for every layer linear in W; ``weight``
    may be a view of the layer's own.
    """
    used = weight_of(module) if weight is None else weight
    out = apply(module, r, used.detach(), module.bias)  # type: ignore[arg-type]
    carrier = apply(module, r_perturbed.detach(), used, None)
    if carrier.requires_grad and not under_transform():  # torch.func keeps the graph of every gradient
        carrier.register_hook(_refuse_second_derivatives)
    return out + (carrier - carrier.detach())


def _refuse_second_derivatives(_: Tensor) -> None:
    """Raise in a backward pass that is to be differentiated: r' is a constant there, and r is not."""
    if torch.is_grad_enabled():
        raise DefenseError(
            "A backward pass with create_graph=True goes through a defended layer, and the derivative of its gradient "
            "would not be that of the model. Take gradient penalties from a model without a guard."
        )


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight that the layer has just run with: a parametrization in train mode may move on at each look."""
    if "parametrizations" not in module._modules:
        return module.weight  # type: ignore[return-value]
    makers = [m for m in module.parametrizations.modules() if m.training]  # type: ignore[union-attr]
    try:
        for maker in makers:
            maker.training = False
        return module.weight  # type: ignore[return-value]
    finally:
        for maker in makers:
            maker.training = True


@dataclass
class Report:
    """Counts over defended training steps. Sums stay on the device until they are read."""

    steps: int = 0  # training passes (or, for defences of the gradient, optimizer steps) that were defended
    skipped: int = 0  # training steps that went out undefended; only where strict=False
    examples: int = 0  # examples in the defended passes
    optimizer_steps: int = 0  # steps taken by optimizers that hold the model's weights
    updates: int = 0  # updates that passed through the defence
    asked: int = 0  # entries that were to be zeroed
    noise: str = "none"  # that a defence drew: secret, simulated (by a seeded generator), or none
    spent: float | None = None  # μ² of Gaussian DP that a record's part in all releases has cost; None: no promise
    _representations: int = field(default=0, repr=False)  # one for each example and defended layer
    _sums: Tensor | None = field(default=None, repr=False)  # (4,) entries removed, live; sum of ||r - r'||_2; unchanged

    def add(self, r: Tensor, r_perturbed: Tensor, asked: int) -> None:
        """Count one representation r (N, ...) and what became of it."""
        both = torch.stack([r.detach(), r_perturbed.detach().to(r.dtype)]).flatten(2)  # (2, N, L)
        (live, kept), moved = both != 0, both[0] - both[1]
        distance = torch.linalg.vector_norm(moved.float(), dim=1).sum()
        counts = torch.stack([live > kept, live]).sum((1, 2), dtype=torch.float64)
        unchanged = moved.any().logical_not() & (counts[1] > 0)
        sums = torch.cat([counts, torch.stack([distance, unchanged])])
        self.asked += asked
        self._representations += len(r)
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums

    @property
    def removed(self) -> int:
        return 0 if self._sums is None else int(self._sums[0])

    @property
    def live(self) -> int:
        """Live entries (r_i ≠ 0) there were."""
        return 0 if self._sums is None else int(self._sums[1])

    @property
    def distance(self) -> float:
        """||r - r'||_2, the mean over examples and defended layers."""
        return 0.0 if self._sums is None else float(self._sums[2]) / self._representations

    @property
    def unchanged(self) -> int:
        """How often the input of a defended layer was left as it was, though it had live entries."""
        return 0 if self._sums is None else int(self._sums[3])

    def summary(self) -> dict[str, float]:
        names = ("steps", "skipped", "examples", "optimizer_steps", "updates", "asked", "removed", "live", "distance")
        counts: dict[str, float] = {name: getattr(self, name) for name in names}
        return counts if self.spent is None else {"spent": self.spent} | counts

    def __str__(self) -> str:
        text = f"{self.steps} steps defended, {self.skipped} not"
        if self.noise == "simulated":
            text += "; simulated noise, which its seed takes off again"
        if self.spent:
            text += f"; spent μ = {self.spent**0.5:.3g} (z_run {self.spent**-0.5:.3g})"
        if self._sums is not None:
            asked = f" of {self.asked} asked" if self.asked else ""
            text += f"; {self.removed} live entries removed{asked} ({self.live} live)"
            text += f"; mean ||r - r'|| {self.distance:.3g}"
        return text


class Rewired(nn.Module):
    """A model's own parts under their own names, entered in another way; copies keep their parts together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self.inner = (model,)  # in a tuple, so that it is no part by itself


Change = Callable[[Tensor], Tensor]  # of examples (N, *shape)


class Changed(Rewired):
    """The model behind a known change of its input."""

    def __init__(self, model: nn.Module, change: Change) -> None:
        super().__init__(model)
        self.held = (change,)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner[0](self.held[0](x))
        return output


_ALONE = tree_flatten(((0,), {}))[1]  # one argument


class Examples:
    """The examples among a model's arguments: every floating point tensor with a row for each of them.

    Several such tensors count as one, their rows side by side.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs  # as most models are called
        self.leaves, self.tree = ([args[0]], _ALONE) if alone else tree_flatten((args, dict(kwargs)))
        floats = [(i, t) for i, t in enumerate(self.leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        given = {i: t for i, t in floats if t.ndim}
        if not given:
            raise DefenseError(
                "The model was called without a floating point tensor, so nothing says how its representation depends "
                "on the input. Token ids cannot be differentiated: call the model with embeddings instead."
            )
        count = len(next(iter(given.values())))
        if odd := [tuple(t.shape) for t in given.values() if t.ndim > 1 and len(t) != count]:
            raise DefenseError(
                f"The model was called with {count} examples and a floating point tensor {odd[0]}, which has not one "
                f"row for each. Give inputs with the examples first; a mask as bool, and a table as a buffer."
            )
        self.parts = {id(t): t for t in given.values() if len(t) == count}  # one that is given twice is one

    @property
    def x(self) -> Tensor:
        """The examples (N, ...), or (N, D) where they are several tensors."""
        first, *others = self.parts.values()
        return torch.cat([t.flatten(1) if t.ndim > 1 else t[:, None] for t in (first, *others)], 1) if others else first

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these examples in place of their own."""
        pieces, mixed = {}, len({t.dtype for t in self.parts.values()}) > 1
        sizes = [t[0].numel() for t in self.parts.values()]
        for stop, size, (at, t) in zip(accumulate(sizes), sizes, self.parts.items(), strict=True):
            own = x if len(sizes) == 1 else x[:, stop - size : stop].reshape(-1, *t.shape[1:])
            pieces[at] = own.to(t.dtype) if mixed else own
        leaves = [pieces.get(id(leaf), leaf) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs

    def changed_by(self, defense: Defense, rng: Source) -> tuple[Tensor, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the examples and arguments as the defence changes them. A guard sees no labels: they are -1."""
        others = [t for t in self.leaves if isinstance(t, Tensor) and not t.is_floating_point() and t.ndim > 1]
        if len(given := [*self.parts.values(), *others]) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in given)
            raise DefenseError(
                f"{defense.spec_name!r} changes one input, and the model was called with several ({shapes}). Join "
                f"them in one tensor, or defend the gradient instead."
            )
        x = self.x
        labels = torch.full((len(x),), -1)
        with own_draws(defense):
            batch = defense.on_batch(Batch(x, labels), rng)
        if batch.inputs.shape != x.shape or not torch.equal(batch.labels, labels):
            raise DefenseError(
                f"{defense.spec_name!r} changes labels or the number of examples, and a guard sees the model's "
                f"inputs only. Use gradveil.step_gradient in your loop instead."
            )
        return batch.inputs, self.arguments(batch.inputs)


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_calls: list[Callable[..., Any]] = [_plainly]


def plain_python(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as plain Python also inside torch.compile."""
    return _calls[-1](function, *args)


def stay_out_of_compiled_graphs() -> None:
    """Make ``plain_python`` do so from now on; not before, since importing the compiler takes a second."""
    if len(_calls) == 1:
        _calls.append(torch.compiler.disable(_plainly))


class OneThread:
    """A hook before every pass of a model, its own looks at itself included; a copy of it begins anew."""

    def __init__(self) -> None:
        self.on = True  # code that was compiled may keep hooks that are gone
        self._at_work: dict[str, threading.Thread] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with; in the middle of another thread's pass hooks are not where they belong."""
        owner = self._at_work.get("thread")
        if self.on and owner is not None and owner is not threading.current_thread() and owner.is_alive():
            raise DefenseError(
                f"Thread {owner.name!r} is at work on this guarded model: it cannot be copied or saved until its pass "
                f"is over. Copy it before the threads start, or let them take turns."
            )
        return {"on": self.on, "_at_work": {}}

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        plain_python(self._take)

    def _take(self) -> None:
        if not self.on:
            return
        me = threading.current_thread()
        owner = self._at_work.setdefault("thread", me)  # looked up and set at once, whatever other threads do
        if owner is not me and owner.is_alive():
            raise DefenseError(
                f"Thread {owner.name!r} is at work on this guarded model, and {me.name!r} called it as well. Give each "
                f"thread a model and a guard of its own (copy.deepcopy, before they start), or let them take turns."
            )
        self._at_work["thread"] = me

    @property
    def is_mine(self) -> bool:
        return self._at_work.get("thread") is threading.current_thread()

    def release(self) -> None:
        self._at_work.clear()


class OfExamples(Rewired):
    """A model as a function of its examples alone, its other arguments held."""

    def __init__(self, model: nn.Module, examples: Examples) -> None:
        super().__init__(model)
        self.examples = examples

    def forward(self, x: Tensor) -> Any:
        args, kwargs = self.examples.arguments(x)
        return self.inner[0](*args, **kwargs)


def random_state(device: torch.device) -> Callable[[], None]:
    """Remember the random state of the CPU and of ``device``; call what is returned to set it again."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


@dataclass
class Pass:
    """One training pass under way."""

    model: nn.Module  # as a function of the examples alone
    x: Tensor  # (N, ...), as the model sees them
    reached: set[str] = field(default_factory=set)  # the defended layers so far
    outputs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # defended layers, and what they gave

    def __post_init__(self) -> None:
        self.x = self.x.detach().clone()  # the model may write to its own
        self.restore = random_state(self.x.device)  # sets the random state that the pass began with
        # Batch norm works with its batch's statistics in training, and writes to none out of it.
        kept = (m for m in self.model.modules() if m._buffers and not isinstance(m, _BatchNorm))
        self.buffers = [(m, name, b.clone()) for m in kept for name, b in m._buffers.items() if b is not None]

    def perturbed(
        self, defense: Defense, layer: str, r: Tensor, rng: Source, report: Report, hooks: Iterable[RemovableHandle]
    ) -> Tensor:
        """Return r' for the layer's inputs r (N, ...), and count what it changed; ``hooks`` are off meanwhile.

        Dropout draws the masks of this very pass, and buffers are as it found them. Scores are computed in full
        precision, also under autocast.
        """
        x, model = self.x, self.model
        if len(r) != len(x):
            raise DefenseError(
                f"Layer {layer!r} got {len(r)} rows for {len(x)} examples, so its rows cannot be told apart by "
                f"example. Defend a layer that keeps the examples in its first dimension."
            )
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
        with (
            lifted(hooks),
            _rewound(self.buffers),
            torch.random.fork_rng([x.device] if x.is_cuda else []),
            torch.autocast(x.device.type, enabled=False),
        ):
            self.restore()
            try:
                with own_draws(defense):
                    changed = defense.perturb(model, layer, x.to(dtype), r.detach(), rng)
            except CheckpointError:
                raise DefenseError(
                    f"Layer {layer!r} lies inside activation checkpointing, which runs it again in the backward pass. "
                    f"Checkpoint the part before the layer only."
                ) from None
        if changed.shape != r.shape:
            raise DefenseError(
                f"{defense.spec_name!r} returned {tuple(changed.shape)} for the representation {tuple(r.shape)} of "
                f"{layer!r}. perturb() must keep the shape."
            )
        report.add(r, changed, defense.asked(model, layer, r))
        return changed.detach().to(r.dtype)

    def used_elsewhere(self, output: Any) -> str | None:
        """Return what to say where a defended weight has another way into the model's output; ``None``: none has."""
        used = {m: w for m, _ in self.outputs if isinstance(w := m.weight, Tensor) and w.is_leaf and w.requires_grad}
        ways, reached = ways_into(output, list(used.values()))
        unused = [m for m, out in self.outputs if out.grad_fn not in reached]
        odd = [m for (m, _), count in zip(used.items(), ways, strict=True) if count - 1 + (m in unused) > 0]
        if not odd:
            return None
        names = [name for name, module in self.model.named_modules() if module in odd]
        return (
            f"The weight of {', '.join(names)} is used beside its layer as well (tied, or as in F.linear(x, "
            f"layer.weight)), so part of its gradient would stay as it is. Untie it, or defend another layer."
        )


@contextmanager
def _rewound(buffers: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    now = [(module, name, module._buffers.get(name)) for module, name, _ in buffers]
    try:
        for module, name, before in buffers:
            module._buffers[name] = before
        yield
    finally:
        for module, name, after in now:
            module._buffers[name] = after
