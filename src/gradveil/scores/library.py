"""The compiled kernel (``lanes.c``, ``gram.c``), where it was built: structures and calls, by ctypes."""

import ctypes
import threading
from ctypes import POINTER, Structure, c_float, c_int32, c_int64
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI = 4
CONVOLUTION, MAX_POOL = 0, 1


class Stage(Structure):
    """One map of the chain, as ``lanes.h`` has it."""

    _fields_ = (
        *((name, c_int32) for name in (
            "kind", "co", "oh", "ow", "ci", "h", "w", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw",
            "in_left", "in_pitch", "out_left", "out_pitch", "blocked", "unused",
        )),
        ("scale_stride", c_int64), ("weight", POINTER(c_float)), ("scale", POINTER(c_float)),
        ("index", POINTER(c_int64)), ("index_stride", c_int64),
    )  # fmt: skip


class Gram(Structure):
    """Where rows stop, and the Gram matrix that gives their norms there, as ``lanes.h`` has it."""

    _fields_ = (
        ("split", c_int32), ("block", c_int32), ("kernel", POINTER(c_float)),
        *((name, POINTER(c_int32)) for name in ("last_y", "first_x", "last_x")),
        ("offset", POINTER(c_int64)), ("matrix_size", c_int64), ("patch_size", c_int64),
        ("matrix", POINTER(c_float)), ("patch", POINTER(c_float)), ("done", POINTER(c_int64)),
    )  # fmt: skip


class Plan(Structure):
    """One call, as ``lanes.h`` has it."""

    _fields_ = (
        *((name, c_int32) for name in ("stages", "examples", "rows", "row_lists", "wants_one", "wants_max")),
        ("stage", POINTER(Stage)), ("row", POINTER(c_int64)), ("kernel", POINTER(c_float)),
        ("two", POINTER(c_float)), ("one", POINTER(c_float)), ("max", POINTER(c_float)),
        ("next", POINTER(c_int64)), ("buffer", c_int64), ("gram", Gram),
    )  # fmt: skip


def lanes() -> int:
    """Return how many rows go together."""
    width: int = library().lanes_width()
    return width


@cache
def library() -> Any:
    """Return the compiled kernel, or None where it was not built, is out of date or was built for another processor."""
    for path in sorted(Path(__file__).parent.glob("_lanes*")):
        try:
            found = ctypes.CDLL(str(path))
            if found.lanes_abi() == ABI and found.lanes_supported():
                found.lanes_run.argtypes = (POINTER(Plan),)
                return found
        except (OSError, AttributeError):
            continue
    return None


def pointer(tensor: Tensor | None) -> Any:
    """Return where a tensor's numbers lie; None for none."""
    if tensor is None:
        return None
    kind: Any = {torch.int64: c_int64, torch.int32: c_int32, torch.float32: c_float}[tensor.dtype]
    return ctypes.cast(tensor.data_ptr(), POINTER(kind))


def run(plan: Plan, pieces: int) -> None:
    """Run a plan on as many threads as torch uses; each call starts its own, so that forked processes are safe."""
    failed: list[int] = []

    def work() -> None:
        failed.append(library().lanes_run(ctypes.byref(plan)))  # without the interpreter's lock

    helpers = [threading.Thread(target=work) for _ in range(min(torch.get_num_threads(), pieces) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if any(failed):
        raise MemoryError("No memory for the buffers of the compiled score kernel.")
