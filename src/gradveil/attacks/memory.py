"""How much memory a problem takes, measured on one evaluation, and what is done where it does not suffice."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradveil.errors import AttackError, is_out_of_memory

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
