"""``gradveil leaderboard``: every defence under its strongest server, over the whole run, and what it costs."""

import json as json_
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import typer

from gradveil.cli import shared
from gradveil.errors import SpecError


@dataclass(frozen=True)
class BoardConfig:
    """What the rows depend on."""

    defenses: tuple[str, ...]
    scale: str
    seed: int
    device: str


def command(
    scale: str = typer.Option("quick", help="quick: digits, no data needed; full: MNIST and CIFAR-10, for a GPU."),
    defense: list[str] = typer.Option(
        [], show_default="the usual entries", help="A defence spec, held beside none; as often as needed."
    ),
    data: shared.Data = None,
    device: shared.Device = "cpu",
    seed: shared.Seed = 0,
    out: Path = typer.Option(Path("runs/leaderboard"), help="Folder for the results."),
    resume: shared.Resume = False,
    only: shared.Only = "*",
    jobs: shared.Jobs = None,
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Train, attack and time every defence; print the table, with a certificate that an attack beats as an error."""
    from gradveil.auditing.run_folder import RunFolder
    from gradveil.files import write_atomically
    from gradveil.protection.defense import build
    from gradveil.seeds import Seeds
    from gradveil.threats.setup import find_device
    from gradveil_studies.cli.reproduce import check_pattern, do_units, show
    from gradveil_studies.leaderboard.board import Leaderboard
    from gradveil_studies.leaderboard.standings import short_table, standings, tier_table
    from gradveil_studies.paper.base import Context, usual_jobs

    if scale not in ("quick", "full"):
        raise SpecError(f"--scale {scale!r} is unknown. Give quick or full.")
    for spec in defense:
        build(spec)
    board = Leaderboard(tuple(defense))
    context = Context(data, find_device(device), cast(Literal["quick", "full"], scale), Seeds(seed), out)
    check_pattern(only, board.units(context))
    config = BoardConfig(board.defenses, scale, seed, str(context.device))
    with (
        shared.running(json or quiet, f"the same settings and {shared.resume_with(out)}") as display,
        RunFolder.start(out, config, resume) as folder,
    ):
        do_units(board, context, folder, only, display, jobs or usual_jobs(context))
        place = {unit: i for i, unit in enumerate(board.units(context))}
        rows = sorted(folder.rows, key=lambda row: place[row["unit"]])
        result = {
            "title": board.title,
            "command": f"gradveil leaderboard --scale {scale} --seed {seed}",
            "table": board.summary(rows),
            "tiers": tier_table(standings(rows)),
            "verdicts": [vars(v) for v in board.verdicts(rows)],
            "figure": board.draw(rows, folder.path / "leaderboard"),
        }
        write_atomically(folder.path / "summary.json", json_.dumps(result, indent=2, ensure_ascii=False).encode())
    shared.print_json(result) if json else show(result | {"table": short_table(standings(rows))})
    if result["verdicts"]:
        raise typer.Exit(1)
