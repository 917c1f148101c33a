"""Code found at run time: a user's own by its name, ``module:function``, and compiled kernels where they were built.

A user's own is looked for in the folder of the command, after what is installed. Kernels are plain C that ctypes loads,
one file for each set of instructions.
"""

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradveil.errors import GradveilError, SpecError, is_out_of_memory, own_error

OWN_CODE = "GRADVEIL_OWN_CODE"  # of the environment, so that workers have it: the folder in which a command was given


def is_import_path(text: str) -> bool:
    """Return whether a text names an importable object (``package.module:function``), not a spec."""
    name, colon, rest = text.partition(":")
    return bool(colon) and "=" not in rest and all(part.isidentifier() for part in [*name.split("."), *rest.split(".")])


class Later:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


@contextmanager
def own_code() -> Iterator[None]:
    """Within, Python finds a user's own modules in the folder in which the command was given, after all others.

    What else lies in that folder is never imported: a run folder may come from somebody else.
    """
    folder = os.environ.get(OWN_CODE, "")
    if not folder or folder in sys.path:
        yield
        return
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


@contextmanager
def calling(what: str, error: type[GradveilError]) -> Iterator[None]:
    """Within, a user's own code is called: what it raises is told in one line, and where."""
    try:
        with own_code():
            yield
    except GradveilError:
        raise
    except Exception as reason:
        if is_out_of_memory(reason):
            raise
        raise error(f"{what}. The error is its own: {own_error(reason)}") from reason


def import_object(path: str) -> Any:
    """Return what ``package.module:name`` names."""
    module_name, _, attribute = path.partition(":")
    try:
        with own_code():
            thing: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise SpecError(f"Cannot import {module_name!r} ({error}). Is it installed, or on PYTHONPATH?") from error
        raise SpecError(f"Cannot import {module_name!r}. The error is its own: {own_error(error)}") from error
    for part in attribute.split("."):
        if not hasattr(thing, part):
            where = getattr(sys.modules[module_name], "__file__", None) or "built in"
            raise SpecError(f"Module {module_name!r} has no {attribute!r}. Give module:function. It lies in {where}.")
        thing = getattr(thing, part)
    return thing


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
    import torch

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
