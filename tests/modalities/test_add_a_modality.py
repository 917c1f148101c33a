"""The guide's kind of example runs as it stands, from the data to the report."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docpages import blocks, section
from gradveil.modalities import MODALITIES
from gradveil.report.page import write_report

GUIDE = section("how-to/extend.md", "## A kind of example")


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    known = set(MODALITIES.names())
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(GUIDE, "python"):
        exec(compile(block, "extend.md", "exec", dont_inherit=True), names)
    yield names
    for name in set(MODALITIES._classes) - known:
        del MODALITIES._classes[name]


def test_a_new_kind_is_attacked_measured_and_shown_in_its_own_words(guide: dict[str, Any]) -> None:
    rows = [row for row in guide["found"].rows if row["kind"] == "attack"]
    exact = [row["wrong"] for row in rows if row["defense"] == "none"]
    assert exact == [0.0] * len(exact)
    assert any(row["wrong"] > 0.1 for row in rows if row["defense"] != "none")
    write_report("runs/recordings")
    page = Path("runs/recordings/report.html").read_text()
    visible = page.partition("<body>")[2].partition('id="run"')[0]  # below, settings stand by their names
    text = re.sub(r"<[^>]*>", " ", visible)
    assert "recordings" in text
    assert not re.search(r"(?<!--)\bimages?\b|\bpixels?\b", text)
