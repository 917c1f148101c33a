import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gradveil.auditing.run_folder import RunFolder
from gradveil.report.table import verdict_table
from gradveil.threats.rows import best_floor
from gradveil.threats.verdict import verdicts


def test_the_table_fits_eighty_columns_and_says_it_all(run_folder: Path) -> None:
    rows = RunFolder.open(run_folder).rows
    screen = io.StringIO()
    Console(file=screen, width=80).print(verdict_table(verdicts(rows), best_floor(rows)))
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for said in (
        "representation",
        "share=0.4",
        "Images recovered",
        "mask + newton",
        "void",
        "blind guess",
        "93.0%",
        "8/8",
        "proved",
        "nothing",
    ):
        assert said in text
    assert "…" not in text
    assert "but a server that knows the defence gets the images back" in " ".join(text.split())


def test_a_sentence_that_holds_for_several_defences_is_said_once(run_folder: Path) -> None:
    found = verdicts(RunFolder.open(run_folder).rows)[:2]
    both = "An informed server gets the images back."
    told = [replace(v, text=f"{v.defense} has words of its own. {both} Accuracy 9{i}.0%.") for i, v in enumerate(found)]
    screen = io.StringIO()
    Console(file=screen, width=400).print(verdict_table(told, None))
    lines = [line.strip() for line in screen.getvalue().splitlines()]
    first, second = (v.defense for v in told)
    assert f"{first}: {first} has words of its own. Accuracy 90.0%." in lines
    assert f"{first}, {second}: {both}" in lines
    assert f"{second}: {second} has words of its own. Accuracy 91.0%." in lines
