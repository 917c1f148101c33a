"""The code on the pages about defences runs, block after block, as a reader would run it."""

import pytest

from docpages import blocks, section
from gradveil.protection.defense import DEFENSES

PAGE = "how-to/defend-my-model.md"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [section(PAGE), section("how-to/extend.md", "## A defence")], ids=["defend", "extend"])
def test_every_block_of_the_page_runs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEFENSES, "_classes", dict(DEFENSES._classes) if DEFENSES.names() else {})
    scope: dict[str, object] = {"__name__": "page"}
    found = blocks(text, "python")
    assert len(found) >= 2
    for code in found:
        exec(compile(code, "page", "exec"), scope)


def test_the_page_says_first_that_a_server_which_knows_the_defence_undoes_it() -> None:
    text = section(PAGE)
    assert text.index("undoes `representation`") < text.index("protect(")
