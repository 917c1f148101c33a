"""The Python in these pages runs, top to bottom, as one program per page."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import gradveil
from docpages import DOCS, blocks, needing, section
from gradveil.cli.main import COMMANDS, app, whole_command
from gradveil.representation.rules.base import PLAIN, RULES
from schemas import FOLDER, schema_of

PAGES = [
    "index.md",
    "how-to/bring-my-data.md",
    "how-to/learned-attacks.md",
    "how-to/malicious-servers.md",
    "how-to/plan.md",
    "how-to/text.md",
    "how-to/tables.md",
    "how-to/train.md",
    "how-to/veil.md",
    "theory/certificates.md",
    "theory/convergence.md",
    "theory/paper.md",
]
WITH = {"## Lightning": "lightning", "## Hugging Face": "transformers", "## Opacus": "opacus"}  # of defend-my-model.md
ELSEWHERE = {  # pages whose Python a test of their own runs
    "how-to/audit-my-model.md": "cli/test_audit_docs.py",
    "how-to/defend-my-model.md": "test_docs_defend.py",
    "how-to/extend.md": "test_docs_defend.py",
    "how-to/gate-in-ci.md": "cli/test_gate_page.py",
    "how-to/train-with-flower.md": "integrations/test_flower_page.py",
    "how-to/verify.md": "verification/test_verify_page.py",
}

NEW = {  # files that a reader writes
    "src/gradveil/representation/rules/shuffle.py",
    "src/gradveil/modalities/series.py",
    "tests/zoo/broken/backwards.py",
}


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
    code = blocks(section(page), "python")
    assert code
    exec(compile("\n".join(code), page, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize(("heading", "extra"), WITH.items())
def test_the_code_of_a_page_with_an_extra_runs(
    heading: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(extra) is None:
        pytest.skip(f"{extra} is not installed")
    text = section("how-to/defend-my-model.md", heading)
    code = "\n".join(needing(text, extra))
    assert code
    done = subprocess.run([sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "defended, 0 not" in done.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for said in re.findall(r"```text\n(.*?)```", text, re.DOTALL):  # of the section's command
        command = blocks(text, "bash")[0].split()[1:]
        assert said in CliRunner().invoke(app, command, catch_exceptions=False).output


def test_every_page_with_python_is_run() -> None:
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks(page.read_text(), "python")}
    assert there == {*PAGES, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (DOCS.parent / "tests" / test).read_text(), page


COMMANDS_ON = [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]


@pytest.mark.parametrize("page", [p for p in COMMANDS_ON if "```bash" in p.read_text()], ids=lambda p: p.name)
def test_every_command_on_a_page_is_one_that_can_be_given(page: Path) -> None:
    """What takes long is not run here: its command, options and kinds of values are checked, and its specs built."""
    text = "\n".join(blocks(page.read_text(), "bash")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("gradveil ") and "..." not in line]
    for line in lines:
        words = shlex.split(re.split(r" [>|&]|\|\|", line)[0], comments=True)[1:]
        words = [word for word in words if word != "--help"]
        if words[0].startswith("-"):
            assert words[0] in page_of_options(), line
            continue
        assert words[0] in COMMANDS, line
        with whole_command(words[0]).make_context(words[0], words[1:]) as context:
            given = context.params
        for name, build in (("defense", gradveil.defense), ("attack", gradveil.attack)):
            value = given.get(name) or ()
            for spec in (value,) if isinstance(value, str) else value:
                assert build(spec), line


def page_of_options() -> list[str]:
    """The options of ``gradveil`` itself."""
    return [opt for param in get_command(app).params for opt in param.opts]


def test_the_readme_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text().split()) <= 600


def test_each_snippet_of_the_readme_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    attack, defend = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)
    exec(compile(defend, "README.md", "exec"), {"__name__": "docs"})
    assert "4 steps" in capsys.readouterr().out
    exec(compile(attack, "README.md", "exec"), {"__name__": "docs"})
    oblivious, knowing = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert knowing < 0.01 < oblivious


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


def test_the_page_on_the_terminal_has_every_command_and_its_keys() -> None:
    rows = re.findall(
        r"^\| \[`([\w-]+)`\]\(schemas/\1\.json\) \| .+ \| (.+) \|$", (DOCS / "terminal.md").read_text(), re.M
    )
    assert [name for name, _ in rows] == [name for name in COMMANDS if (FOLDER / f"{name}.json").exists()]
    for name, keys in rows:
        schema = schema_of(name)
        shared = schema.get("$defs", {})
        named = schema.get("items") or next(iter(schema.get("anyOf", [])), {})
        schema = shared[named["$ref"].rsplit("/", 1)[1]] if "$ref" in named else schema
        assert re.findall(r"`(\w+)`", keys) == list(schema["properties"]), name
