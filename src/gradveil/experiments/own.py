"""A user's own model and data: what fails inside their function is told in one line, with its name."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.errors import GradveilError, SpecError
from gradveil.models import build
from gradveil.registry import is_import_path

T = TypeVar("T")


def load_dataset(source: str | Dataset | Callable[..., Any], data: str | None) -> Dataset:
    """Return the data set that a name, an object or a user's function gives."""
    return _told("data set", source, lambda: load(source, data))


def make_model(
    source: str | nn.Module | Callable[..., nn.Module], shape: tuple[int, ...], classes: int, seed: int
) -> nn.Module:
    """Return the model that a spec, an object or a user's function gives."""
    return _told("model", source, lambda: build(source, shape, classes, seed=seed))


def _told(what: str, source: Any, make: Callable[[], T]) -> T:
    try:
        return make()
    except GradveilError:
        raise
    except Exception as error:
        if isinstance(source, str) and not is_import_path(source):
            raise  # ours, not the user's
        name = source if isinstance(source, str) else getattr(source, "__name__", repr(source))
        raise SpecError(f"The {what} {name} failed with {type(error).__name__}: {error}") from error
