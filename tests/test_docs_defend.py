"""The code on the pages about defences runs, block after block, as a reader would run it."""

import importlib.util
import re
from pathlib import Path

import pytest

from gradveil.protection.defense import DEFENSES

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((PAGES / page).read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ["defend-my-model.md", "add-a-defence.md"])
def test_every_block_of_the_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEFENSES, "_classes", dict(DEFENSES._classes) if DEFENSES.names() else {})
    scope: dict[str, object] = {"__name__": "page"}
    found = blocks(page)
    assert len(found) >= 2
    for needs, code in found:
        if not needs or importlib.util.find_spec(needs):
            exec(compile(code, page, "exec"), scope)


def test_the_page_says_first_that_a_server_which_knows_the_defence_undoes_it() -> None:
    text = (PAGES / "defend-my-model.md").read_text()
    assert text.index("undoes `representation`") < text.index("protect(")
