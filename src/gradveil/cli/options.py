"""Options of the commands, derived from the dataclasses of settings that they fill.

A field of a settings class is an option of every command that takes the class: its type, range and default stand in the
class alone, its words in ``options.toml``. ``--help`` shows the options that a first run needs, ``--help-all`` all.
"""

import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import click
import typer

from gradveil.errors import SpecError
from gradveil.ranges import hints_of, options_of, plain, read, unwrapped

T = TypeVar("T")
Command = Callable[["Given"], None]

OWN = "or module:function that makes your own."
AS_SAID = "as the file says"
SUITS = "what suits the data set"

# field of a settings class -> option, where they differ: an option that is repeated is one thing each time
NAMES = {
    "defenses": "defense", "attacks": "attack", "tiers": "tier", "kinds": "kind", "updates": "update",
    "num_steps": "steps", "num_examples": "examples", "num_classes": "classes",
}  # fmt: skip

# option -> (panel of the help, words)
WORDS: dict[str, tuple[str | None, str]] = {
    name: (panel or None, text)
    for panel, its in tomllib.loads((files("gradveil.cli") / "options.toml").read_text("utf-8")).items()
    for name, text in its.items()
}
# what stands in the help as a default where the field's own says nothing to a reader
SHOWN = {
    "model": SUITS, "data": "$GRADVEIL_DATA", "weights": "the model's own", "attack": "those that suit the model",
    "tier": "all; with --attack the first two", "trained": "where the network is not large",
    "max_examples": "the largest device's", "kind": AS_SAID, "steps": AS_SAID,
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One option: where it differs from what the field and the table of words say."""

    help: str = ""
    panel: str | None = None
    default: str = ""  # in words


@dataclass(frozen=True)
class Output:
    """What a command with a result takes beside its settings."""

    json: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns."""

    target: str | None = None
    categorical: str | None = None
    drop: str | None = None
    by: str | None = None


class Given(dict[str, Any]):
    """The options of one call, by name; those that were not given are None or False."""

    def without(self, *names: str) -> "Given":
        """Return the others."""
        return Given({name: value for name, value in self.items() if name not in names})

    def named(self, *fields: str) -> dict[str, Any]:
        """Return the given ones of some fields."""
        return {f: v for f in fields if (v := self.get(NAMES.get(f, f))) is not None}

    def fill(self, base: T, **also: Any) -> T:
        """Return settings with the options that were given, and ``also`` what a command makes of others."""
        types = hints_of(type(base))
        found = self.named(*types) | {name: value for name, value in also.items() if value is not None}
        return _checked(replace(base, **{n: _as(v, types[n], n) for n, v in found.items()}), found)  # type: ignore[type-var]

    def make(self, cls: type[T], **also: Any) -> T:
        """Return the settings of a class, some of whose fields may have no default."""
        types = hints_of(cls)
        found = self.named(*types) | also
        return _checked(cls(**{n: _as(v, types[n], n) for n, v in found.items()}), found)


def _as(value: Any, kind: Any, name: str) -> Any:
    """Return an option's value as its field takes it."""
    if name == "batch_size" and value == 0 and type(None) in options_of(kind):
        return None
    if name == "input_shape" and isinstance(value, str):
        return read_shape(value)
    return tuple(value) if isinstance(value, list) else value


def _checked(settings: T, names: Iterable[str]) -> T:
    """Return settings; raise where one is none of the words that its field knows and the class has not said so."""
    types = hints_of(type(settings))
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, str) and any(typing.get_origin(one) is typing.Literal for one in options_of(types[name])):
            read(value, types[name], f"--{name.replace('_', '-')}")
    return settings


def read_shape(text: str | None) -> tuple[int, ...] | None:
    """Read ``1x28x28``."""
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise SpecError(f"--input-shape {text!r} cannot be read: give sizes joined by 'x', e.g. 1x28x28.")
    return shape


def takes(*sources: type, first: str, without: str = "", **words: Option) -> Callable[[Command], Callable[..., None]]:
    """Give a command the fields of some dataclasses as options; where two declare one, the first does.

    ``first``: the options that ``--help`` shows, in this order; ``without``: fields that are no options.
    """

    def derived(command: Command) -> Callable[..., None]:
        parameters: dict[str, inspect.Parameter] = {}
        for source in sources:
            noted = typing.get_type_hints(source, include_extras=True)
            for field in hints_of(source):
                name = NAMES.get(field, field)
                if field not in without.split() and name not in parameters:
                    parameters[name] = _parameter(source, field, name, noted[field], words.get(name))
        order = {name: place for place, name in enumerate(first.split())}
        if unknown := order.keys() - parameters.keys():
            raise TypeError(f"{command.__module__} shows options that it does not have: {unknown}")
        chosen = sorted(parameters.values(), key=lambda p: order.get(p.name, len(order)))

        def called(**values: Any) -> None:
            command(Given(values))

        called.__doc__ = command.__doc__
        called.__signature__ = inspect.Signature(chosen)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in chosen}
        called.first = frozenset(order)  # type: ignore[attr-defined]
        return called

    return derived


def _parameter(source: type, field: str, name: str, kind: Any, said: Option | None) -> inspect.Parameter:
    """Return the option of one field."""
    declared = next(f for f in dataclasses.fields(source) if f.name == field)
    panel, text = WORDS.get(name, (None, ""))
    if typing.get_origin(kind) is Annotated:  # a command's own settings say the words with the field
        said = said or next((one for one in typing.get_args(kind) if isinstance(one, Option)), None)
        kind = unwrapped(kind)
    said = said or Option()
    inner = next(option for option in options_of(kind) if option is not type(None))
    type_: Any = plain(inner)[0]
    if typing.get_origin(type_) is typing.Literal:
        type_ = str
    elif typing.get_origin(type_) is tuple:
        type_ = str if field == "input_shape" else list[str]
    required = declared.default is dataclasses.MISSING and not said.default
    flag = type_ is bool and isinstance(declared.default, bool)
    shown = said.default or _in_words(declared.default, name)
    option = typer.Option(
        ... if required else declared.default if flag else None,
        *([f"--{name.replace('_', '-')}"] if flag and not declared.default else []),
        show_default=True if required or flag else shown,
        help=said.help or text,
        rich_help_panel=said.panel or panel,
    )
    if name == "quiet":
        option.param_decls = ("--quiet", "-q")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=type_)


def _in_words(default: Any, name: str) -> str:
    if default in (None, "", ()) or default is dataclasses.MISSING:
        return SHOWN.get(name, "none")
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def with_all(found: click.Command, first: frozenset[str] | None) -> click.Command:
    """Let a command's ``--help`` show what a first run needs, and ``--help-all`` everything."""
    if first is None:
        return found
    others = [p for p in found.params if isinstance(p, click.Option) and p.name not in first]
    whole = found.format_help

    def short(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for one in others:
            one.hidden = True
        try:
            whole(ctx, formatter)
        finally:
            for one in others:
                one.hidden = False

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            found.format_help = whole  # type: ignore[method-assign]
            typer.echo(ctx.get_help())
            ctx.exit()

    found.format_help = short  # type: ignore[method-assign]
    found.params.append(
        typer.core.TyperOption(
            param_decls=["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show,
            show_default=False, help=f"Show this message with {len(others)} more options.",
        )
    )  # fmt: skip
    return found
