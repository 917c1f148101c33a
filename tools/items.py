"""Every item of the paper beside our numbers: sections for the site's page, made from the committed rows."""

from pathlib import Path
from typing import Any

from results import RESULTS, Row, all_rows, build, judged, own_rows, runs

from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, published

FEW = 8  # units of work that are named where they are missing
Part = str | list[Row]


def in_order(folder: Path = RESULTS) -> list[Item]:
    """Return all items in the order of published.toml, what is not in the paper last."""
    items = [build(name, folder) for name in ITEMS.names()]
    place = {key: i for i, key in enumerate(published())}
    return sorted(items, key=lambda item: (place.get(_key(item) or "", len(place)), item.source is not None))


def item_sections(folder: Path = RESULTS) -> dict[str, list[Part]]:
    """Return one section for all verdicts and one an item."""
    items = in_order(folder)
    return {"all verdicts": [verdict_table(items, folder)]} | {item.spec_name: parts(item, folder) for item in items}


def has_rows(item: Item, folder: Path = RESULTS) -> bool:
    """Return whether there is anything to say: rows of its own, or of all others where it only reads theirs."""
    return all(own_rows(name, folder) for name in ([item.spec_name] if units(item) else item.needs))


def units(item: Item) -> list[str]:
    """Return the units of work of a full run."""
    return item.units(Context(scale="full"))


def overview(folder: Path = RESULTS) -> str:
    """Return one line per item: its title, and how its verdicts went."""
    lines = ["| item | what | verdicts |", "|---|---|---|"]
    for item in in_order(folder):
        statuses = [_in_short(v.status) for v in _judged(item, folder)]
        said = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        link = f"[{item.spec_name}](items.md#{item.spec_name})"
        lines.append(f"| {link} | {item.title} | {said or _unjudged(item, folder)} |")
    return "\n".join(lines)


def verdict_table(items: list[Item], folder: Path = RESULTS) -> list[Row]:
    """Return one row per claim: item, paper, ours, verdict."""
    table = []
    for item in items:
        verdicts = _judged(item, folder)
        if not verdicts:
            empty = {"paper": "", "ours": "", "verdict": _unjudged(item, folder)}
            table.append({"item": item.spec_name, "claim": item.title} | empty)
        for v in verdicts:
            row = {"item": item.spec_name, "claim": v.claim, "paper": v.paper, "ours": v.ours, "verdict": v.status}
            table.append(row)
    return table


def _in_short(status: str) -> str:
    return "reproduced under a condition" if status.startswith("reproduced only") else status


def _judged(item: Item, folder: Path) -> tuple[Judgement, ...]:
    return judged(item, folder) if has_rows(item, folder) else ()


def _unjudged(item: Item, folder: Path) -> str:
    return "no verdict: a table" if has_rows(item, folder) else "not run at full size yet"


def parts(item: Item, folder: Path = RESULTS) -> list[Part]:
    """Return all there is on one item."""
    name = item.spec_name
    path = f"{name}/{name}.svg"
    found: list[Part] = [f"**{item.title}**"]
    found += [f"![{item.title}]({path})"] if (folder / path).exists() else []
    found += _paper(item)
    silent = ["Where the paper is silent or we depart from it:", "\n".join(f"- {note}" for note in item.notes)]
    choices = silent if item.notes else []
    if not has_rows(item, folder):
        return [*found, "Ours: not run at full size yet.", *choices, *_rerun(item, [], folder)]
    rows = all_rows(item, folder)
    verdicts = [f"- **{v.status}**: {v.claim}. Ours: {v.ours}. Rule: {v.rule}." for v in judged(item, folder)]
    found += [_extent(item, folder), item.summary(rows), "\n".join(verdicts)]
    return [part for part in (*found, *choices, *_rerun(item, runs(name, folder), folder)) if part]


def _key(item: Item) -> str | None:
    """Return the item's table in published.toml; ``None``: it is not in the paper."""
    name = item.spec_name
    wanted = (item.source, name.replace("-", "_"), name.removeprefix("figure-").replace("-", "_"))
    return next((key for key in wanted if key in published()), None)


def _paper(item: Item) -> list[Part]:
    """Return where the item stands in the paper and what the paper says, from published.toml."""
    if (key := _key(item)) is None:
        return ["Not in the paper."]
    known = published()[key]
    said = known.get("says", [known["claim"]] if "claim" in known else [])
    found: list[Part] = [f"In the paper: {known['place']}."]
    if said:
        found.append("\n".join(f"- The paper: {sentence}" for sentence in said))
    if "rows" in known:
        found.append([_published_row(k, v, known.get("columns")) for k, v in known["rows"].items()])
    return found


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


def _rerun(item: Item, made: list[Row], folder: Path) -> list[Part]:
    """Return the commands: the whole item, and any single unit of work."""
    name = item.spec_name
    if not made:
        return [f"To run it: `gradveil reproduce {name} --scale full` (what it needs is run first)."]
    every, lines = units(item), []
    for run in made:
        what = "all of it" if set(run["units"]) >= set(every) else f"{len(run['units'])} units of work"
        commit = f"commit {run['commit']}" if "commit" in run else "commit not recorded"
        versions = ", ".join(run["versions"]) or "versions not recorded"
        where = f"seed {run['seed']}, {run['date']}, {run['machine']}"
        note = f" **{run['note']}**" if "note" in run else ""
        lines.append(f"- `{run['command']}` ({what}; {where}; {commit}, {versions}){note}")
    done = list(dict.fromkeys(row["unit"] for row in own_rows(name, folder)))
    where = f"`unit` in `docs/results/{name}/rows.jsonl`; {len(done)} of them"
    single = f"A single number: `{made[0]['command']} --only '{done[0]}' --out runs/one`, its unit of work"
    return ["Made by:", "\n".join(lines), f"{single} ({where})."]
