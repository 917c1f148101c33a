"""No method gives a wrong answer without a word, on any model of the zoo, and the page says what each does."""

import pytest

from compatibility.oracles import COLUMNS
from compatibility.page import MARKS, row, written
from compatibility.zoo import ZOO


@pytest.mark.parametrize("family", COLUMNS)
@pytest.mark.parametrize("name", ZOO)
def test_every_answer_is_right_or_refused(family: str, name: str) -> None:
    cells = row(family, ZOO[name])
    wrong = {method: found.words for method, found in cells.items() if found.outcome == "wrong"}
    assert not wrong
    assert {method: MARKS[found.outcome] for method, found in cells.items()} == written()[family][name], (
        "docs/compatibility.json is stale: run `make docs`"
    )


def test_the_page_names_every_model_and_method() -> None:
    marks = written()
    assert {family: list(rows) for family, rows in marks.items()} == {family: list(ZOO) for family in COLUMNS}
    assert all(set(each) == set(COLUMNS[family]) for family, rows in marks.items() for each in rows.values())
    assert len(ZOO) >= 60
