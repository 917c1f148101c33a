"""The page's table of roads past a defence of records names tests that exist."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "how-to" / "defend-my-model.md"


def test_every_road_that_is_said_to_be_closed_names_its_test() -> None:
    text = "".join((FOLDER / f"test_guard_{part}.py").read_text() for part in ("roads", "uses", "records"))
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    table = PAGE.read_text().split("| road | what happens | test |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 25
    for row in table:
        _, _, outcome, test, _ = row.split("|")
        if outcome.strip().startswith("not visible"):
            assert not test.strip(), row
        else:
            assert test.strip().strip("`") in there, row
