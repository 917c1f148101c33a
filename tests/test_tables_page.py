"""The pages on tables and on trained parts show the measured figures, and their scenes are those of the benches."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("name", "guide"), [("tables", "tables"), ("trained_parts", "trained-parts")])
def test_the_pages_figures_are_those_that_were_measured(name: str, guide: str) -> None:
    bench = runpy.run_path(str(ROOT / "studies" / "bench" / f"{name}.py"), run_name="bench")
    found = json.loads((ROOT / "studies" / "bench" / "results" / f"{name}.json").read_text())
    page = (ROOT / "docs" / "how-to" / f"{guide}.md").read_text()
    assert "\n".join(bench["lines"](found)) in page
