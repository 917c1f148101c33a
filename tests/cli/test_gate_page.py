"""docs/how-to/gate-in-ci.md: its commands, its exit codes, the schema of the summary and the workflow."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas import described

pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "gate-in-ci.md").read_text(encoding="utf-8")
Run = Callable[..., tuple[int, str, str]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


PASSES, WEAK, AGAIN, _ = blocks("bash")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run, tmp_path: Path) -> Run:
    (tmp_path / "my_module.py").write_text('print("a module that talks")\n' + blocks("python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)  # another test's
    return lambda text: command(*shlex.split(text.replace("\\\n", " ").partition(" > ")[0])[1:])


def summary_of(out: str) -> Any:
    return described("audit", out)


def test_the_commands_of_the_page_give_its_lines_and_exit_codes(run: Run, tmp_path: Path) -> None:
    passed, weak = blocks("text")
    code, out, err = run(PASSES)
    assert (code, err.splitlines()) == (0, ["a module that talks", passed.strip()])
    found = summary_of(out)
    assert found["settings"]["defenses"] == ["gaussian:scale=10"]
    assert found["gate"]["result"] == "passed"
    assert [v["outcome"] for v in found["verdicts"]] == ["recovered", "nothing"]
    assert found["verdicts"][0]["oblivious"]["recovered"]["hits"] == 4
    assert found["verdicts"][1]["adaptive"]["verdict"] == "nothing"

    rows = (tmp_path / "runs" / "gate" / "rows.jsonl").read_bytes()
    code, out, err = run(AGAIN)
    assert code == 0, err
    assert summary_of(out)["lines"] == found["lines"]
    assert (tmp_path / "runs" / "gate" / "rows.jsonl").read_bytes() == rows

    code, out, err = run(WEAK)
    assert code == 4
    assert weak.strip() in err
    assert "Report:" in out


def test_an_update_that_gives_its_images_away_fails_the_gate(run: Run) -> None:
    code, out, err = run(PASSES.replace("gaussian:scale=10", "pruning:share=0.2"))
    assert code == 3
    assert "failed. pruning:share=0.2: recovered by newton" in err
    assert summary_of(out)["gate"]["exit_code"] == 3


def test_a_word_that_is_not_known_is_one_line_and_nothing_runs(run: Run, tmp_path: Path) -> None:
    code, out, err = run(PASSES.replace("--fail-on recognised", "--fail-on recognized"))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "Did you mean 'recognised'?" in line
    assert not (tmp_path / "runs").exists()


def test_the_workflow_has_the_command_of_the_page() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "gradveil.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["audit"]["steps"]
    (audit,) = [step["run"] for step in steps if step.get("name") == "Audit"]
    assert shlex.split(audit) == shlex.split(PASSES)
