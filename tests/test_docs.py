"""The Python in these pages runs, top to bottom, as one program per page."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradveil.layers.rules.base import PLAIN, RULES

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    "quickstart.md",
    "how-to/add-a-layer.md",
    "how-to/bring-my-data.md",
    "how-to/informed-and-patient.md",
    "how-to/losses.md",
    "how-to/malicious-servers.md",
    "how-to/plan.md",
    "how-to/text.md",
    "how-to/tables.md",
    "how-to/train.md",
    "theory/certificates.md",
    "theory/convergence.md",
]

NEW = {"src/gradveil/layers/rules/shuffle.py", "tests/zoo/broken/backwards.py"}  # files that a reader writes


@pytest.fixture
def rules() -> Iterator[None]:
    """The tables of layers are as they were after the test, whatever a page adds."""
    before = [(table, dict(table)) for table in (RULES, PLAIN)]
    yield
    for table, content in before:
        table.clear()
        table.update(content)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "docs"})


def test_the_readme_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text().split()) <= 700


def test_each_snippet_of_the_readme_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    defend, attack = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)
    exec(compile(defend, "README.md", "exec"), {"__name__": "docs"})
    assert "4 steps" in capsys.readouterr().out
    exec(compile(attack, "README.md", "exec"), {"__name__": "docs"})
    naive, knowing = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert knowing < 0.01 < naive


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = []
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", prose):
            if not (page.parent / target).exists():
                broken.append(f"{page.name} -> {target}")
    assert not broken


def test_every_file_of_code_that_a_page_names_exists() -> None:
    missing = []
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for name in re.findall(r"`([\w/]+/\w+\.(?:py|c))`", page.read_text()):
            if name not in NEW and not any(
                (root / name).exists() for root in (DOCS.parent, DOCS.parent / "src" / "gradveil")
            ):
                missing.append(f"{page.name}: {name}")
    assert not missing


def test_no_placeholder_is_left_on_a_page() -> None:
    named = re.compile(r"^TABLE$|\b[A-Z]+_IMAGES\b|@@|TODO", re.MULTILINE)
    assert not [page.name for page in DOCS.rglob("*.md") if named.search(page.read_text())]


@pytest.mark.parametrize("tool", ["make_docs.py", "speed_page.py", "theory_tables.py"])
def test_generated_tables_agree_with_the_registry_and_the_results(tool: str) -> None:
    path = DOCS.parent / "tools" / tool
    done = subprocess.run([sys.executable, str(path), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
