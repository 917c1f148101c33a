import io
from pathlib import Path

from rich.console import Console

from gradveil.experiments.judge import verdicts
from gradveil.experiments.rows import best_floor
from gradveil.experiments.run_folder import RunFolder
from gradveil.report.table import verdict_table


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
    ):
        assert said in text
    assert "…" not in text
    assert "but a server that knows the defence gets the images back" in " ".join(text.split())
