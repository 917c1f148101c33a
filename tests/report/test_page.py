import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.report.page import render, write_report
from gradveil.report.table import certificate_table
from gradveil.threats.rows import figure_errors

VOID = {"meta", "link", "img", "br", "path", "input"}


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(run_folder: Path) -> str:
    return write_report(run_folder).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_its_pictures_have_words(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.images) > 200
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in parser.images)
    assert all(image["alt"] for image in parser.images)


def test_the_page_asks_for_nothing_from_outside(page: str) -> None:
    assert not re.search(r"https?://", page)
    script = (files("gradveil.report") / "templates" / "page.js").read_text("utf-8")
    assert re.findall(r"<script[^>]*>", page) == ["<script>"]  # its own, and none from elsewhere
    assert f"<script>{script}</script>" in page
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|eval\(|innerHTML", script)
    assert not re.search(r"url\((?!data:)", page)
    assert re.findall(r'<link[^>]*href="([^"]*)"', page) == ["data:,"]


def test_every_defence_has_its_verdict_in_words(page: str, run_folder: Path) -> None:
    for said in ("Images recovered", "Nothing found", "Void", "worse than a blind guess", "Gets the images back"):
        assert said in page


def test_a_name_that_is_html_stays_text(page: str) -> None:
    assert "<script>alert(1)" not in page
    assert page.count("&lt;script&gt;alert(1)") > 5


def test_every_figure_has_the_blind_guess_and_the_control(page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(figures) == 4
    for figure in figures:
        assert 'class="floor"' in figure
        assert 'class="control"' in figure
        assert "blind guess</text>" in figure
        assert "control</text>" in figure


def test_void_attacks_are_drawn_and_named_as_void(page: str) -> None:
    for figure in re.findall(r"<svg.*?</svg>", page, flags=re.S):
        assert len(re.findall(r'class="s4 void"', figure)) == 2  # oblivious and adaptive, both void
        assert not re.search(r'class="s[0-3] void"', figure)
    assert "Void: fails without any defence too" in page


def test_the_page_is_a_pure_function_of_the_folder(run_folder: Path, page: str) -> None:
    assert render(RunFolder.open(run_folder)) == page


def test_the_page_stays_small(page: str) -> None:
    assert len(page) < 400_000


def test_certificates_stand_with_what_they_rest_on(page: str) -> None:
    part = page[page.index('id="certificates"') : page.index('id="reading"')]
    for said in (
        "the paper&#39;s theorem 1 (fc)",
        "first order",
        "the Lipschitz bound (fc)",
        "The sky is blue.",
        "6e-9",
    ):
        assert said in part


def test_a_figure_that_an_attack_beats_is_an_error_and_not_shown_beside_it() -> None:
    def row(kind: str, mse: float, **more: Any) -> Row:
        return {"kind": kind, "mse": mse, "assumptions": [], "says": "No server gets under this.", **more}

    floor = [row("floor", 0.08, guess="mean", example=i, identified=0.0) for i in range(8)]
    about = {"defense": "d", "round": "first", "weights": "start", "attack": "newton", "details": {}}
    got = [row("attack", 2e-4, example=i, server="oblivious", identified=1.0, **about) for i in range(8)]
    promised = [
        row("meter", 0.063, defense="d", server="whiten"),
        row("meter", 1e-5, defense="d", server="drop"),
        row("certificate", 0.01, defense="d", layer="fc", certificate="global", sound=True),
    ]
    rows = [*floor, *got, *promised]
    table = certificate_table(rows)
    assert table is not None
    beaten, holding, elsewhere = table.rows
    assert beaten[2:4] == ("–", "beaten")
    assert "newton got 0.0002" in beaten[4]
    assert holding[2] == "1e-5"
    close = [*floor, *got, row("meter", 2.5e-4, defense="d", server="whiten")]
    assert figure_errors(close) == []
    assert certificate_table(close).rows[0][2] == "–"  # type: ignore[union-attr]
    assert elsewhere[2] == "–"
    assert "Limits only servers that need the perturbed representation" in elsewhere[4]
    assert figure_errors(rows) == [
        "The leak meter's figure for d (whiten) does not hold: it says 0.063, and newton got 0.0002."
    ]
    single = [row for row in rows if row.get("example", 0) == 0]  # the meter's figure is an average
    assert figure_errors(single) == []
    assert certificate_table(single).rows[0][2] == "–"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mse", "identified", "tier", "wrong"),
    [
        (0.04, 0.0, "adaptive", "The Gaussian floor's figure for d (one update) does not hold: it says 0.05"),
        (0.04, 0.0, "informed", ""),  # it has candidates, which the floor does not speak of
        (0.06, 1.0, "informed", "The guess bound's figure for d (one update) does not hold: it says 0.1, and newton"),
        (0.06, 0.0, "adaptive", ""),
    ],
)
def test_a_proved_bound_that_an_attack_beats_is_an_error(mse: float, identified: float, tier: str, wrong: str) -> None:
    floor = [{"kind": "floor", "mse": 0.08, "guess": "mean", "example": i, "identified": 0.0} for i in range(8)]
    about = {"kind": "attack", "defense": "d", "round": "last", "weights": "d", "attack": "newton", "server": "whiten"}
    got = [about | {"mse": mse, "example": i, "identified": identified, "tier": tier, "details": {}} for i in range(8)]
    head = {"kind": "certificate", "defense": "d", "layer": "one update", "sound": True, "assumptions": [], "says": "."}
    promised: list[Row] = [
        head | {"certificate": "floor", "mse": 0.05, "tiers": ["adaptive"]},
        head | {"certificate": "guess", "mse": None, "chance": 0.1, "tiers": ["adaptive", "informed"]},
    ]
    rows = [*floor, *got, *promised]
    errors = figure_errors(rows)
    assert len(errors) == bool(wrong)
    assert all(error.startswith(wrong) for error in errors)
    table = certificate_table(rows)
    assert table is not None
    assert [row[3] for row in table.rows] == ["beaten" if tier == "adaptive" and wrong else "if Gaussian",
                                              "beaten" if tier == "informed" and wrong else "yes"]  # fmt: skip
    assert ["beaten" in row for row in table.rows].count(True) == len(errors)
    assert [figure for figure, *_ in (row[1:] for row in table.rows)][1] == "the guess bound (one update)"


def test_picks_of_one_update_of_many_are_held_against_as_many_tries() -> None:
    """Each original is paired with the best of all answers: by luck alone some of them pick theirs."""
    floor = [{"kind": "floor", "mse": 0.08, "guess": "mean", "example": i, "identified": 0.0} for i in range(45)]
    about = {"kind": "attack", "defense": "d", "round": "last", "weights": "d", "server": "whiten", "tier": "adaptive"}
    got: list[Row] = [
        about | {"mse": 0.06, "example": i, "identified": float(i < 10), "details": {}, "attack": "newton"}
        for i in range(45)
    ]
    bound = {"kind": "certificate", "certificate": "guess", "defense": "d", "layer": "one update", "sound": True}
    bound |= {"assumptions": [], "says": ".", "mse": None, "chance": 0.036, "tiers": ["adaptive"]}
    client = {"kind": "client", "examples": 45}
    assert figure_errors([*floor, *got, bound, client]) == []
    assert len(figure_errors([*floor, *got, bound, client | {"examples": 1}])) == 1
    listed = [row | {"attack": "candidates"} for row in got]
    assert len(figure_errors([*floor, *listed, bound, client])) == 1
