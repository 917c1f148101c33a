"""The words of a cipher's stream, and the compiled noise (``gaussian.c``) that is made of them where it was built."""

import os
from ctypes import Structure, byref, c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from gradveil.imports import on_threads, variants_of

CHUNK = 2**16  # bytes of a stream that are made at once, so that they stay near the processor
_ZEROS = bytes(CHUNK)
ABI = 2
WORDS = 16384  # made and used at once, so that they stay near the processor; whole blocks
PIECE = 2**17  # numbers of a thread's turn


class _Noise(Structure):
    """One call, as ``gaussian.c`` has it."""

    _fields_ = (
        ("words", c_void_p), ("sum", c_void_p), ("out", c_void_p), ("count", c_int64), ("std", c_double),
        ("grid", c_double), ("is_double", c_int32),
    )  # fmt: skip


class Stream:
    """The numbers of one key, 64 bits each; of a fresh one where none is given."""

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = Cipher(ChaCha20(os.urandom(32) if key is None else key, bytes(16)), mode=None).encryptor()

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
        view = words.view(np.uint8).data
        for at in range(0, len(view), CHUNK):
            part = view[at : at + CHUNK]
            self._cipher.update_into(memoryview(_ZEROS)[: len(part)], part)


@cache
def variants() -> dict[str, Any]:
    """Return the compiled kernels that this processor can run, the best first."""
    return variants_of(Path(__file__).with_name("_gaussian"), "noise", ABI)


@cache
def library() -> Any:
    """Return the best kernel, or None where there is none."""
    return next(iter(variants().values()), None)


def normals(out: Tensor, std: float) -> None:
    """Fill a vector of float64 with secret noise."""
    _run(None, out, std, 1.0)


def release(total: Tensor, std: float, grid: float) -> Tensor:
    """Return a vector of float32 or float64 with secret noise, on the grid."""
    total, out = total.contiguous(), torch.empty_like(total, memory_format=torch.contiguous_format)
    _run(total, out, std, grid)
    return out


def add(total: Tensor, values: Tensor, grid: float) -> Tensor:
    """Return a vector of float32 or float64 with noise that was drawn before (float64), on the grid."""
    total, values = total.contiguous(), values.contiguous()
    out = torch.empty_like(total, memory_format=torch.contiguous_format)
    where = (c_void_p(t.data_ptr()) for t in (values, total, out))
    library().noise_add(*where, c_int64(len(out)), c_double(grid), c_int32(total.dtype == torch.float64))
    return out


def _run(total: Tensor | None, out: Tensor, std: float, grid: float) -> None:
    run, block, size = library().noise_run, library().noise_block(), out.element_size()
    sums, outs = 0 if total is None else total.data_ptr(), out.data_ptr()
    starts, lock = iter(range(0, len(out), PIECE)), Lock()

    def work() -> None:
        stream, words = Stream(), np.empty(WORDS, np.uint64)  # a key of its own for each thread
        call = _Noise(words.ctypes.data, None, None, 0, std, grid, out.dtype == torch.float64)
        at_call = byref(call)
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            end = min(start + PIECE, len(out))
            for at in range(start, end, WORDS):
                call.count = min(WORDS, end - at)
                stream.fill(words[: -(-call.count // block) * block])
                call.sum, call.out = sums and sums + at * size, outs + at * size
                run(at_call)  # without the interpreter's lock

    pieces = -(-len(out) // PIECE)
    on_threads(work, pieces) if pieces > 1 else work()
