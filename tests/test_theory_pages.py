"""The pages on certificates and convergence: their measured parts are those of the rows, or say that there are none."""

import importlib
import json
import pkgutil
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from docpages import section
from gradveil.models import build
from gradveil.modules import trace
from gradveil_studies.paper.meter import OBLIVIOUS, SETTINGS, MeterCheck

ROOT = Path(__file__).parent.parent
THEORY = ROOT / "docs" / "theory"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("pages")


def keep(folder: Path, item: str, rows: list[dict[str, Any]]) -> None:
    (folder / item).mkdir()
    (folder / item / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def block(tables: ModuleType, page: str, name: str, folder: Path) -> str:
    text = tables.filled(f"theory/{page}", folder)
    found: str = text.split(f"<!-- begin: {name} -->")[1].split(f"<!-- end: {name} -->")[0].strip()
    return found


def curve(kind: str, defense: str, round_: int, loss: float) -> dict[str, Any]:
    setting = {"kind": kind, "defense": defense, "round": round_, "seed": 0, "epochs": 10, "devices": 10, "lr": 0.1}
    return setting | {"loss": loss, "gradient": 0.1, "bias": 0.2}


def test_without_rows_a_page_says_so_and_shows_no_number(tables: ModuleType, tmp_path: Path) -> None:
    for name in ("constants", "turn"):
        assert block(tables, "convergence.md", name, tmp_path).startswith(tables.MISSING)
    assert tables.certificate_times(tmp_path, tmp_path / "none.json").startswith("Not run yet")


def test_the_turn_of_the_long_run_is_read_off_its_rows(tables: ModuleType, tmp_path: Path) -> None:
    rising = [curve("long", "ours", t, loss) for t, loss in ((80, 0.484), (240, 0.462), (640, 0.589))]
    keep(tmp_path, "convergence", [*rising, curve("long", "none", 620, 0.3), curve("long", "none", 640, 0.304)])
    text = block(tables, "convergence.md", "turn", tmp_path)
    assert "lowest around rounds 240 to 240, 0.462, and 0.589 at the end, round 640: it turns up again." in text
    assert "Undefended: 0.300 at the lowest, 0.304 at the end." in text


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


def test_an_item_of_which_units_are_missing_says_how_many(tables: ModuleType, tmp_path: Path) -> None:
    rest = {"image": 0, "prior": 0.07, "blind": 0.06, "rank": 64, "objective": 0.0, "converged": True}
    rows = [
        {"setting": s, "oblivious": s in OBLIVIOUS, "meter": 10.0**-i, "mse": 2 * 10.0**-i, "unit": f"0 {s}"} | rest
        for i, s in enumerate([*list(SETTINGS)[:3], *OBLIVIOUS])
    ]
    keep(tmp_path, "meter", rows)
    _, _, extent, table, verdicts, *_ = importlib.import_module("items").parts(MeterCheck(), tmp_path)
    assert len(table) == len(rows) + 1  # and the line of the mean image
    assert f"{len(rows)} rows, {len(rows)} of 608 units of work" in extent
    assert "has not been run at full size yet" in extent
    assert "**reproduced**" in verdicts
    assert "Spearman 1.00" in verdicts


def test_times_come_from_the_benchmark(tables: ModuleType, tmp_path: Path) -> None:
    aim = {"target": "local", "wanted": 50, "got": 51.5, "met": False}
    result = {"machine": "two cores", "targets": [aim], "rows": [dict.fromkeys(tables.TIMES, 7)]}
    (tmp_path / "bench.json").write_text(json.dumps(result))
    text = tables.certificate_times(tmp_path, tmp_path / "bench.json")
    assert "| 7 | 7 | 7 | 7 | 7 | 7 | 7 |" in text
    assert "- local: 51.5, aim at most 50, **not met**." in text


def test_a_page_without_a_marker_is_refused(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="markers"):
        tables.filled("theory/convergence.md", text="no markers")


def test_no_placeholder_is_left_on_a_page() -> None:
    assert not [page.name for page in THEORY.glob("*.md") if "@@" in page.read_text()]


def test_every_equation_leads_to_code_that_is_there() -> None:
    text = (THEORY / "paper.md").read_text()
    rows = [line for line in section("theory/paper.md", "## Equations").splitlines() if line.startswith("| ")][1:]
    linked = [re.findall(r"\(#(gradveil\w*\.[\w.]+)\)", row) for row in rows]
    assert len(rows) > 15
    assert all(linked)
    shown = re.findall(r"^::: (gradveil\w*\.[\w.]+)$", text, re.MULTILINE)
    assert shown == list(dict.fromkeys(place for places in linked for place in places))
    assert all(pkgutil.resolve_name(place).__doc__ for place in shown)


def test_every_numbered_equation_of_the_paper_is_on_the_page() -> None:
    text = section("theory/paper.md", "## Equations")
    found: set[int] = set()
    for first, last in re.findall(r"\((\d\d?)\)(?: to \((\d\d?)\))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    assert found == set(range(1, 35))


@pytest.mark.parametrize(
    ("name", "spec"), [("`probe` (one", "probe"), ("`probe`, stride 2", "probe:stride=2,padding=2"),
                       ("`lenet`", "lenet"), ("`convnet`", "convnet")]
)  # fmt: skip
def test_the_counted_equations_are_those_of_the_networks(name: str, spec: str) -> None:
    line = next(line for line in section("theory/paper.md").splitlines() if line.startswith(f"| {name}"))
    network = build(spec, (3, 32, 32), 10, seed=0)
    convolutions = sum(p.numel() for path, p in network.named_parameters() if path.startswith("conv"))
    entries = trace(network, (3, 32, 32)).visits[-1].input_shape[0]
    assert [int(n) for n in re.findall(r"\| (\d+)(?= \|)", line)] == [3 * 32 * 32, convolutions, entries]


@pytest.mark.parametrize(("name", "title"), [("tables", "rows of tables"), ("trained_parts", "parts of a model")])
def test_the_figures_shown_are_those_that_were_measured(name: str, title: str) -> None:
    bench = runpy.run_path(str(ROOT / "studies" / "bench" / f"{name}.py"), run_name="bench")
    found = json.loads((ROOT / "studies" / "bench" / "results" / f"{name}.json").read_text())
    shown = {one["title"]: one["parts"] for one in json.loads((ROOT / "docs/results/measured.json").read_text())}
    (made,) = [part for part in shown[title] if isinstance(part, dict)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in bench["lines"](found)]
    assert lines[2:] == made["rows"]
    assert lines[0] == made["columns"]
