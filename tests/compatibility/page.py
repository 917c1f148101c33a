"""The compatibility page: written from the matrix, and read back by the test of it."""

import re
from itertools import groupby
from pathlib import Path

from compatibility.oracles import COLUMNS, Cell, cell
from compatibility.zoo import ZOO, Model

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MARKS = {"right": "yes", "refused": "no", "not applicable": "–", "wrong": "WRONG"}
INTRO = """# What works with which model

Every method on every one of {models} small models, most of them unlike the ones that come with gradveil: {cells:,}
cells, each checked against an answer worked out in plain autograd.

- **yes**: the answer is right.
- **no**: refused, in one line that says what to do. Nothing is computed or sent.
- **–**: not applicable; scores, attacks and certificates are of models that take one tensor of numbers.

There is no fourth kind: an answer that is wrong without a word fails the build (`tests/compatibility`, part of `make
test`; `make docs` writes this page). What *right* means: for scores, |r_i| / ||∂r_i/∂x|| entry by entry, as autograd
takes the derivative (for `moment`, an estimate, only which entries are dead); for defences, the step that an
optimizer takes under `protect`, and `step_gradient`, equal the gradient worked out from r' by hand, and r' keeps to
the defence's rule; for attacks, the objective that is reported, and the slope that steers the search, are those of
the client's own gradient; for certificates, no image with the representation r' lies nearer than the bound. Each
model's modes are as its name says, else train mode; certificates take dropout for switched off. The models are in
`tests/compatibility/zoo.py`: a function adds one.
"""


def row(family: str, model: Model) -> dict[str, Cell]:
    """Return what each method of the family does with a model."""
    return {name: cell(check, model) for name, check in COLUMNS[family].items()}


def page() -> str:
    """Return the whole page. Takes some minutes."""
    found = {family: {model.name: row(family, model) for model in ZOO.values()} for family in COLUMNS}
    cells = sum(len(cells) for rows in found.values() for cells in rows.values())
    lines = [INTRO.format(models=len(ZOO), cells=cells)]
    for family, columns in COLUMNS.items():
        lines += [f"## {family.capitalize()}", ""]
        for group, models in groupby(ZOO.values(), lambda model: model.group):
            lines += [
                f"| {group} | " + " | ".join(f"`{name}`" for name in columns) + " |",
                "|---" * (len(columns) + 1) + "|",
            ]
            for model in models:
                marks = [MARKS[found[family][model.name][name].outcome] for name in columns]
                lines.append(f"| {model.name} | " + " | ".join(marks) + " |")
            lines.append("")
        lines += ["What the refusals say:", "", *_refusals(found[family]), ""]
    return "\n".join(lines)


def _refusals(rows: dict[str, dict[str, Cell]]) -> list[str]:
    """Return each kind of refusal once, with the models that it is about."""
    kinds: dict[str, tuple[str, list[str]]] = {}
    for model, cells in rows.items():
        for found in cells.values():
            if found.outcome == "refused":
                kind = re.sub(r"'[^']*'|\d+|\([^)]*\)", "…", found.words.split(". ")[0])
                _, models = kinds.setdefault(kind, (found.words, []))
                if model not in models:
                    models.append(model)
    return [f"- *{words}* ({', '.join(models)})" for words, models in kinds.values()]


def written() -> dict[str, dict[str, dict[str, str]]]:
    """Return the marks on the page: family, model, method."""
    marks: dict[str, dict[str, dict[str, str]]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            family = marks.setdefault(line[3:].lower(), {})
        elif line.startswith("| ") and "`" in line:
            columns = [part.strip(" `") for part in line.split("|")[2:-1]]
        elif line.startswith("| "):
            model, *each = (part.strip() for part in line.split("|")[1:-1])
            family[model] = dict(zip(columns, each, strict=True))
    return marks
