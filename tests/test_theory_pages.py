"""The pages on certificates and convergence: their measured parts are those of the rows, or say that there are none."""

import importlib
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradveil_studies.paper.base import Context
from gradveil_studies.paper.meter import OBLIVIOUS, SETTINGS, MeterCheck

ROOT = Path(__file__).parent.parent
THEORY = ROOT / "docs" / "theory"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("theory_tables")


def keep(folder: Path, item: str, rows: list[dict[str, Any]]) -> None:
    (folder / item).mkdir()
    (folder / item / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def block(tables: ModuleType, page: str, name: str, folder: Path) -> str:
    text = tables.filled((THEORY / page).read_text(), tables.PAGES[page], folder)
    found: str = text.split(f"<!-- begin: {name} -->")[1].split(f"<!-- end: {name} -->")[0].strip()
    return found


def curve(kind: str, defense: str, round_: int, loss: float) -> dict[str, Any]:
    setting = {"kind": kind, "defense": defense, "round": round_, "seed": 0, "epochs": 10, "devices": 10, "lr": 0.1}
    return setting | {"loss": loss, "gradient": 0.1, "bias": 0.2}


def test_without_rows_a_page_says_so_and_shows_no_number(tables: ModuleType, tmp_path: Path) -> None:
    for page, blocks in tables.PAGES.items():
        for name in set(blocks) - {"timing"}:
            assert block(tables, page, name, tmp_path).startswith(tables.MISSING)
    assert tables._timing(tmp_path / "none.json").startswith("Not run yet")


def test_the_turn_of_the_long_run_is_read_off_its_rows(tables: ModuleType, tmp_path: Path) -> None:
    rising = [curve("long", "ours", t, loss) for t, loss in ((80, 0.484), (240, 0.462), (640, 0.589))]
    keep(tmp_path, "convergence", [*rising, curve("long", "none", 620, 0.3), curve("long", "none", 640, 0.304)])
    text = block(tables, "convergence.md", "turn", tmp_path)
    assert "lowest around rounds 240 to 240, 0.462, and 0.589 at the end, round 640: it turns up again." in text
    assert "Undefended: 0.300 at the lowest, 0.304 at the end." in text
    assert "| E=10 K=10 lr=0.1 ours | 640 |" in block(tables, "convergence.md", "convergence", tmp_path)


def test_every_constant_is_labelled_by_how_it_is_known(tables: ModuleType, tmp_path: Path) -> None:
    known = {"mu": {"value": 1e-4, "how": "exact", "note": "the weight decay"}}
    numbers = {"output": 1.5, "displacement": 2.0, "smoothness": 30.0, "convexity": 1e-4, "lowest": 0.2, "start": 2.3}
    numbers |= {"gradient": 48.0, "spread": 0.2, "distance": 25.0}
    row = {"kind": "constants", "known": known, "uncertain": 1e-6, "bias at the optimum": 0.157} | numbers
    row |= {"parts": [0.5, 0.5], "sigmas": [2.0, 2.0]}
    keep(tmp_path, "convergence", [row])
    text = block(tables, "convergence.md", "constants", tmp_path)
    assert "| mu | 0.0001 | exact | the weight decay |" in text
    assert "| δ = Λ_s ρ | 3 | bounded |" in text
    assert "| ‖b̄(W*)‖ | 0.157 | measured |" in text
    assert "| κ | 3e+05 |" in text


def test_the_meter_has_its_table_its_correlation_and_its_figure(tables: ModuleType, tmp_path: Path) -> None:
    rest = {"image": 0, "prior": 0.07, "blind": 0.06, "rank": 64, "objective": 0.0, "converged": True}
    rows = [
        {"setting": s, "oblivious": s in OBLIVIOUS, "meter": 10.0**-i, "mse": 2 * 10.0**-i} | rest
        for i, s in enumerate([*list(SETTINGS)[:3], *OBLIVIOUS])
    ]
    keep(tmp_path, "meter", rows)
    (tmp_path / "meter" / "meter.svg").write_text("<svg/>")
    text = block(tables, "certificates.md", "meter", tmp_path)
    assert text.count("\n| ") == len(rows) + 2  # the head, and the line of the mean image
    assert text.startswith("**Not complete**: 608 of 608 units of work have not been run (`0 none`")
    assert "**reproduced**" in text
    assert "Spearman 1.00" in text
    assert "](../results/meter/meter.svg)" in text


def test_a_complete_item_does_not_say_that_something_is_missing(tables: ModuleType) -> None:
    item = MeterCheck()
    units = item.units(Context(scale="full"))
    assert tables._missing(item, [{"unit": unit} for unit in units]) == []
    (text,) = tables._missing(item, [{"unit": unit} for unit in units[1:]])
    assert "1 of 608 units of work have not been run (`0 none`)" in text


def test_times_come_from_the_benchmark(tables: ModuleType, tmp_path: Path) -> None:
    aim = {"target": "local", "wanted": 50, "got": 51.5, "met": False}
    result = {"machine": "two cores", "targets": [aim], "rows": [dict.fromkeys(tables.TIMES, 7)]}
    (tmp_path / "bench.json").write_text(json.dumps(result))
    text = tables._timing(tmp_path / "bench.json")
    assert "| 7 | 7 | 7 | 7 | 7 | 7 | 7 |" in text
    assert "- local: 51.5, aim at most 50, **not met**." in text


def test_a_page_without_a_marker_is_refused(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="markers"):
        tables.filled("no markers", tables.PAGES["convergence.md"])


def test_no_placeholder_is_left_on_a_page() -> None:
    assert not [page.name for page in THEORY.glob("*.md") if "@@" in page.read_text()]


def test_every_equation_leads_to_code_that_is_there() -> None:
    text = (THEORY / "equations.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    linked = [re.findall(r"\(#(gradveil\.[\w.]+)\)", row) for row in rows]
    assert len(rows) > 15
    assert all(linked)
    shown = re.findall(r"^::: (gradveil\.[\w.]+)$", text, re.MULTILINE)
    assert shown == list(dict.fromkeys(place for places in linked for place in places))
    assert all(pkgutil.resolve_name(place).__doc__ for place in shown)


def test_every_numbered_equation_of_the_paper_is_on_the_page() -> None:
    text = (THEORY / "equations.md").read_text()
    found: set[int] = set()
    for first, last in re.findall(r"\((\d\d?)\)(?: to \((\d\d?)\))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    assert found == set(range(1, 35))
