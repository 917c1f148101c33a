"""The page on tables shows the measured figures, and its scenes are those of the bench."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_pages_figures_are_those_that_were_measured() -> None:
    bench = runpy.run_path(str(ROOT / "bench" / "tables.py"), run_name="bench")
    found = json.loads((ROOT / "bench" / "results" / "tables.json").read_text())
    page = (ROOT / "docs" / "how-to" / "tables.md").read_text()
    assert "\n".join(bench["lines"](found)) in page
