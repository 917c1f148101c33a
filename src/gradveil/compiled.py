"""Compiled kernels, where they were built: plain C that ctypes loads, one file for each set of instructions."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIANTS = ("avx512", "avx2", "plain")  # the best first; setup.py says what each may use


def variants_of(stem: Path, prefix: str, abi: int) -> dict[str, Any]:
    """Return the compiled kernels that this processor can run, the best first: the same code for other instructions.

    Empty where none was built, or what was built is out of date.
    """
    found = {}
    for path in sorted(stem.parent.glob(f"{stem.name}*"), key=lambda path: _rank(path, stem.name)):
        try:
            kernel = ctypes.CDLL(str(path))
            if kernel[f"{prefix}_abi"]() == abi and kernel[f"{prefix}_supported"]():
                found[path.name.split(".")[0].removeprefix(stem.name).lstrip("_")] = kernel
        except (OSError, AttributeError):
            continue
    return found


def _rank(path: Path, stem: str) -> int:
    """Return how late a file is tried; one that was built for a single machine comes last."""
    return next((k for k, name in enumerate(VARIANTS) if path.name.startswith(f"{stem}_{name}.")), len(VARIANTS))


def on_threads(work: Callable[[], None], pieces: int) -> None:
    """Do work on as many threads as torch uses; each call starts its own, so that forked processes are safe."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    helpers = [threading.Thread(target=guarded) for _ in range(min(torch.get_num_threads(), pieces) - 1)]
    for helper in helpers:
        helper.start()
    guarded()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[0]
