"""A user's own code by its name, ``module:function``: found in the folder of the command, after what is installed."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gradveil.errors import GradveilError, SpecError, is_out_of_memory, own_error

OWN_CODE = "GRADVEIL_OWN_CODE"  # of the environment, so that workers have it: the folder in which a command was given


def is_import_path(text: str) -> bool:
    """Return whether a text names an importable object (``package.module:function``), not a spec."""
    name, colon, rest = text.partition(":")
    return bool(colon) and "=" not in rest and all(part.isidentifier() for part in [*name.split("."), *rest.split(".")])


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
