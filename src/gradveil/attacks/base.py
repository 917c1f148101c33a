"""What an attack is: from observations to reconstructions, many problems at once, as many as fit into memory."""

import logging
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar, Unpack, get_args

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradveil.countermeasures import Tier
from gradveil.errors import AttackError, is_out_of_memory
from gradveil.gradients.functional import quiet
from gradveil.losses import build as build_loss
from gradveil.modalities import IMAGE, Modality
from gradveil.modules import copied_buffers, copied_state, ways_into
from gradveil.registry import Registry
from gradveil.tree import Params, parameters, size
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update, check_update

Answer = TypeVar("Answer")
LOG = logging.getLogger("gradveil")


class LiveBytes(TorchDispatchMode):
    """Within it, counts the bytes of all tensors that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a computation holds at once, beside what was there before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type != "cuda":
            with LiveBytes() as live:
                run()
            return int(live.peak)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return int(torch.cuda.max_memory_allocated(device)) - int(before)


def in_parts(
    seen: Sequence[object], rngs: Sequence[Generator], size: int, solve: Callable[[slice], list[Answer]]
) -> list[Answer]:
    """Solve so many problems at a time; where memory does not suffice, half as many, from the same draws."""
    solved: list[Answer] = []
    while len(solved) < len(seen):
        part = slice(len(solved), len(solved) + size)
        states = [rng.get_state() for rng in rngs[part]]
        try:
            solved += solve(part)
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(states) == 1:
                raise AttackError(
                    "One update does not fit into memory. Use --device cpu, a smaller model, or fewer examples."
                ) from None
        for rng, state in zip(rngs[part], states, strict=True):  # the error is gone, and what it held
            rng.set_state(state)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = len(states) // 2
        LOG.warning("out of memory with %d updates at once: going on with %d", len(states), size)
    return solved


ATTACKS: Registry["Attack"] = Registry("attack", "attacks")

Kind = Literal["closed form", "list", "planted", "search", "learned"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # how an attack works, from what takes least to what takes most


ModelKind = Literal["small", "dense", "dense with bias", "dense with ReLU", "tokens"]
LARGE = 500_000  # weights beyond which a network is not small: second-order attacks on it take hours on a CPU
NUMBERS = ("image", "table")  # modalities with numbers that a search can follow a slope in


def kinds_of(model: nn.Module) -> set[ModelKind]:
    """Return what attacks tell networks apart by.

    Dense ones begin with a fully connected layer that another follows; of tokens are transformers and low-rank factors.
    """
    leaves = [m for m in model.modules() if not any(m.children())]
    weighted = [i for i, m in enumerate(leaves) if any(True for _ in m.parameters())]
    found: set[ModelKind] = {"small"} if size(parameters(model)) <= LARGE else set()
    first = leaves[weighted[0]] if weighted else None
    if isinstance(first, nn.Linear):
        found |= {"dense with bias"} if first.bias is not None else set()
        found |= {"dense"} if len(weighted) > 1 else set()
        found |= {"dense with ReLU"} if len(weighted) > 1 and isinstance(leaves[weighted[0] + 1], nn.ReLU) else set()
    factors = any("lora_b" in name.lower() for name, p in model.named_parameters() if p.requires_grad)
    if factors or any("attention" in type(module).__name__.lower() for module in model.modules()):
        found.add("tokens")
    return found


@dataclass(frozen=True)
class AppliesTo:
    """A case that an attack is made for; default panels are derived from it, and other cases are not refused."""

    modalities: tuple[str, ...] = NUMBERS
    model: ModelKind | None = None  # None: any
    steps: tuple[float, float] = (1, inf)  # local steps of the client, from and to
    examples: tuple[float, float] = (1, inf)
    signs: bool = False  # also where a client's optimiser keeps the signs of a gradient and not its sizes
    tier: Tier = "oblivious"  # the least that the server must know or do
    default: str | None = None  # its settings in a default panel, "" for its own; None: it is run where it is named
    turn: int = 0  # among those of its kind in a panel, the lowest first

    def fits(self, kinds: set[ModelKind], client: Update, modality: Modality) -> bool:
        """Return whether a client's update is such a case."""
        return (
            modality.spec_name in self.modalities
            and (self.model is None or self.model in kinds)
            and self.steps[0] <= client.num_steps <= self.steps[1]
            and self.examples[0] <= client.num_examples <= self.examples[1]
            and (self.signs or not client.rule.adaptive)
        )


def default_panel(model: nn.Module, client: Update, modality: Modality) -> tuple[str, ...]:
    """Return the attacks to run on such clients by what each declares, those that take least first."""
    kinds, found = kinds_of(model), list[tuple[int, int, str]]()
    for name, cls in ATTACKS:
        fitting = (case for case in cls.applies_to if case.default is not None and case.fits(kinds, client, modality))
        if case := next(fitting, None):
            found.append((KINDS.index(cls.kind), case.turn, f"{name}:{case.default}".rstrip(":")))
    return tuple(spec for _, _, spec in sorted(found))


def is_made_for(attack: str, modality: Modality) -> bool:
    """Return whether an attack, by name or spec, searches for examples of this kind."""
    cls = ATTACKS.get(attack.partition(":")[0])
    return any(modality.spec_name in case.modalities for case in cls.applies_to)


class Like(Protocol):
    """A data set, as far as an attack asks: its shape, and examples of its kind that are no client's."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def modality(self) -> Modality: ...
    @property
    def test(self) -> "PublicSplit": ...
    def fitting_loss(self, wanted: str) -> str: ...
    def outputs(self, loss: str) -> int: ...


class PublicSplit(Protocol):
    """A split of a data set."""

    def sample(self, count: int, rng: Generator) -> Batch: ...


class ServerKnows(TypedDict, total=False):
    """What else a server may know; see ``Observation``."""

    labels: Tensor
    bounds: tuple[float, float]
    prior: GaussianPrior
    weights: Params
    noise: dict[str, float]
    simulate: Callable[[Params], Params]
    client: Callable[[Batch, Generator], Params]
    candidates: Batch
    others: Batch
    rounds: tuple[Observation, ...]


PUBLIC, RANK = 2000, 256  # examples of the kind that a server has, and directions of the prior that it fits to them


def seen_like(
    model: nn.Module, update: Update, like: Like | Batch, loss: str = "cross_entropy", **known: Unpack[ServerKnows]
) -> Observation:
    """Return what a server sees of an update from examples like those of a data set's test split, or of a batch.

    Such examples are public, and a prior is fitted to them where their numbers are no ids.
    """
    modality: Modality = IMAGE
    if isinstance(like, Batch):
        public, told = like, build_loss(loss).of(like.labels)
        with torch.no_grad(), quiet(model):
            outputs = model(like.inputs[:1].to(next(model.parameters())))
        num_classes = told.width(like.labels, outputs.shape[1])
    else:
        public, modality = like.test.sample(PUBLIC, torch.Generator().manual_seed(0)), like.modality
        spec = like.fitting_loss(loss)
        told, num_classes = build_loss(spec).of(public.labels), like.outputs(spec)
    if modality.last == 0 and len(public) > 1:
        known.setdefault("prior", GaussianPrior.fit(public.inputs, rank=RANK))
    shape = tuple(public.inputs.shape[1:])
    seen = Observation(model, update, shape, num_classes, loss=told, public=public, modality=modality)
    return replace(seen, **known)


class Attack(ABC):
    """Settings are the dataclass fields; a call gets a model and the update that was made at it.

    ``attacks.Newton(steps=40)(model, update, like=dataset)``. An attack overrides ``reconstruct``, of one update, or
    ``reconstruct_many``, where many go together.
    """

    spec_name: ClassVar[str]
    kind: ClassVar[Kind] = "search"  # what it is known to take, before anything is timed
    applies_to: ClassVar[tuple[AppliesTo, ...]]

    def __init_subclass__(cls, partial: bool = False) -> None:
        own = {name for base in cls.__mro__[: cls.__mro__.index(Attack)] for name in vars(base)}
        if not partial and not own & {"reconstruct", "reconstruct_many"}:
            raise TypeError(f"{cls.__name__} overrides neither reconstruct nor reconstruct_many.")

    def __call__(
        self,
        model: nn.Module,
        update: Update,
        like: Like | Batch,
        loss: str = "cross_entropy",
        seed: int = 0,
        **known: Unpack[ServerKnows],
    ) -> Reconstruction:
        """Rebuild the inputs behind an update, where examples are like those of a data set, or of a public batch."""
        return self.reconstruct(seen_like(model, update, like, loss, **known), torch.Generator().manual_seed(seed))

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        """Rebuild the inputs behind one update."""
        return self.reconstruct_many([seen], [rng])[0]

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates.

        Each problem draws from its own generator, so that it gives the same answer alone and among others.
        """
        return [self.reconstruct(s, rng) for s, rng in zip(seen, rngs, strict=True)]


class Malicious(Attack, partial=True):
    """An attack that begins before the client trains: the server sends another model in place of the honest one."""

    @abstractmethod
    def plant(
        self,
        model: nn.Module,
        input_shape: tuple[int, ...],
        num_classes: int,
        public: Batch | None,
        rng: Generator,
    ) -> nn.Module:
        """Return the model that the server sends: a changed copy. ``reconstruct_many`` sees updates made at it."""

    def for_client(self, seen: Observation, rng: Generator) -> "Malicious":
        """Return the attack on one client, of which an honest update was seen before; by default all get the same."""
        return self

    def after(self, model: nn.Module, batch: Batch) -> int | None:
        """Return which example of a client's batch it is after at the model that it planted; None: all of them.

        For measuring only: a server does not see the batch.
        """
        return None


def build(spec: str | Attack) -> Attack:
    """Return the attack that a spec describes, e.g. ``dlg:steps=300,restarts=8``."""
    return ATTACKS.build(spec)


def check_seen(seen: Sequence[Observation], for_ids: bool = False, sizes_for: str = "") -> None:
    """Raise unless each update fits its model and shows something to match, and the model can be run again.

    Inputs that are ids of tokens have no derivative, and are refused where an attack is not made for them.
    ``sizes_for``: the attack that needs the sizes of a gradient's entries (see ``refuse_adaptive``).
    """
    for s in seen:
        if s.modality.last and not for_ids:
            raise AttackError("The inputs are ids of tokens, which no search by derivatives finds. Use span or tag.")
        check_update(s.update, s.model)
        if not s.visible:
            raise AttackError("Every tensor of the update has weight 0: there is nothing to match.")
    for s in {id(s.model): s for s in seen}.values():
        _check_model(s)
    if sizes_for:
        refuse_adaptive(seen, sizes_for)


def _check_model(seen: Observation) -> None:
    """Raise unless the model gives one row of logits per example, the same in every run."""
    kind, like = type(seen.model).__name__, next(seen.model.parameters())
    x = torch.full((seen.num_examples, *seen.input_shape), sum(seen.bounds) / 2).to(like)
    devices = [like.device] if like.is_cuda else []
    states = [copied_state(seen.model) for _ in range(2)]
    with torch.no_grad(), quiet(seen.model), torch.random.fork_rng(devices):
        runs = [functional_call(seen.model, state, (x,)) for state in (*states, states[0])]
    if not isinstance(runs[0], Tensor) or len(runs[0]) != len(x) or not seen.loss.fits(runs[0], seen.num_classes):
        what = tuple(runs[0].shape) if isinstance(runs[0], Tensor) else type(runs[0]).__name__
        raise AttackError(
            f"{kind} returns {what} for {len(x)} examples; an attack on {seen.num_classes} classes needs logits of "
            f"shape {(len(x), seen.num_classes)}. Wrap the model so that it returns them."
        )
    if not torch.allclose(runs[0], runs[1], rtol=0.0, atol=0.0, equal_nan=True):
        raise AttackError(
            f"{kind} draws random numbers in its forward pass, beside dropout, and a server does not know the "
            f"client's. Give the attack a model that does not."
        )
    if seen.update.num_steps > 1 and not torch.allclose(runs[0], runs[2], rtol=0.0, atol=0.0, equal_nan=True):
        raise AttackError(
            f"{kind} writes to buffers that its next forward pass reads (spectral norm does), so several local steps "
            f"cannot be run again one by one. Attack an update of one step."
        )


def refuse_adaptive(seen: Sequence[Observation], attack: str) -> None:
    """Raise where a client's optimiser keeps the signs of a gradient and not its sizes, which the attack needs."""
    for s in seen:
        if s.update.rule.adaptive:
            raise AttackError(
                f"{attack} needs the sizes of a gradient's entries, and {s.update.rule.optimizer} divides each by its "
                f"own size. Use gs, fedavg or surrogate."
            )


def check_alone(seen: Observation, layer: str) -> None:
    """Raise where the weight of a layer enters the model at another place too: dW is then not δ rᵀ of the layer."""
    like = next(seen.model.parameters())
    x = torch.zeros(seen.num_examples, *seen.input_shape).to(like)
    weight = seen.model.get_submodule(layer).weight
    if not isinstance(weight, Tensor) or not weight.is_leaf or not weight.requires_grad:
        return
    with torch.enable_grad(), quiet(seen.model):
        ways, _ = ways_into(functional_call(seen.model, copied_buffers(seen.model), (x,)), [weight])
    if ways[0] > 1:
        raise AttackError(
            f"The weight of {layer!r} is used beside its layer as well (tied, or as in F.linear(x, layer.weight)), so "
            f"its gradient does not show the layer's input. Use dlg, gs or newton."
        )


_NOT_SUPPORTED = re.compile(
    r"vmap|atching rule|forward AD|functorch|torch\.func|saved tensor hooks|heckpoint|derivative for"
)


@contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Within, what torch cannot differentiate is refused in one line."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _NOT_SUPPORTED.search(str(error)):
            raise
        raise AttackError(
            f"torch cannot differentiate {type(model).__name__} in the way that this attack needs "
            f"({str(error).splitlines()[0][:120]}). Write that operation in plain ones, or try another attack."
        ) from error


def in_groups(
    seen: Sequence[Observation],
    rngs: Sequence[Generator],
    key: Callable[[Observation], object],
    solve: Callable[[list[Observation], list[Generator]], list[Answer]],
) -> list[Answer]:
    """Solve the observations of each key together; the answers come in the order of the observations."""
    groups: dict[object, list[int]] = {}
    for i, s in enumerate(seen):
        groups.setdefault(key(s), []).append(i)
    solved: dict[int, Answer] = {}
    for members in groups.values():
        answers = solve([seen[i] for i in members], [rngs[i] for i in members])
        solved |= dict(zip(members, answers, strict=True))
    return [solved[i] for i in range(len(seen))]
