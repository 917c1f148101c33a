"""``gradveil list``: every registered method with its settings, from the registry."""

import inspect
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from gradveil.cli import shared
from gradveil.registry import settings

# kind -> where its registry lives
KINDS = {
    "dataset": "gradveil.data.base:DATASETS",
    "partition": "gradveil.data.partition:PARTITIONS",
    "model": "gradveil.models.base:MODELS",
    "defense": "gradveil.defenses.base:DEFENSES",
    "attack": "gradveil.attacks.base:ATTACKS",
    "loss": "gradveil.losses:LOSSES",
    "engine": "gradveil.federated.engines:ENGINES",
    "aggregator": "gradveil.federated.server:SERVERS",
    "schedule": "gradveil.federated.schedules:SCHEDULES",
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
    kind: str = typer.Argument("", help="Only this kind: dataset, model, defense, attack, metric, ..."),
    json: shared.Json = False,
) -> None:
    """Show every method with its settings."""
    kind = "aggregator" if kind in ("server", "servers") else kind
    rows = [row for row in everything() if kind in ("", row["kind"], row["kind"] + "s")]
    if not rows:
        raise typer.BadParameter(f"no kind is called {kind!r}; known: {', '.join([*KINDS, 'metric'])}")
    if json:
        shared.print_json(rows)
        return
    table = Table("kind", "name", "settings (default)", "what it is", box=None, pad_edge=False)
    for row in rows:
        text = " ".join(f"{k}={_show(v)}" for k, v in row["settings"].items())
        text += f"\n[dim]{numbers}[/dim]" if (numbers := say_ranges(row["ranges"])) else ""
        table.add_row(row["kind"], f"[bold]{row['name']}[/bold]", text, row["about"])
    Console().print(table)


def say_ranges(ranges: dict[str, str]) -> str:
    """Return which numbers the settings take, settings of one range together."""
    names: dict[str, list[str]] = {}
    for name, within in ranges.items():
        names.setdefault(within, []).append(name)
    return "; ".join(f"{', '.join(of)} {within}" for within, of in names.items())


def _show(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
