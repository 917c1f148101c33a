"""What the how-to says works: its Python runs, and so does its command for a saved update."""

import shlex
from pathlib import Path

import pytest

from docpages import blocks, section
from gradveil.cli.main import entry

PAGE = "how-to/audit-my-model.md"
TEXT = section(PAGE)


@pytest.mark.slow
def test_the_how_to_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(TEXT, "python")), PAGE, "exec"), {"__name__": "docs"})
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    (command,) = [block for block in blocks(TEXT, "bash") if "--update" in block]
    monkeypatch.setattr("sys.argv", [*shlex.split(command.replace("\\\n", " ")), "--out", "saved"])
    with pytest.raises(SystemExit) as done:
        entry()
    assert not done.value.code, capsys.readouterr().err
    assert "a server that knows the defence gets the images back" in " ".join(capsys.readouterr().out.split())
