"""A defence as a function of numbers: it is run on any gradient, with any secret, as often as wanted."""

import copy
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.func import vjp

from gradveil.defenses.compose import Compose
from gradveil.protection.defense import Defense
from gradveil.protection.records.records import Held
from gradveil.seeds import Seeds
from gradveil.tree import Params, flatten
from gradveil.types import Update

Where = Literal["gradient", "update"]
SAME = 1e-3  # numbers that differ by less, relative to their size, are the same but for rounding


@dataclass(frozen=True)
class Secret:
    """All that a run may hang on beside its input: the defence as it is before, and its random numbers."""

    state: Defense
    seed: int
    clock: float | None = None  # the time at which it runs; None: now

    def rng(self) -> Generator:
        """Return the generator that a client hands to the defence."""
        return Generator().manual_seed(self.seed)


@contextmanager
def own_numbers(seed: int) -> Iterator[None]:
    """Within, the process's own random numbers start from a seed; afterwards they stand where they stood."""
    generator = torch.default_generator  # torch.manual_seed takes a millisecond
    kept = generator.get_state(), random.getstate(), np.random.get_state()
    generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        generator.set_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


@contextmanager
def _at(clock: float | None) -> Iterator[None]:
    """Within, ``time.time()`` is what it is told; None: the time."""
    kept = time.time
    try:
        if clock is not None:
            time.time = lambda: clock
        yield
    finally:
        time.time = kept


@dataclass(frozen=True)
class DefenseFunction:
    """What a defence makes of the gradient of a client's one step; numbers go in and out as one vector."""

    like: Update  # what a run is told beside the numbers: learning rate, steps, examples; and the tensors' shapes
    where: Where = "gradient"  # where it acts: on the gradient of a step, or on nothing but the update

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
        flat = torch.cat([out[name].detach().reshape(-1).to(vector) for name in self.like.gradient])
        return flat if bool(flat.sum().isfinite()) else None

    def after(self, secret: Secret) -> Secret:
        """Return the secret of the next run of the same client."""
        state = copy.deepcopy(secret.state)
        self._act({name: g.clone() for name, g in self.like.gradient.items()}, state, secret)
        return replace(secret, state=state)

    def carried_on(self, vector: Tensor, secret: Secret, count: int = 2) -> list[Tensor]:
        """Return so many runs of the same client, one after the other, by one generator."""
        state, rng = copy.deepcopy(secret.state), secret.rng()
        return [flatten(self._act(self.tree(vector.clone()), state, secret, rng)).detach() for _ in range(count)]

    def _act(self, tree: Params, state: Defense, secret: Secret, rng: Generator | None = None) -> Params:
        rng = secret.rng() if rng is None else rng
        with own_numbers(secret.seed), _at(secret.clock):
            if self.where == "gradient" and "records" in state.acts_on:
                count = self.like.num_examples
                tree = state.on_records(Held({n: g.expand(count, *g.shape) for n, g in tree.items()}), count, rng)
            if self.where == "gradient":
                tree = state.on_gradient(tree, rng)
            if self.where == "gradient" and self.like.num_steps > 1:
                return tree  # of one step among several
            return state.on_update(replace(self.like, gradient=tree), rng).gradient


def close(a: Tensor, b: Tensor, beside: Tensor | None = None) -> bool:
    """Return whether two vectors are the same but for rounding; ``beside``: larger numbers that were added before."""
    lost = 0.0 if beside is None else 1e-6 * float(beside.norm())
    return float((a - b).norm()) <= SAME * float(b.norm()) + lost


def fresh(defense: Defense) -> Defense:
    """Return the defence as a new client has it: the same settings, and nothing remembered."""
    if isinstance(defense, Compose):
        return Compose(tuple(fresh(part) for part in defense.parts))
    return replace(defense) if is_dataclass(defense) else copy.deepcopy(defense)


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


def secrets(defense: Defense, seeds: Seeds, count: int) -> tuple[Secret, ...]:
    """Return so many secrets of fresh clients, at this time."""
    state, now = fresh(defense), time.time()
    return tuple(Secret(state, seeds.number("probe", i), now) for i in range(count))


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
