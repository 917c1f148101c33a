"""Fill docs/results/leaderboard.md from the committed rows; with --check, only compare.

    python tools/leaderboard_page.py --keep runs/leaderboard --machine "two shared CPU cores" --commit 745123a

brings finished runs of `gradveil leaderboard` there first; a unit of work that is there already is replaced.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

import torch
from keep_results import commit_named
from marked_blocks import fill
from paper_results import RESULTS, ROOT, Row, markdown, own_rows, runs, write_runs

from gradveil.auditing.run_folder import VERSIONS, RunFolder
from gradveil.threats.rows import group
from gradveil_studies.leaderboard.board import Leaderboard
from gradveil_studies.leaderboard.entries import BATCHES, ENTRIES, MULTIPLES, PANELS, Panel
from gradveil_studies.leaderboard.standings import Standing, standings, table, tier_table
from gradveil_studies.paper.base import Context

NAME = "leaderboard"
BENCH, ATTACKED = ROOT / "studies" / "bench" / "results", "promise-attacks.json"
DEALT = (
    "{dataset}: {devices} devices of {records} records, {clients} a round, {rounds} rounds, learning rates {lrs}, "
    "{seeds} seeds, {victims} records sought ({newton}; {pairs} pairs to learn from)."
)


def blocks(folder: Path = RESULTS) -> dict[str, str]:
    """Return the parts of the page that are made."""
    rows = own_rows(NAME, folder)
    found = standings(rows)
    parts = []
    for panel in (panel for some in PANELS.values() for panel in some):
        named = {one.defense: one for one in found if one.dataset == panel.dataset}
        mine = [named.get(e.name, Standing(panel.dataset, e.name)) for e in (*ENTRIES, BATCHES)]
        parts += [f"## {panel.dataset}", "", _dealt(panel), ""]
        if not named:
            parts += ["Not run.", ""]
            continue
        parts += [_without(table(mine)), "", *_edges(mine), *_untrained(mine)]
        parts += ["What the strongest server of each tier got (error / blind guess, share picked of 100):", ""]
        parts += [_without(tier_table(mine)), ""]
    made = {"tables": "\n".join(parts).rstrip(), "errors": "\n".join(_errors(found)), "runs": _made(rows, folder)}
    made["promises"] = _promises()
    there = (folder / NAME / f"{NAME}.svg").exists()
    return made | {"figure": f"![What it costs against what is got]({NAME}/{NAME}.svg)" if there else "Not drawn yet."}


def promise_rows() -> list[Row]:
    """Return the rows that `promises.py` priced and `promise_attacks.py` attacked (studies/bench)."""
    priced, sought = (json.loads((BENCH / name).read_text())["rows"] for name in ("promises.json", ATTACKED))
    found = [row | {"dataset": _named(row)} for row in sought]
    for row in priced:
        about = {"kind": "training", "dataset": _named(row), "split": "paper"}
        about |= {"defense": row["defense"], "multiple": 1, "lr": row["choice"][0], "held_out": 0.0}
        found += [about | {"seed": seed, "accuracy": accuracy} for seed, accuracy in enumerate(row["accuracy"])]
    return found


def _named(row: Row) -> str:
    many = ", 1,000 devices" if row["devices"] == 1000 else ""
    return f"{row['dataset']}, {row['model'].partition(':')[0]}{many}"


def _promises() -> str:
    parts = []
    for (dataset,), mine in group(promise_rows(), "dataset").items():
        parts += [f"### {dataset}", "", _without(table(standings(mine))), ""]
    return "\n".join(parts).rstrip()


def _dealt(panel: Panel) -> str:
    lrs = "/".join(f"{panel.lr * m:g}" for m in MULTIPLES)
    told = {name: getattr(panel, name) for name in ("devices", "records", "clients", "rounds", "seeds", "victims")}
    return DEALT.format(dataset=panel.dataset, lrs=lrs, newton=panel.newton, pairs=panel.pairs, **told)


def _without(rows: list[Row]) -> str:
    """Return a table without the data set, which stands above it, and without what no row has."""
    empty = {"data", *(key for key in rows[0] if key == "step" and all(row[key] == "–" for row in rows))}
    return markdown([{key: value for key, value in row.items() if key not in empty} for row in rows])


def _edges(found: list[Standing]) -> list[str]:
    """Say where the best learning rate lies at the end of those that were tried."""
    at = [f"{one.defense} ({split})" for one in found for split, cost in one.costs.items() if cost.edge]
    said = "The rate chosen is the smallest or largest of those tried, so a better one may lie beyond"
    return [f"{said}: {', '.join(at)}.", ""] if at else []


def _untrained(found: list[Standing]) -> list[str]:
    """Say why a defence did not train at any rate."""
    some = [(one, split, why) for one in found for split, why in one.untrained.items() if split not in one.costs]
    return [line for one, split, why in some for line in (f"{one.defense} did not train ({split}): {why}", "")]


def _errors(found: list[Standing]) -> list[str]:
    said = [(one, text) for one in found for text in (*one.beaten, *one.errors)]
    lines = [f"- **error**: {one.defense} on {one.dataset}: {text}." for one, text in said]
    held = any(one.account is not None and one.got for one in found)
    none = "None: no attack got below a certificate." if held else "No certificate has been held against an attack yet."
    return lines or [none]


def _made(rows: list[Row], folder: Path) -> str:
    made, done = runs(NAME, folder), {row["unit"] for row in rows}
    lines = [
        f"- `{run['command']}` ({len(run['units'])} units of work; seed {run['seed']}, {run['date']}, "
        f"{run['machine']}; commit {run['commit']}, {', '.join(run['versions'])})"
        for run in made
    ]
    for scale in PANELS:
        units = Leaderboard().units(_context(scale))
        lines.append(f"- `--scale {scale}`: {len(done & set(units))} of {len(units)} units of work were run.")
    return "\n".join(lines)


def _context(scale: str) -> Context:
    return Context(None, torch.device("cpu"), scale)  # type: ignore[arg-type]


def keep(folder: Path, machine: str, commit: str, into: Path = RESULTS) -> None:
    """Bring the rows of a run folder to the committed ones."""
    store = RunFolder.open(folder)
    config, versions = tomllib.loads(store.config), tomllib.loads((folder / VERSIONS).read_text())
    units = list(dict.fromkeys(row["unit"] for row in store.rows))
    if not units:
        raise SystemExit(f"{folder} holds no finished unit of work.")
    (into / NAME).mkdir(parents=True, exist_ok=True)
    places = [unit for scale in PANELS for unit in Leaderboard().units(_context(scale))]
    merged = [row for row in own_rows(NAME, into) if row["unit"] not in units] + list(store.rows)
    merged.sort(key=lambda row: places.index(row["unit"]) if row["unit"] in places else len(places))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in merged)
    (into / NAME / "rows.jsonl").write_text(text)
    old = [run | {"units": [unit for unit in run["units"] if unit not in units]} for run in runs(NAME, into)]
    device = f" --device {config['device']}" if config["device"] != "cpu" else ""
    entry = {"command": f"gradveil leaderboard --scale {config['scale']} --seed {config['seed']}{device}"}
    entry |= {"scale": config["scale"], "seed": config["seed"], "date": versions.pop("date")[:10], "machine": machine}
    entry |= {"commit": commit, "versions": [f"{k} {v}" for k, v in versions.items()], "units": units}
    write_runs(NAME, [run for run in [*old, entry] if run["units"]], into)
    draw(into)


def draw(into: Path = RESULTS) -> None:
    """Draw what is got against what it costs, of the leaderboard and of the promises."""
    Leaderboard().draw(own_rows(NAME, into) + promise_rows(), into / NAME / NAME)


def main() -> int:
    """Keep what is named, then write the page or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs="*", type=Path, default=[], help="Run folders.")
    parser.add_argument("--machine", default="", help="The kind of machine, in words.")
    parser.add_argument("--commit", default="", help="The commit whose code made the runs.")
    parser.add_argument("--draw", action="store_true", help="Draw the figure anew.")
    parser.add_argument("--check", action="store_true", help="Only compare.")
    given = parser.parse_args()
    for folder in given.keep:
        if not given.machine:
            raise SystemExit("Say on which machine the runs were made (--machine).")
        keep(folder, given.machine, commit_named(given.commit))
    path = RESULTS / f"{NAME}.md"
    if given.draw:
        draw()
    text = fill(path.read_text(), blocks())
    if not given.check:
        path.write_text(text)
        return 0
    same = path.read_text() == text
    print(f"{path.name} is {'what the rows say' if same else 'stale: run `make docs`'}.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
