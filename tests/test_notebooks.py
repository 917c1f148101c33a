"""The notebooks under examples run, and hold what a run of them shows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_they_run_and_show_what_is_kept_in_them() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "notebooks.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_plain_python_with_the_public_interface_alone(path: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in code(path))
    compile(text, path.name, "exec")  # no magics
    imported = [line for line in text.splitlines() if "gradveil" in line and line.startswith(("import", "from"))]
    assert imported
    assert all(line == "import gradveil" or line.startswith("from gradveil import ") for line in imported)
    assert any("image/png" in out.get("data", {}) or out.get("text") for cell in code(path) for out in cell["outputs"])


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["defend", "leak", "plan"]
