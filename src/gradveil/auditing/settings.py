"""A frozen dataclass of settings <-> TOML text: the reader is Python's own, the writer is these few lines."""

import dataclasses
import json
import tomllib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from gradveil.errors import SpecError, did_you_mean
from gradveil.ranges import hints_of
from gradveil.ranges import read as read_setting

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def dumps(values: dict[str, Any]) -> str:
    """Return TOML for a flat table of texts, numbers, truths and lists of these; ``None`` is left out."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items() if value is not None)


def to_toml(settings: Any) -> str:
    """Return the settings of a dataclass as TOML, its own before those it extends, defaults included."""
    declared = [name for cls in type(settings).__mro__ for name in vars(cls).get("__annotations__", {})]
    known = {field.name for field in dataclasses.fields(settings)}
    return dumps({name: getattr(settings, name) for name in dict.fromkeys(declared) if name in known})


def from_toml(cls: type[T], text: str) -> T:
    """Return the dataclass that a TOML text describes; an unknown or mistyped setting is an error."""
    known, values = hints_of(cls), {}
    for key, value in parse(text).items():
        if key not in known:
            raise SpecError(f"No setting is called {key!r}. {did_you_mean(key, known)}Known: {', '.join(known)}.")
        values[key] = read_setting(value, known[key], key, typed=True)
    return cls(**values)


def changes(text: str, settings: Any, free: Collection[str] = ()) -> list[str]:
    """Return what differs between settings and a TOML text of such settings: ``seed was 0, now 1``."""
    before, now = parse(text), parse(to_toml(settings))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed if key not in free]


def find_device(name: str) -> "torch.device":
    """Return the device of a name: cpu, cuda (``cuda:1`` is the second), or auto, which is cuda where there is one."""
    import torch

    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu") and not (kind == "cuda" and (number.isdecimal() or name == "cuda")):
        raise SpecError(f"--device {name}: there is no such device. Give cpu, cuda or auto.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if kind == "cuda" and int(number or 0) >= count:
        found = f"there are {count} CUDA devices" if count else "no CUDA device was found"
        raise SpecError(f"--device {name}: {found}. Use --device cpu.")
    return torch.device(name)


def parse(text: str) -> dict[str, Any]:
    """Return the table of a TOML text."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"The settings are not TOML: {error}.") from error


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
