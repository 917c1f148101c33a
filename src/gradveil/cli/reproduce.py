"""``gradveil reproduce``: the paper's tables and figures, its numbers beside ours, resumable."""

import json as json_module
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gradveil.errors import SpecError

PARTS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def command(
    items: list[str] = typer.Argument(None, help="Items by name, or `all`; without any, the items are listed."),
    scale: str = typer.Option("quick", help="quick: fewer images, rounds and settings; full: the paper's sizes."),
    data: str = typer.Option(None, help="Folder with the data sets (default: GRADVEIL_DATA)."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    seed: int = typer.Option(0, help="One seed for everything."),
    out: Path = typer.Option(Path("runs/reproduce"), help="Folder for the results; one folder an item below it."),
    resume: bool = typer.Option(False, "--resume", help="Continue an earlier run."),
    only: str = typer.Option("*", help="Only the units of work whose name fits this pattern."),
    json: bool = typer.Option(False, "--json", help="Print JSON in place of tables."),
) -> None:
    """Run items of the paper and print what holds and what does not."""
    import torch

    from gradveil.paper.base import ITEMS, Context
    from gradveil.seeds import Seeds

    if scale not in ("quick", "full"):
        raise SpecError(f"--scale {scale!r} is unknown. Give quick or full.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecError(f"--device {device}: no CUDA device is visible here. Leave it out to run on the CPU.")
    if not items:
        for name, cls in ITEMS:
            typer.echo(f"{name:24} {cls.title}")
        return
    names = ITEMS.names() if items == ["all"] else items
    context = Context(data, torch.device(device), cast(Literal["quick", "full"], scale), Seeds(seed))
    for item in [ITEMS.build(name) for name in names]:
        result = run_item(item, context, out / item.spec_name, resume, only, quiet=json)
        typer.echo(json_module.dumps(result, indent=2, ensure_ascii=False)) if json else show(result)


def run_item(item: Any, context: Any, folder: Path, resume: bool, only: str, quiet: bool) -> dict[str, Any]:
    """Do what is not done yet of one item; return and keep its summary."""
    from gradveil.experiments.store import Store, write_atomically
    from gradveil.experiments.toml import dumps
    from gradveil.registry import describe

    config = {"item": describe(item), "scale": context.scale, "seed": context.seeds.seed, "device": str(context.device)}
    store = Store.create(folder, dumps(config), resume)
    with Progress(*PARTS, console=Console(stderr=True), disable=quiet) as progress:
        units = [unit for unit in item.units(context) if fnmatch(unit, only)]
        bar = progress.add_task(item.spec_name, total=len(units), completed=sum(map(store.done, units)))
        for unit in (u for u in units if not store.done(u)):
            progress.update(bar, description=f"{item.spec_name}: {unit}")
            start = time.perf_counter()
            rows = item.run(unit, context)
            seconds = (time.perf_counter() - start) / max(len(rows), 1)
            store.add(unit, [row | {"seconds": round(seconds, 4)} for row in rows])
            progress.advance(bar)
    command = f"gradveil reproduce {describe(item)} --scale {context.scale} --seed {context.seeds.seed}"
    result = {
        "item": item.spec_name,
        "title": item.title,
        "command": command + (f" --device {context.device}" if context.device.type != "cpu" else ""),
        "table": item.summary(store.rows),
        "verdicts": [vars(v) for v in item.verdicts(store.rows)],
        "figure": item.draw(store.rows, folder / item.spec_name),
    }
    write_atomically(folder / "summary.json", json_module.dumps(result, indent=2, ensure_ascii=False).encode())
    return result


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
    for v in result["verdicts"]:
        colour = colours.get(v["status"], "yellow")
        console.print(f"[{colour}]{v['status']}[/{colour}]: {v['claim']} (ours {v['ours']}; rule: {v['rule']})")
