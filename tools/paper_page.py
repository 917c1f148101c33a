"""Write the pages of docs/results and the README's verdicts from the committed rows; with --check, only compare."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from marked_blocks import fill, write_or_check
from paper_results import RESULTS, ROOT, Row, all_rows, build, judged, markdown, own_rows, runs
from verdict_lines import lines, readme_lines

from gradveil.seeds import Seeds
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, published

README = ROOT / "README.md"

FEW = 8  # units of work that are named where they are missing
BACK = "Part of [the paper, beside ours](paper.md)."
HEAD = """# The paper, beside ours

Sun et al. 2020, *Provable Defense against Privacy Leakage in Federated Learning from Representation Perspective*: every
table and figure, the claims in its text, and our controls, each on a page of its own. These pages are written by
`make docs` from the rows in `docs/results/<item>/rows.jsonl`; no number and no verdict on them is typed in.

- A verdict follows from the rows by the rule beside it: reproduced, not reproduced, reproduced only under a
  condition, or not measured (the control failed, or nothing was run). [All verdicts](verdicts.md) in one table.
- Before the lines that sum up, here and in the README: **Holds** where all verdicts behind a line are *reproduced*,
  **Fails** where all are *not reproduced*, else **Partly**; verdicts on what was not measured are left out.
- Brackets are 95 % intervals over images (bootstrap for means, Wilson for shares); where a row is a training, the
  lowest and highest value over seeds.
- **CIFAR-10 here is a JPEG re-encoding** of the data set: its pixels differ a little from the original's.
- MSE is on pixels in [0, 1], clamped. Where gradveil departs from the paper: [departures](../theory/departures.md).
- An item that has not been run at full size says so and shows no number.
"""


def pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return the text of every page by its name: the index, all verdicts, and one page an item."""
    items = in_order(folder)
    index = [HEAD, "## Items", "", contents(items, folder), "", "## What holds and what does not", "", *lines(folder)]
    verdicts = ["# All verdicts", "", f"{BACK} The rule behind each stands on its page.", "", overview(items, folder)]
    return {
        "paper.md": "\n".join([*index, ""]),
        "verdicts.md": "\n".join([*verdicts, ""]),
        **{f"{item.spec_name}.md": item_page(item, folder) for item in items},
    }


def in_order(folder: Path = RESULTS) -> list[Item]:
    """Return all items in the order of published.toml, what is not in the paper last."""
    items = [build(name, folder) for name in ITEMS.names()]
    place = {key: i for i, key in enumerate(published())}
    return sorted(items, key=lambda item: (place.get(_key(item) or "", len(place)), item.source is not None))


def has_rows(item: Item, folder: Path = RESULTS) -> bool:
    """Return whether there is anything to say: rows of its own, or of all others where it only reads theirs."""
    return all(own_rows(name, folder) for name in ([item.spec_name] if units(item) else item.needs))


def units(item: Item) -> list[str]:
    """Return the units of work of a full run."""
    return item.units(Context(None, torch.device("cpu"), "full", Seeds(0)))


def contents(items: list[Item], folder: Path = RESULTS) -> str:
    """Return one line per item: its page, its title, and how its verdicts went."""
    table = []
    for item in items:
        statuses = [_in_short(v.status) for v in _judged(item, folder)]
        said = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        table.append({"item": _link(item), "what": item.title, "verdicts": said or _unjudged(item, folder)})
    return markdown(table)


def overview(items: list[Item], folder: Path = RESULTS) -> str:
    """Return one line per claim: item, paper, ours, verdict."""
    table = []
    for item in items:
        verdicts = _judged(item, folder)
        if not verdicts:
            empty = {"paper": "", "ours": "", "verdict": _unjudged(item, folder)}
            table.append({"item": f"{_link(item)}: {item.title}", **empty})
        for v in verdicts:
            table.append({"item": f"{_link(item)}: {v.claim}", "paper": v.paper, "ours": v.ours, "verdict": v.status})
    return markdown(table)


def _in_short(status: str) -> str:
    return "reproduced under a condition" if status.startswith("reproduced only") else status


def _link(item: Item) -> str:
    return f"[{item.spec_name}]({item.spec_name}.md)"


def _judged(item: Item, folder: Path) -> tuple[Judgement, ...]:
    return judged(item, folder) if has_rows(item, folder) else ()


def _unjudged(item: Item, folder: Path) -> str:
    return "no verdict: a table" if has_rows(item, folder) else "not run at full size yet"


def item_page(item: Item, folder: Path = RESULTS) -> str:
    """Return all there is on one item."""
    name = item.spec_name
    lines = [f"# {name}", "", f"**{item.title}**", "", *_figure(item, folder), f"{BACK}", "", *_paper(item)]
    if not has_rows(item, folder):
        return "\n".join([*lines, "Ours: not run at full size yet.", "", *_choices(item), *_rerun(item, [], folder)])
    rows = all_rows(item, folder)
    lines += [_extent(item, folder), "", markdown(item.summary(rows)), "", *_verdicts(judged(item, folder))]
    return "\n".join([*lines, *_choices(item), *_rerun(item, runs(name, folder), folder)])


def _figure(item: Item, folder: Path) -> list[str]:
    """Return the figure, with which a page begins; nothing where the item is a table."""
    path = f"{item.spec_name}/{item.spec_name}.svg"
    return [f"![{item.title}]({path})", ""] if (folder / path).exists() else []


def _key(item: Item) -> str | None:
    """Return the item's table in published.toml; ``None``: it is not in the paper."""
    name = item.spec_name
    wanted = (item.source, name.replace("-", "_"), name.removeprefix("figure-").replace("-", "_"))
    return next((key for key in wanted if key in published()), None)


def _paper(item: Item) -> list[str]:
    """Return where the item stands in the paper and what the paper says, from published.toml."""
    if (key := _key(item)) is None:
        return ["Not in the paper.", ""]
    known = published()[key]
    lines = [f"In the paper: {known['place']}.", ""]
    said = known.get("says", [known["claim"]] if "claim" in known else [])
    if said:
        lines += [*(f"- The paper: {sentence}" for sentence in said), ""]
    if "rows" in known:
        lines += [markdown([_published_row(k, v, known.get("columns")) for k, v in known["rows"].items()]), ""]
    return lines


def _published_row(key: str, value: Any, columns: list[str] | None) -> Row:
    named = value if isinstance(value, dict) else dict(zip(columns or [], value, strict=True))
    ends = {k: f"{v[0]} to {v[1]}" if isinstance(v, list) else v for k, v in named.items()}
    return {"the paper's numbers": key} | ends


def _extent(item: Item, folder: Path) -> str:
    """Say how much of the item was run."""
    wanted, rows = units(item), own_rows(item.spec_name, folder)
    if not wanted:
        return f"Ours, from the rows of {', '.join(item.needs)}:"
    done = {row["unit"] for row in rows} & set(wanted)
    left = [f"`{unit}`" for unit in wanted if unit not in done]
    named = f" ({', '.join(left)})" if len(left) <= FEW else ""
    missing = f" What is missing{named} has not been run at full size yet." if left else ""
    return f"Ours ({len(rows)} rows, {len(done)} of {len(wanted)} units of work).{missing}"


def _verdicts(verdicts: Sequence[Judgement]) -> list[str]:
    return [*(f"- **{v.status}**: {v.claim}. Ours: {v.ours}. Rule: {v.rule}." for v in verdicts), ""]


def _choices(item: Item) -> list[str]:
    if not item.notes:
        return []
    return ["Where the paper is silent or we depart from it:", "", *(f"- {note}" for note in item.notes), ""]


def _rerun(item: Item, made: list[Row], folder: Path) -> list[str]:
    """Return the commands: the whole item, and any single unit of work."""
    name = item.spec_name
    if not made:
        return [f"To run it: `gradveil reproduce {name} --scale full` (what it needs is run first).", ""]
    lines = ["Made by:", ""]
    every = units(item)
    for run in made:
        what = "all of it" if set(run["units"]) >= set(every) else f"{len(run['units'])} units of work"
        commit = f"commit {run['commit']}" if "commit" in run else "commit not recorded"
        versions = ", ".join(run["versions"]) or "versions not recorded"
        where = f"seed {run['seed']}, {run['date']}, {run['machine']}"
        note = f" **{run['note']}**" if "note" in run else ""
        lines.append(f"- `{run['command']}` ({what}; {where}; {commit}, {versions}){note}")
    done = list(dict.fromkeys(row["unit"] for row in own_rows(name, folder)))
    return [
        *lines,
        "",
        f"A single number: `{made[0]['command']} --only '{done[0]}' --out runs/one`, with the unit of work it is from:",
        "",
        f"<details><summary>{len(done)} units of work</summary>",
        "",
        " · ".join(f"`{unit}`" for unit in done),
        "",
        "</details>",
        "",
    ]


def filled(text: str, folder: Path = RESULTS) -> str:
    """Return the README with its list of verdicts made anew."""
    return fill(text, {"verdicts": "\n".join(readme_lines(folder))})


if __name__ == "__main__":
    written = {RESULTS / name: text for name, text in pages().items()}
    sys.exit(write_or_check(written | {README: filled(README.read_text())}, __doc__))
