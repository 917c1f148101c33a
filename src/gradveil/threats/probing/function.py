"""A defence as a function of numbers: it is run on any gradient, with any secret, as often as wanted."""

import collections
import copy
import datetime
import hashlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, is_dataclass, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import vjp

from gradveil.defenses.compose import Compose, parts_of
from gradveil.protection.defense import Defense, accounted
from gradveil.protection.records import Held
from gradveil.seeds import Seeds
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Update

Where = Literal["gradient", "update"]
SAME = 1e-3  # numbers that differ by less, relative to their size, are the same but for rounding


@dataclass(frozen=True)
class Secret:
    """All that a run may hang on beside its input: the defence as it is before, and its random numbers."""

    state: Defense
    seed: int
    clock: float | None = None  # the time at which it runs; None: now
    module: "ModuleState | None" = None  # what its file keeps beside it; None: nothing that runs change
    forced: tuple[int, ...] = ()  # the seeds of the generators that it makes; the last of all others; none: its own

    def rng(self) -> Generator:
        """Return the generator that a client hands to the defence."""
        return Generator().manual_seed(self.seed)


_SEED_PYTHON, _SEED_NUMPY = random.seed, np.random.seed  # whatever stands for them meanwhile


@contextmanager
def own_numbers(seed: int) -> Iterator[None]:
    """Within, the process's own random numbers start from a seed; afterwards they stand where they stood."""
    generator = torch.default_generator  # torch.manual_seed takes a millisecond
    kept = generator.get_state(), random.getstate(), np.random.get_state()
    generator.manual_seed(seed)
    _SEED_PYTHON(seed)
    _SEED_NUMPY(seed % 2**32)
    try:
        yield
    finally:
        generator.set_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def _owners(defense: Defense) -> list[Any]:
    """Return the modules and classes that a defence is written in, this library's own left out."""
    classes = {c for part in parts_of(defense) for c in type(part).__mro__}
    classes = {c for c in classes if not c.__module__.startswith(("gradveil.", "builtins"))}
    modules = (sys.modules.get(c.__module__) for c in classes)
    return [*{id(m): m for m in modules if m is not None and m.__name__ not in ("abc", "typing")}.values(), *classes]


_KINDS: tuple[type, ...] = (
    Generator, np.random.Generator, np.random.RandomState, random.Random, itertools.count, list, dict, set,
    bytearray, collections.deque, torch.Tensor, np.ndarray, int, float,
)  # fmt: skip
LARGEST = 100_000  # length of what is kept of a module
_FIRST: dict[int, tuple[Any, dict[str, Any]]] = {}  # by owner: it, and what it held when it was first seen


@dataclass(frozen=True)
class ModuleState:
    """What modules and classes of a defence hold that its runs change: generators, counters, lists."""

    held: tuple[tuple[Any, str, Any], ...] = ()  # owner, name, value

    @classmethod
    def of(cls, defense: Defense, names: "ModuleState | None" = None) -> "ModuleState":
        """Return it as it is now; ``names``: of these alone."""
        if names is not None:
            return cls(tuple((owner, name, copy.deepcopy(vars(owner).get(name))) for owner, name, _ in names.held))
        found = [(owner, name, value) for owner in _owners(defense) for name, value in vars(owner).items()]
        held = ((o, n, v) for o, n, v in found if isinstance(v, _KINDS) and not isinstance(v, bool) and n[:2] != "__")
        return cls(tuple((o, n, kept) for o, n, v in held if (kept := _copied(v)) is not None))

    @classmethod
    def at_first(cls, defense: Defense) -> "ModuleState":
        """Return it as it was when it was first asked for: as a new process has it."""
        for owner in _owners(defense):
            if id(owner) not in _FIRST:
                known = cls.of(defense).held
                _FIRST[id(owner)] = (owner, {name: value for o, name, value in known if o is owner})
        kept = [_FIRST[id(owner)] for owner in _owners(defense)]
        return cls(tuple((owner, name, value) for owner, values in kept for name, value in values.items()))

    def changed(self, later: "ModuleState") -> "ModuleState":
        """Return the part of it that is not the same later."""
        now = {(id(owner), name): value for owner, name, value in later.held}
        return ModuleState(tuple(one for one in self.held if _frozen(one[2]) != _frozen(now.get((id(one[0]), one[1])))))

    def put(self) -> None:
        """Make it so again."""
        for owner, name, value in self.held:
            setattr(owner, name, copy.deepcopy(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | list | dict | set) and len(value) > LARGEST:
        return None
    try:
        return copy.deepcopy(value)
    except Exception:  # it holds what cannot be copied
        return None


def _frozen(value: Any) -> object:
    """Return what tells two values apart."""
    if isinstance(value, Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, torch.Tensor | np.ndarray):
        return np.asarray(value).tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random | np.random.RandomState):
        return repr(value.getstate() if isinstance(value, random.Random) else value.get_state())
    return repr(value)


@contextmanager
def _replaced(defense: Defense, others: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within, names of modules mean something else, also where a defence's own file imported them."""
    known = {id(getattr(owner, name)): other for owner, name, other in others}
    owners = [o for o in _owners(defense) if isinstance(o, ModuleType)]
    if not owners:
        yield
        return
    own = [(o, n, known[id(v)]) for o in owners for n, v in vars(o).items() if id(v) in known]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in (*others, *own)]
    for owner, name, other in (*others, *own):
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _clocks(now: float) -> list[tuple[Any, str, Any]]:
    """Return every clock, at this time."""

    class At(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "At":
            return cls.fromtimestamp(now, tz)

        @classmethod
        def utcnow(cls) -> "At":
            return cls.fromtimestamp(now)

    class Day(datetime.date):
        @classmethod
        def today(cls) -> "Day":
            return cls.fromtimestamp(now)

    up = now - _BOOTED
    made: list[tuple[Any, str, Any]] = [(datetime, "datetime", At), (datetime, "date", Day)]
    for name, value in (("time", now), ("monotonic", up), ("perf_counter", up), ("process_time", up % 100)):
        made.append((time, name, lambda value=value: value))
        made.append((time, f"{name}_ns", lambda value=value: int(value * 1e9)))
    for turn in (time.localtime, time.gmtime, time.ctime):
        made.append((time, turn.__name__, lambda at=None, turn=turn: turn(now if at is None else at)))
    made.append((time, "strftime", lambda form, at=None: _STRFTIME(form, at or time.localtime())))
    return made


_STRFTIME = time.strftime
_BOOTED = time.time() - time.monotonic()


class Seeding:
    """Within, every generator that a defence makes or seeds is noted; or has another seed."""

    def __init__(self, forced: tuple[int, ...] = ()) -> None:
        self.forced, self.seeds = forced, list[int]()

    def noted(self, seed: Any) -> Any:
        """Return the seed to use."""
        if isinstance(seed, int | np.integer):
            self.seeds.append(int(seed))
            return self.forced[: len(self.seeds)][-1] if self.forced else int(seed)
        return seed

    def others(self) -> list[tuple[Any, str, Any]]:
        """Return what stands for the generators' own names meanwhile."""
        noted = self.noted

        class Kind(type(Generator)):  # type: ignore[misc]
            def __instancecheck__(cls, other: object) -> bool:
                return isinstance(other, Generator)

        class Noted(Generator, metaclass=Kind):
            def manual_seed(self, seed: int) -> Generator:
                return super().manual_seed(noted(seed))

        def of(make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda seed=None, *rest, **more: make(noted(seed), *rest, **more)

        made: list[tuple[Any, str, Any]] = [(torch, "Generator", Noted), (torch, "manual_seed", of(torch.manual_seed))]
        made += [(np.random, name, of(getattr(np.random, name))) for name in ("default_rng", "seed")]

        def kind(base: Any) -> Any:  # a class, since others ask whether something is one
            def begun(self: Any, seed: Any = None) -> None:
                base.__init__(self, noted(seed))

            return type(base.__name__, (base,), {"__init__": begun, "__new__": lambda cls, *rest: base.__new__(cls)})

        made += [(np.random, "RandomState", kind(np.random.RandomState)), (random, "Random", kind(random.Random))]
        return [*made, (random, "seed", of(random.seed))]


@contextmanager
def as_client(secret: Secret) -> Iterator[None]:
    """Within, the process is that of a client with this secret."""
    others = [] if secret.clock is None else _clocks(secret.clock)
    others += Seeding(secret.forced).others() if secret.forced else []
    kept = None if secret.module is None else ModuleState.of(secret.state, secret.module)
    with own_numbers(secret.seed), _replaced(secret.state, others):
        try:
            if secret.module is not None:
                secret.module.put()
            yield
        finally:
            if kept is not None:
                kept.put()


def _call(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def aside(run: Callable[..., Any], *args: Any) -> Any:
    """Return what a function gives on a thread of its own, so that its stack does not show who calls."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, run, *args).result()


@dataclass(frozen=True)
class DefenseFunction:
    """What a defence makes of the gradient of a client's one step; numbers go in and out as one vector."""

    like: Update  # what a run is told beside the numbers: learning rate, steps, examples; and the tensors' shapes
    where: Where = "gradient"  # where it acts: on the gradient of a step, or on nothing but the update
    unseen: bool = False  # whether the defence cannot see who calls it

    @property
    def parts(self) -> dict[str, slice]:
        """Where each tensor lies in a vector."""
        ends, found = 0, {}
        for name, value in self.like.gradient.items():
            found[name] = slice(ends, ends + value.numel())
            ends += value.numel()
        return found

    def tree(self, vector: Tensor) -> Params:
        """Return a vector as tensors by name."""
        shapes = {name: value.shape for name, value in self.like.gradient.items()}
        return {name: vector[part].view(shapes[name]) for name, part in self.parts.items()}

    def flat(self, tree: Params) -> Tensor:
        """Return tensors by name as a vector."""
        return torch.cat([tree[name].reshape(-1) for name in self.like.gradient])

    def sent(self, tree: Params, secret: Secret) -> Params:
        """Return what the defence makes of tensors by name; its state is left as it was."""
        return self._act(tree, copy.deepcopy(secret.state), secret)

    def run(self, vector: Tensor, secret: Secret) -> Tensor | None:
        """Return what the defence makes of a vector; None where that is no finite number or fails."""
        try:
            out = self.sent(self.tree(vector), secret)
        except Exception:  # of a gradient that no client has: whatever the defence's code makes of it
            return None
        missing = [name for name in self.like.gradient if name not in out]
        out = out | {name: torch.zeros_like(self.like.gradient[name]) for name in missing}
        flat = self.flat(out).detach().to(vector)
        return flat if bool(flat.sum().isfinite()) else None

    def runs(self, vector: Tensor, secrets: Iterable[Secret]) -> list[Tensor]:
        """Return what it makes of a vector with each secret, where it does not fail."""
        return [out for secret in secrets if (out := self.run(vector, secret)) is not None]

    def after(self, secret: Secret) -> Secret:
        """Return the secret of the next run of the same client."""
        state, module = copy.deepcopy(secret.state), None
        with as_client(secret):
            self._once({name: g.clone() for name, g in self.like.gradient.items()}, state, secret.rng())
            module = None if secret.module is None else ModuleState.of(state, secret.module)
        return replace(secret, state=state, module=module)

    def seeds(self, vector: Tensor, secret: Secret) -> tuple[int, ...]:
        """Return the seeds of all generators that a run makes."""
        watch = Seeding()
        with _replaced(secret.state, watch.others()):
            self.run(vector, secret)
        return tuple(watch.seeds)

    def carried_on(self, vector: Tensor, secret: Secret, count: int = 2) -> list[Tensor]:
        """Return so many runs of the same client, one after the other, by one generator."""
        state, rng = copy.deepcopy(secret.state), secret.rng()
        with as_client(secret):
            return [flatten(self._once(self.tree(vector.clone()), state, rng)).detach() for _ in range(count)]

    def _act(self, tree: Params, state: Defense, secret: Secret) -> Params:
        with as_client(secret):
            return self._once(tree, state, secret.rng())

    def _once(self, tree: Params, state: Defense, rng: Generator) -> Params:
        if self.where == "gradient" and "records" in state.acts_on:
            count = self.like.num_examples
            alike = Held({n: g.expand(count, *g.shape) for n, g in tree.items()})
            tree = accounted(state).on_records(alike, count, rng)
        call = aside if self.unseen else _call
        if self.where == "gradient":
            tree = call(state.on_gradient, tree, rng)
        if self.where == "gradient" and self.like.num_steps > 1:
            return tree  # of one step among several
        sent = call(state.on_update, replace(self.like, gradient=tree), rng).gradient
        return {name: value for name, value in sent.items() if name in self.like.gradient}


def wire_form(update: Update, agreed: Update, model: nn.Module) -> Update:
    """Return an update as it is written down for the server: the agreed numbers in the model's types, and no more.

    Of its tensors those that the model has are kept, and of its buffers; all else is as was agreed.
    """
    kept: dict[str, Tensor] = {**parameters(model), **dict(model.named_buffers())}

    def written(tree: Params) -> Params:
        return {n: v.detach().to(kept[n].dtype, copy=True).contiguous() for n, v in tree.items() if n in kept}

    return replace(agreed, gradient=written(update.gradient), buffers=written(update.buffers))


def beside(update: Update, plain: Update) -> list[str]:
    """Return what an update holds that one of the same client without a defence has not, in words."""
    found, whole = list[str](), sum(g.nbytes + 512 for g in plain.gradient.values())
    more = [n for n in (*update.gradient, *update.buffers) if n not in plain.gradient and n not in plain.buffers]
    if more:
        found.append(f"{len(more)} tensors that the model has not ({more[0]}, ...)")
    kinds: dict[str, str] = {}
    for name, sent in update.gradient.items():
        like = plain.gradient.get(name, sent)
        if sent.dtype != like.dtype:
            kinds.setdefault("type", f"{name} in {str(sent.dtype)[6:]} where {str(like.dtype)[6:]} is agreed")
        elif type(sent) is not Tensor or vars(sent):
            kinds.setdefault("attributes", f"attributes of {name}")
    stores = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in update.gradient.values()}
    if not more and "type" not in kinds and sum(stores.values()) > whole:
        kinds["storage"] = "tensors that are parts of longer storage"
    found += kinds.values()
    for name in ("num_examples", "num_steps", "lr", "batch_size", "rule"):
        if getattr(update, name) != getattr(plain, name):
            found.append(f"{name}={getattr(update, name)} where {getattr(plain, name)} is agreed")
    return found


def close(a: Tensor, b: Tensor, beside: Tensor | None = None) -> bool:
    """Return whether two vectors are the same but for rounding; ``beside``: larger numbers that were added before."""
    lost = 0.0 if beside is None else 1e-6 * float(beside.norm())
    return float((a - b).norm()) <= SAME * float(b.norm()) + lost


def fresh(defense: Defense) -> Defense:
    """Return the defence as a new client has it: the same settings, and nothing remembered."""
    if isinstance(defense, Compose):
        return Compose(tuple(fresh(part) for part in defense.parts))
    return replace(defense) if is_dataclass(defense) else copy.deepcopy(defense)


@dataclass(frozen=True)
class Tried:
    """What a defence is tried on: as a function, with secrets of fresh clients and gradients of public examples."""

    function: DefenseFunction
    secrets: Sequence[Secret]
    examples: Sequence[Tensor]

    def sent(self, vector: Tensor, number: int = 0) -> Tensor:
        """Return what one of the clients sends of a gradient, in a form that slopes go through."""
        return self.function.flat(self.function.sent(self.function.tree(vector), self.secrets[number])).to(vector)


def has_slopes(run: Callable[[Tensor], Tensor], point: Tensor, step: Tensor) -> bool:
    """Return whether torch's derivative of a function says how it moves by a small step."""
    try:
        out, pull = vjp(run, point)[:2]
        moved = (run(point + step) - out).detach()
        along = pull(moved)[0]
    except Exception:  # its code cannot be differentiated
        return False
    size = float(moved.square().sum())  # moved · J step, to first order
    return size > 0 and abs(float((along * step).sum()) - size) <= 0.1 * size


def secrets(
    defense: Defense, seeds: Seeds, count: int, run: Callable[[Secret], object] = lambda secret: None
) -> tuple[Secret, ...]:
    """Return so many secrets of fresh clients, at this time; ``run`` shows what its file keeps from run to run."""
    state, now, first = fresh(defense), time.time(), ModuleState.at_first(defense)
    module = None
    if first.held:
        before = ModuleState.of(defense)
        run(Secret(state, seeds.number("probe", 0), now))
        moved = before.changed(ModuleState.of(defense)).held
        names = {(id(owner), name) for owner, name, _ in moved}
        module = ModuleState(tuple(one for one in first.held if (id(one[0]), one[1]) in names)) if moved else None
    return tuple(Secret(state, seeds.number("probe", i), now, module) for i in range(count))


class Client:
    """The defence of one client: a fresh object, and its file as a new process has it."""

    def __init__(self, defense: Defense) -> None:
        self.defense = fresh(defense)
        self._module = ModuleState.at_first(defense)

    @contextmanager
    def running(self) -> Iterator[Defense]:
        """Within, the file's state is the client's own."""
        before = ModuleState.of(self.defense)
        self._module.changed(before).put()
        try:
            yield self.defense
        finally:
            self._module = ModuleState.of(self.defense)
            before.changed(self._module).put()


def repeated(run: Callable[[Secret], Tensor | None], drawn: Iterable[Secret]) -> tuple[list[Secret], float]:
    """Return one secret for each output that occurs more than once, and how large a part of all runs these are.

    Where none are alike among the first, no more are drawn, nor where no new one comes up for long.
    """
    first: dict[bytes, Secret] = {}
    times: dict[bytes, int] = {}
    latest = 0  # when a new one came up
    for number, secret in enumerate(drawn):
        alone = sum(count == 1 for count in times.values())
        if number >= 64 and (alone == number or number - latest > 3 * len(first) + 64):
            break
        if number >= 512 and 2 * alone > len(times):
            break
        out = run(secret)
        if out is not None:
            key = hashlib.blake2b(out.detach().cpu().numpy().tobytes()).digest()
            latest = latest if key in first else number
            first.setdefault(key, secret)
            times[key] = times.get(key, 0) + 1
    often = [key for key, count in times.items() if count > 1]
    return [first[key] for key in often], sum(times[key] for key in often) / max(sum(times.values()), 1)
