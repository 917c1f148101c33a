"""The data of the compatibility page: made from the matrix, and read back by the test of it."""

import json
import re
from functools import cache
from pathlib import Path

from compatibility.oracles import COLUMNS, Cell, cell
from compatibility.zoo import ZOO, Model

DATA = Path(__file__).parents[2] / "docs" / "compatibility.json"
MARKS = {"right": "yes", "refused": "no", "not applicable": "–", "wrong": "WRONG"}


def row(family: str, model: Model) -> dict[str, Cell]:
    """Return what each method of the family does with a model."""
    return {name: cell(check, model) for name, check in COLUMNS[family].items()}


@cache
def cells() -> dict[str, dict[str, dict[str, Cell]]]:
    """Return every cell: family, model, method. Takes some minutes."""
    return {family: {model.name: row(family, model) for model in ZOO.values()} for family in COLUMNS}


def matrix() -> dict[str, dict[str, dict[str, str]]]:
    """Return the marks of every cell."""
    return {
        family: {model: {name: MARKS[found.outcome] for name, found in each.items()} for model, each in rows.items()}
        for family, rows in cells().items()
    }


def refusals(family: str) -> list[str]:
    """Return each kind of refusal once, with the models that it is about."""
    kinds: dict[str, tuple[str, list[str]]] = {}
    for model, each in cells()[family].items():
        for found in each.values():
            if found.outcome == "refused":
                kind = re.sub(r"'[^']*'|\d+|\([^)]*\)", "…", found.words.split(". ")[0])
                _, models = kinds.setdefault(kind, (found.words, []))
                if model not in models:
                    models.append(model)
    return [f"- *{words}* ({', '.join(models)})" for words, models in kinds.values()]


def written() -> dict[str, dict[str, dict[str, str]]]:
    """Return the marks that were written: family, model, method."""
    marks: dict[str, dict[str, dict[str, str]]] = {}
    for section in json.loads(DATA.read_text()):
        family = marks.setdefault(section["title"].lower(), {})
        for part in (part for part in section["parts"] if isinstance(part, dict)):
            columns = [name.strip("`") for name in part["columns"][1:]]
            family |= {model: dict(zip(columns, each, strict=True)) for model, *each in part["rows"]}
    return marks
