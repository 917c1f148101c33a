"""Worker processes of one thread each: on a CPU they beat both threads and stacked clients."""

import io
import mmap
import os
import pickle
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread, current_thread, main_thread
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from gradveil.data.base import Array, Split
from gradveil.errors import GradveilError
from gradveil.federated.client import Sent
from gradveil.federated.engines import ENGINES, Engine, Job, Pool, World, work
from gradveil.imports import own_code
from gradveil.ranges import Range
from gradveil.tree import Params

Numbers = dict[str, Array]


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Within, processes are started that do not hear Ctrl-C: the one that starts them does, and ends them."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def apart_from_the_folder() -> Iterator[None]:
    """Within, Pythons are started that import nothing from the current folder, where they would look first."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def end_with_parent() -> None:
    """Let this worker process end when the one that started it ends, however it ends: nobody else has work for it."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


@ENGINES.register("processes")
@dataclass(frozen=True)
class Processes(Engine):
    """Several worker processes of one thread each, on the CPU; the same numbers as one after the other.

    The workers import the main module anew: a script that uses this needs ``if __name__ == "__main__":``.
    """

    workers: Annotated[int, Range(1, 1024)] | None = None  # None: one per core

    def start(self, world: World) -> Pool:
        if any(p.device.type != "cpu" for p in world.model.parameters()):
            raise GradveilError("The engine 'processes' works on the CPU. Move the model there, or use 'vectorised'.")
        return _ProcessPool(world, self.workers or available_cores())


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, as text: not every error survives the way between processes."""

    text: str
    known: bool  # an error that a user can mend


class _ProcessPool(Pool):
    def __init__(self, world: World, workers: int) -> None:
        method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
        context = get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["gradveil.federated.processes"])
        content = _pack(replace(world, train=_portable(world.train)))
        self.pipes: list[Connection] = []
        self.workers = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,), daemon=True)  # type: ignore[attr-defined]
            with self._watching(), ignore_sigint(), apart_from_the_folder():
                worker.start()
            theirs.close()
            self.pipes.append(ours)
            self.workers.append(worker)
        with self._watching():
            for pipe in self.pipes:
                pipe.send_bytes(content)

    def train(self, model: nn.Module, jobs: Sequence[Job], lr: float) -> list[Sent]:
        state = _to_numpy(dict(model.named_parameters()) | dict(model.named_buffers()))
        hands = _deal([len(job.indices) for job in jobs], len(self.pipes))
        busy = [(pipe, hand) for pipe, hand in zip(self.pipes, hands, strict=True) if hand]
        sent: dict[int, Sent] = {}
        with self._watching():
            for pipe, hand in busy:
                pipe.send((state, [jobs[i] for i in hand], lr))
            for pipe, hand in busy:
                answer = pipe.recv()
                if isinstance(answer, _Failure):
                    self.close()
                    raise GradveilError(answer.text) if answer.known else RuntimeError(answer.text)
                sent |= dict(zip(hand, map(_restore, answer), strict=True))
        return [sent[i] for i in range(len(jobs))]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self.close()
            raise GradveilError(
                "A worker process ended before its work was done (out of memory, or a script without "
                'if __name__ == "__main__":). Use fewer workers, or the engine sequential.'
            ) from error

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()


def _deal(sizes: Sequence[int], hands: int) -> list[list[int]]:
    """Deal the largest jobs first, each to the hand with least to do."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    load = [0] * hands
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        hand = load.index(min(load))
        dealt[hand].append(i)
        load[hand] += sizes[i]
    return dealt


def _serve(pipe: Connection) -> None:
    """Work until the other end is closed."""
    end_with_parent()
    torch.set_num_threads(1)
    try:
        content = pipe.recv_bytes()
        try:
            with own_code():
                world: World = pickle.loads(content)
            world = replace(world, train=_opened(world.train))
        except Exception:  # told when the first work comes
            pipe.recv()
            pipe.send(_Failure(f"A worker process could not start:\n{traceback.format_exc()}", False))
            return
        places = dict(world.model.named_parameters()) | dict(world.model.named_buffers())
        while True:
            state, jobs, lr = pipe.recv()
            pipe.send(_answer(world, places, state, jobs, lr))
    except (EOFError, ConnectionError):
        return


def _answer(
    world: World, places: Params, state: Numbers, jobs: Sequence[Job], lr: float
) -> list[tuple[Sent, Numbers, Numbers]] | _Failure:
    try:
        answers = []
        for job in jobs:
            with torch.no_grad():
                for name, value in state.items():
                    places[name].copy_(torch.from_numpy(value))
            answers.append(_strip(work(world.model, world, job, lr)))
        return answers
    except GradveilError as error:
        return _Failure(str(error), True)
    except Exception:  # raised again by the server's process
        return _Failure(f"A worker process failed:\n{traceback.format_exc()}", False)


def _strip(sent: Sent) -> tuple[Sent, Numbers, Numbers]:
    empty = Sent(replace(sent.update, gradient={}))
    return empty, _to_numpy(sent.update.gradient), _to_numpy(sent.buffers)


def _restore(answer: tuple[Sent, Numbers, Numbers]) -> Sent:
    empty, gradient, buffers = answer
    return Sent(replace(empty.update, gradient=_to_torch(gradient)), _to_torch(buffers))


def _to_numpy(tree: Params) -> Numbers:
    return {name: value.detach().contiguous().numpy() for name, value in tree.items()}


def _to_torch(tree: Numbers) -> Params:
    return {name: torch.from_numpy(value) for name, value in tree.items()}


@dataclass(frozen=True)
class _File:
    """A memory-mapped array by name, so that it is opened again rather than copied."""

    path: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int

    def __len__(self) -> int:
        return self.shape[0]


def _portable(split: Split) -> Split:
    images = split.images
    if not (isinstance(images, np.memmap) and isinstance(images.base, mmap.mmap)):  # a whole file, not a slice of one
        return split
    return replace(split, images=_File(str(images.filename), images.dtype, images.shape, images.offset))


def _opened(split: Split) -> Split:
    file: Any = split.images
    if not isinstance(file, _File):
        return split
    return replace(split, images=np.memmap(file.path, file.dtype, "r", file.offset, file.shape))


def _pack(world: World) -> bytes:
    out = io.BytesIO()
    try:
        pickle.dump(world, out, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise GradveilError(
            f"The model or the defence cannot be sent to another process ({error}). Use the engine sequential."
        ) from error
    return out.getvalue()
