"""docs/how-to/verify.md: its Python runs, and says what the page says it does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "verify.md"


@pytest.mark.slow
def test_the_page_finds_opacus_sound_and_the_broken_trainer_broken(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("consistent 1.73 ")
    assert second.startswith("exceeds the promise μ is at least ")
