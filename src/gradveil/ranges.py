"""Which numbers a setting takes: said once, in its type, and checked wherever a value is given.

``steps: Count = 300`` is a whole number from 1. A method checks its settings when it is made, from a spec or in Python,
and the settings of a run when they are read from options or from a file. ``read`` is the one reader of all of them.
"""

import dataclasses
import functools
import re
import types
import typing
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

from gradveil.errors import GradveilError, SpecError, did_you_mean

MOST_CLASSES = 10**6  # each has a name and a row of weights
MOST = 10**9  # where a range does not say less or more: far beyond use, and products of it are still finite


@dataclass(frozen=True)
class Range:
    """The numbers from ``least`` to ``most``, with both unless ``above`` or ``below`` leaves one out."""

    least: float
    most: float = MOST
    above: bool = False
    below: bool = False

    def __contains__(self, value: Any) -> bool:
        low, high = value > self.least or (value == self.least and not self.above), value <= self.most
        return bool(low and high and not (self.below and value == self.most))

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'from'} {_number(self.least)}"
        return low if self.most == MOST else f"{low} to {'below ' if self.below else ''}{_number(self.most)}"


class Among(tuple[Any, ...]):
    """The few values that a setting takes."""

    def __str__(self) -> str:
        return f"one of {', '.join(f'{one:g}' if isinstance(one, float) else str(one) for one in self)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) <= MOST else f"{value:g}"


Count = Annotated[int, Range(1)]  # how many, of what there must be
Whole = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
Weight = Annotated[float, Range(0)]  # of a term, where 0 leaves it out
Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, above=True)]
Decay = Annotated[float, Range(0, 1, below=True)]  # of a memory
Between = Annotated[float, Range(0, 1, above=True, below=True)]
Order = Annotated[float, Range(1, inf)]
Norm = Annotated[float, Among((1, 2, inf))]
ClassCount = Annotated[int, Range(1, MOST_CLASSES)]
Seed = Annotated[int, Range(-(2**63), 2**63 - 1)]


def options_of(kind: Any) -> list[Any]:
    """Return the types that a type is made of: ``int | None`` is two."""
    return list(typing.get_args(kind)) if typing.get_origin(kind) in (typing.Union, types.UnionType) else [kind]


def plain(kind: Any) -> tuple[Any, Range | Among | None]:
    """Return a type without its range, and the range."""
    if typing.get_origin(kind) is typing.Literal:
        return kind, Among(typing.get_args(kind))
    if typing.get_origin(kind) is Annotated:
        inner, *rest = typing.get_args(kind)
        return inner, next((one for one in rest if isinstance(one, Range | Among)), None)
    return kind, None


def type_name(kind: Any, listed: bool = False) -> str:
    """Return what to give, in words: ``a whole number from 1``; several are joined, or ``listed``."""
    if typing.get_origin(kind) is tuple:
        one, last = typing.get_args(kind)[0], typing.get_args(kind)[-1]
        many = "several" if last is Ellipsis else f"{len(typing.get_args(kind))}"
        how = f"{many} in a list" if listed else f"join {many} by '/'"
        return f"{type_name(one)}; {how}"
    inner, within = plain(kind)
    if isinstance(within, Among):
        return str(within)
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(inner, str(inner))
    return f"{name} {within}" if within else name


def names_of(kind: Any, listed: bool = False) -> str:
    """Return what to give for a type of several options."""
    return " or ".join(type_name(option, listed) for option in options_of(kind) if option is not type(None))


def hints_of(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's settings by name, with their ranges."""
    return _hints(cls)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: unwrapped(hints[f.name]) for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")}


def unwrapped(kind: Any) -> Any:
    """Return a type without notes of others than a range."""
    if typing.get_origin(kind) is Annotated and not any(
        isinstance(one, Range | Among) for one in typing.get_args(kind)[1:]
    ):
        return typing.get_args(kind)[0]
    return kind


@functools.cache
def range_of(kind: Any) -> Range | Among | None:
    """Return the range of a setting's type, or its few values, or those of what it is a tuple or an option of."""
    for option in options_of(kind):
        inner = typing.get_args(option)[0] if typing.get_origin(option) is tuple else option
        if (within := plain(inner)[1]) is not None:
            return within
    return None


def is_text(text: str) -> bool:
    """Return whether a text can be written to a file and be part of a path."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def check(settings: Any, error: type[GradveilError] = SpecError) -> None:
    """Raise where a setting of a dataclass is none of those it may be, or is a text that no file can hold."""
    cls: type = type(settings)
    what = f"{cls.spec_name}: " if hasattr(cls, "spec_name") else ""
    for name, kind in hints_of(cls).items():
        value = getattr(settings, name)
        values = value if isinstance(value, tuple) else (value,)
        if not all(is_text(one) for one in values if isinstance(one, str)):
            raise error(f"{what}{name}={value!r}: give text without null bytes and lone surrogates.")
        within = range_of(kind)
        if within is None or (value is None and type(None) in options_of(kind)):
            continue
        try:
            fits = all(one in within for one in values)
        except (TypeError, ValueError):  # no number
            fits = False
        if not fits:
            shown = "/".join(map(str, value)) if isinstance(value, tuple) else value
            near = did_you_mean(value, map(str, within)) if isinstance(within, Among) and isinstance(value, str) else ""
            raise error(f"{what}{name}={shown}: {near and near + 'Else '}give {names_of(kind)}.")


_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_FITS = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}  # types of TOML that are good for a field's


def read(value: Any, kind: Any, where: str, typed: bool = False) -> Any:
    """Return a setting's value as its field takes it, from a text; ``typed``: from TOML, where a text is no number."""
    options = options_of(kind)
    if not typed and type(None) in options and value.lower() in {"none", "null"}:
        return None
    for option in options:
        with suppress(ValueError, OverflowError):
            return _read_as(value, option, typed)
    text = str(value) if re.fullmatch(r"[\w.+/-]+", str(value)) else repr(value)
    raise SpecError(f"{where}={text if len(text) <= 200 else f'{text[:200]}...'}: give {names_of(kind, typed)}.")


def _read_as(value: Any, to: Any, typed: bool) -> Any:
    if typing.get_origin(to) is tuple:
        parts, kinds = value if typed else value.split("/"), typing.get_args(to)
        if not isinstance(parts, list) or (kinds[-1] is not Ellipsis and len(parts) != len(kinds)):
            raise ValueError(value)
        return tuple(_read_as(part, kinds[0], typed) for part in parts)
    inner, within = plain(to)
    if typing.get_origin(inner) is typing.Literal:
        found = {str(one): one for one in typing.get_args(inner)}.get(str(value))
    elif inner is bool and not typed:
        found = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(value.lower())
    elif inner not in (bool, int, float, str) or (typed and type(value) not in _FITS[inner]):
        found = None
    else:
        found = inner(value)
    if found is None or (within is not None and found not in within) or not (typed or is_text(value)):
        raise ValueError(value)
    return found
