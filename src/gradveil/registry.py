"""Name -> method, for Python, the command line, TOML, tests and docs.

A method is a frozen dataclass whose fields are its settings. A spec is ``name:key=value,key=value``;
several values of one setting are joined by ``/`` (``layer=fc1/fc2``), several methods by ``+``.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Generic, TypeVar

from gradveil.errors import SpecError, did_you_mean
from gradveil.ranges import check, hints_of, options_of, range_of, read

T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """A parsed spec: a name and the settings given with it, as text."""

    name: str
    settings: dict[str, str]

    def __str__(self) -> str:
        text = ",".join(f"{k}={v}" for k, v in self.settings.items())
        return f"{self.name}:{text}" if text else self.name


def parse(text: str) -> Spec:
    """Read ``name:key=value,key=value``."""
    name, _, rest = text.strip().partition(":")
    settings: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SpecError(
                f"Cannot read {part!r} in {text!r}: a setting is key=value. Example: representation:share=0.4."
            )
        settings[key.strip()] = value.strip()
    return Spec(name, settings)


def split_specs(text: str) -> list[str]:
    """Split ``a:x=1+b:y=2`` at each ``+`` that starts another name (so ``1e+3`` stays whole)."""
    return [part for part in re.split(r"\+(?=[A-Za-z_])", text) if part]


@dataclass(frozen=True)
class Setting:
    """One setting of a method, as ``gradveil list`` shows it."""

    name: str
    default: Any
    type: Any

    @property
    def range(self) -> str:
        """The values that it takes, in words; empty where its type says it."""
        literal = any(typing.get_origin(one) is typing.Literal for one in options_of(self.type))
        return "" if literal else str(range_of(self.type) or "")


class Registry(Generic[T]):
    """The methods of one kind. Scans its package on first use, so that a new file is all that is needed.

    Files of the package are scanned, folders are not: those hold machinery.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package if "." in package else f"gradveil.{package}"
        self._classes: dict[str, type[T]] = {}
        self._scanned = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: make a frozen dataclass known under a name."""

        def remember(cls: type[T]) -> type[T]:
            if name in self._classes and self._classes[name].__qualname__ != cls.__qualname__:
                raise SpecError(f"Two {self.kind}s are called {name!r}: {self._classes[name]} and {cls}.")
            self._classes[name] = cls
            cls.spec_name = name  # type: ignore[attr-defined]
            _check_when_made(cls)
            cls.__doc__ = _Documented(cls.__doc__)  # type: ignore[assignment]
            return cls

        return remember

    def _scan(self) -> None:
        if not self._scanned:
            self._scanned = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(getattr(package, "__path__", ())):  # or all are in one file
                if not module.ispkg:
                    importlib.import_module(f"{self._package}.{module.name}")

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        self._scan()
        return sorted(self._classes)

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        return iter((name, self._classes[name]) for name in self.names())

    def get(self, name: str) -> type[T]:
        """Return the class of that name."""
        self._scan()
        if name not in self._classes:
            hint = did_you_mean(name, self._classes)
            raise SpecError(f"No {self.kind} is called {name!r}. {hint}Known: {', '.join(self.names())}.")
        return self._classes[name]

    def build(self, spec: str | T) -> T:
        """Return the method that a spec describes; an object is returned as it is."""
        if not isinstance(spec, str):
            return spec
        parsed = parse(spec)
        cls = self.get(parsed.name)
        known = {s.name: s for s in settings(cls)}
        values = {}
        for key, text in parsed.settings.items():
            if key not in known:
                has = ", ".join(known) or "none"
                hint = did_you_mean(key, known)
                raise SpecError(
                    f"{self.kind.capitalize()} {parsed.name!r} has no setting {key!r}. {hint}It has: {has}."
                )
            values[key] = read(text, known[key].type, f"{parsed.name}:{key}")
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise SpecError(f"{self.kind.capitalize()} {spec!r}: {error}") from error


def _check_when_made(cls: type) -> None:
    """Let every object of a class check the ranges of its settings."""
    init: Any = cls.__init__  # type: ignore[misc]

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        check(self)

    cls.__init__ = checked  # type: ignore[misc]


class _Documented:
    """A method's docstring with what its settings are below, read off their comments when somebody asks."""

    def __init__(self, text: str | None) -> None:
        self.text = inspect.cleandoc(text or "")

    def __get__(self, _: object, cls: type) -> str:
        said = notes_of(cls)
        listed = [f"    {s.name}: {s.default!r} by default{said.get(s.name, '')}" for s in settings(cls)]
        return "\n".join([self.text, *(["", "Settings:"] if listed else []), *listed])


@cache
def notes_of(cls: type) -> dict[str, str]:
    """Return the comments beside the settings of a method, by name; nothing where its source is not there."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        with suppress(OSError, TypeError):
            notes = re.findall(r"^    (\w+): [^\n]*?  # (.+)$", inspect.getsource(base), re.M)
            found |= {name: f"; {note}" for name, note in notes}
    return found


def settings(cls: type) -> list[Setting]:
    """Return the settings of a method: its dataclass fields."""
    defaults = {f.name: f.default if f.default is not dataclasses.MISSING else None for f in dataclasses.fields(cls)}
    return [Setting(name, defaults[name], kind) for name, kind in hints_of(cls).items()]


def describe(method: object) -> str:
    """Return the spec that builds this method: its name and the settings that differ from the defaults."""
    if isinstance(spec := getattr(method, "spec", None), str):  # made of other methods, which say it better
        return spec
    changed = {}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if field.init and not field.name.startswith("_") and value != field.default:
            changed[field.name] = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return str(Spec(method.spec_name, changed))  # type: ignore[attr-defined]
