"""``gradveil list``: every registered method with its settings, from the registry."""

import inspect
import textwrap
from functools import partial
from importlib import import_module
from typing import Any

import typer

from gradveil.cli import shared
from gradveil.registry import settings

# kind -> where its registry lives
KINDS = {
    "dataset": "gradveil.data.base:DATASETS",
    "partition": "gradveil.data.partition:PARTITIONS",
    "model": "gradveil.models.base:MODELS",
    "defense": "gradveil.protection.defense:DEFENSES",
    "attack": "gradveil.attacks.base:ATTACKS",
    "loss": "gradveil.losses:LOSSES",
    "engine": "gradveil.federated.engines:ENGINES",
    "aggregator": "gradveil.federated.server:SERVERS",
    "schedule": "gradveil.federated.settings:SCHEDULES",
}


def methods(kind: str) -> list[dict[str, Any]]:
    """Return name, one line and settings of every method of a kind."""
    module, _, name = KINDS[kind].partition(":")
    registry = getattr(import_module(module), name)
    return [
        {
            "kind": kind,
            "name": name,
            "settings": {s.name: s.default for s in settings(cls)},
            "ranges": {s.name: s.range for s in settings(cls) if s.range},
            "about": first_line(cls),
        }
        for name, cls in registry
    ]


def metrics() -> list[dict[str, Any]]:
    """Return name and one line of every metric."""
    found = import_module("gradveil.metrics").METRICS
    return [
        {"kind": "metric", "name": name, "settings": {"better": m.better}, "ranges": {}, "about": m.description}
        for name, m in sorted(found.items())
    ]


def first_line(thing: object) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def everything() -> list[dict[str, Any]]:
    """Return a row for every registered method and metric."""
    return [row for kind in KINDS for row in methods(kind)] + metrics()


def command(
    kind: str = typer.Argument("", show_default="all", help=f"Only this kind: {', '.join(KINDS)} or metric."),
    json: shared.Json = False,
) -> None:
    """Show every method with its settings."""
    rows = [row for row in everything() if kind in ("", row["kind"], row["kind"] + "s")]
    if not rows:
        raise typer.BadParameter(f"no kind is called {kind!r}; known: {', '.join([*KINDS, 'metric'])}")
    if json:
        shared.print_json(rows)
        return
    for part in dict.fromkeys(row["kind"] for row in rows):
        typer.echo(f"{part.upper()}\n")
        typer.echo("".join(_entry(row) for row in rows if row["kind"] == part))


def _entry(row: dict[str, Any]) -> str:
    """Return the name of a method, what it is, and its settings with their defaults and ranges, as plain lines."""
    within = {name: f" ({text})" for name, text in row["ranges"].items()}
    settings = ", ".join(f"{name}={_show(value)}{within.get(name, '')}" for name, value in row["settings"].items())
    paragraphs = [row["about"].replace("``", "'"), *([settings] if settings else [])]
    fill = partial(textwrap.fill, width=shared.width(), initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"  {row['name']}", *(fill(p, break_on_hyphens=False) for p in paragraphs), "\n"])


def _show(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
