"""``gradveil reproduce``: the paper's tables and figures, its numbers beside ours, resumable."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradveil.cli import shared
from gradveil.errors import SpecError

if TYPE_CHECKING:
    from gradveil.auditing.run_folder import RunFolder
    from gradveil_studies.paper.base import Context, Item


@dataclass(frozen=True)
class ItemConfig:
    """What the rows of an item depend on."""

    item: str
    scale: str
    seed: int
    device: str


def command(
    items: list[str] = typer.Argument(None, show_default="list them", help="Items by name, or all."),
    scale: str = typer.Option("quick", help="quick: fewer images, rounds and settings; full: the paper's sizes."),
    data: shared.Data = None,
    device: shared.Device = "cpu",
    seed: shared.Seed = 0,
    out: Path = typer.Option(Path("runs/reproduce"), help="Folder for the results; one folder an item below it."),
    resume: shared.Resume = False,
    only: shared.Only = "*",
    jobs: shared.Jobs = None,
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Run items of the paper and print what holds and what does not."""
    from gradveil.seeds import Seeds
    from gradveil.threats.setup import find_device
    from gradveil_studies.paper.base import ITEMS, Context, usual_jobs

    if scale not in ("quick", "full"):
        raise SpecError(f"--scale {scale!r} is unknown. Give quick or full.")
    at = find_device(device)
    if not items:
        listed = [{"item": name, "title": cls.title} for name, cls in ITEMS]
        shared.print_json(listed) if json else typer.echo("\n".join(_listed(**one) for one in listed))
        return
    context = Context(data, at, cast(Literal["quick", "full"], scale), Seeds(seed), out)
    asked = ITEMS.names() if items == ["all"] else [name.partition(":")[0] for name in items]
    ordered = in_order(ITEMS.names() if items == ["all"] else items)
    check_pattern(only, [unit for item in ordered if item.spec_name in asked for unit in item.units(context)])
    made: dict[str, list[dict[str, Any]]] = {}  # rows by item
    results = []
    rest = "*" if only == "*" else ""  # of the items that are only needed: with --only, what is there already
    with shared.running(json or quiet, f"the same items and {shared.resume_with(out)}") as display:
        for item in ordered:
            wanted = item.spec_name in asked
            pattern, go_on = (only, resume) if wanted else (rest, True)
            result = run_item(item, context, out, go_on, pattern, made, display, jobs or usual_jobs(context))
            if wanted:
                results.append(result)
                None if json else show(result)
    if json:
        shared.print_json(results)


def _listed(item: str, title: str) -> str:
    return textwrap.fill(f"{item:18} {title}", shared.width(), subsequent_indent=" " * 19)


def check_pattern(only: str, units: Sequence[str]) -> None:
    """Raise where there are units and none fits."""
    if units and not any(fnmatch(unit, only) for unit in units):
        raise SpecError(f"--only {only!r} fits no unit of work. There are: {', '.join(units[:5])}, ...")


def in_order(specs: Sequence[str]) -> "list[Item]":
    """Return the items of these specs, each once, after the items that it needs."""
    from gradveil_studies.paper.base import ITEMS

    found: dict[str, Item] = {}
    asked = {spec.partition(":")[0]: spec for spec in specs}

    def add(name: str) -> None:
        item = ITEMS.build(asked.get(name, name))
        for other in item.needs:
            add(other)
        found.setdefault(item.spec_name, item)

    for name in asked:
        add(name)
    return list(found.values())


def run_item(
    item: "Item",
    context: "Context",
    out: Path,
    resume: bool,
    only: str,
    made: dict[str, list[dict[str, Any]]],
    display: shared.Display,
    jobs: int = 1,
) -> dict[str, Any]:
    """Do what is not done yet of one item; return and keep its summary, and put its rows into ``made``."""
    from gradveil.auditing.run_folder import RunFolder
    from gradveil.files import write_atomically
    from gradveil.registry import describe

    config = ItemConfig(describe(item), context.scale, context.seeds.seed, str(context.device))
    command = f"gradveil reproduce {config.item} --scale {context.scale} --seed {context.seeds.seed}"
    with RunFolder.start(out / item.spec_name, config, resume) as folder:
        do_units(item, context, folder, only, display, jobs)
        place = {unit: i for i, unit in enumerate(item.units(context))}  # several jobs are done in any order
        made[item.spec_name] = sorted(folder.rows, key=lambda row: place.get(row["unit"], len(place)))
        rows = made[item.spec_name] + [row | {"item": name} for name in item.needs for row in made[name]]
        result = {
            "item": item.spec_name,
            "title": item.title,
            "command": command + (f" --device {context.device}" if context.device.type != "cpu" else ""),
            "table": item.summary(rows),
            "verdicts": [vars(v) for v in item.verdicts(rows)],
            "figure": item.draw(rows, folder.path / item.spec_name),
        }
        text = json.dumps(result, indent=2, ensure_ascii=False)
        write_atomically(folder.path / "summary.json", text.encode())
    return result


def do_units(
    item: "Item", context: "Context", folder: "RunFolder", only: str, display: shared.Display, jobs: int = 1
) -> None:
    """Do the units that fit a pattern and are not done yet; each is kept as soon as its group is done."""
    from gradveil_studies.paper.base import run_groups

    units = [unit for unit in item.units(context) if fnmatch(unit, only)]
    left = [unit for unit in units if not folder.done(unit)]
    done = len(units) - len(left)
    if units:
        display(item.spec_name, done, len(units))
    for rows_of, taken in run_groups(item, item.groups(left, context), context, jobs):
        seconds = taken / max(sum(map(len, rows_of.values())), 1)
        for unit, rows in rows_of.items():
            folder.add(unit, [row | {"seconds": round(seconds, 4)} for row in rows])
            done += 1
            display(item.spec_name, done, len(units), f"{unit} done")


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdicts of one item."""
    console = Console()
    console.print(f"\n[bold]{result['title']}[/bold]\n{result['command']}", highlight=False)
    rows = result["table"]
    if rows:
        table = Table(*rows[0], box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(str(row.get(key, "")) for key in rows[0]))
        console.print(table)
    colours = {"reproduced": "green", "not reproduced": "red"}
    for rule in dict.fromkeys(v["rule"] for v in result["verdicts"]):
        for v in (v for v in result["verdicts"] if v["rule"] == rule):
            colour = colours.get(v["status"], "yellow")
            console.print(f"[{colour}]{v['status']}[/{colour}]: {escape(v['claim'])} (ours {escape(v['ours'])})")
        console.print(f"  rule: {rule}", highlight=False, markup=False)
