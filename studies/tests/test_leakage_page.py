"""The page on leakage: its tables are those of the committed rows, its counts those of the networks, its code runs."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gradveil.models import build
from gradveil.modules import trace

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "theory" / "leakage.md"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("leakage_tables")


def test_the_tables_are_what_the_committed_rows_give() -> None:
    tool = ROOT / "tools" / "leakage_tables.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_fill_every_table_of_table_1(tables: ModuleType, tmp_path: Path) -> None:
    scores = dict.fromkeys(("own", "wrong", "nearest", "centred", "blind"), 0.25)
    shared = {"setting": "E=5, B=32", "seed": 0}
    rows = [shared | {"layer": layer} | scores for layer in ("conv1", "fc1", "fc3")]
    rows.append(shared | {"layer": "classes", "gap": 0.5, "mean": 0.5, "bias_sign": 0.875, "row_sum": 1.0})
    (tmp_path / "table1").mkdir()
    (tmp_path / "table1" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tables.filled(PAGE.read_text(), tmp_path)
    blocks = {
        name: text.split(f"<!-- begin: {name} -->")[1].split(f"<!-- end: {name} -->")[0] for name in tables.BLOCKS
    }
    assert re.findall(r"fc\d|conv\d", blocks["dense"]) == ["fc1", "fc3"]
    assert re.findall(r"fc\d|conv\d", blocks["convolutions"]) == ["conv1"]
    assert "| E=5, B=32 | 0.500 | 0.500 | 0.875 | 1.000 | 1 |" in blocks["classes"]
    assert "**reproduced**: The class set is read off the update (E=5, B=32). 1.000." in blocks["verdicts"]
    assert blocks["parts"].strip() == blocks["parts verdicts"].strip() == tables.MISSING
    assert tables.filled(text, tmp_path) == text


def test_a_page_without_a_marker_is_refused(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="markers"):
        tables.filled(PAGE.read_text().replace("<!-- end: parts -->", ""))


@pytest.mark.parametrize(
    ("name", "spec"), [("`probe` (one", "probe"), ("`probe`, stride 2", "probe:stride=2,padding=2"),
                       ("`lenet`", "lenet"), ("`convnet`", "convnet")]
)  # fmt: skip
def test_the_counted_equations_are_those_of_the_networks(name: str, spec: str) -> None:
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name}"))
    network = build(spec, (3, 32, 32), 10, seed=0)
    convolutions = sum(p.numel() for path, p in network.named_parameters() if path.startswith("conv"))
    entries = trace(network, (3, 32, 32)).visits[-1].input_shape[0]
    assert [int(n) for n in re.findall(r"\| (\d+)(?= \|)", line)] == [3 * 32 * 32, convolutions, entries]


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), "leakage.md", "exec"), {"__name__": "docs"})
