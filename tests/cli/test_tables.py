"""Tables on the command line: from a CSV to a report, and bad input in one line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.data.known import HOSPITALS, made_up_patients

Run = Callable[..., tuple[int, str, str]]
TABLE = ("--dataset", "patients.csv", "--target", "outcome")
SHORT = (
    "--rounds",
    "1",
    "--images",
    "2",
    "--no-meter",
    "--attack",
    "tableak:steps=100,starts=2",
    "--attack",
    "analytic",
)


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """Three hundred made-up patients as a file."""
    table = made_up_patients(300)
    path = tmp_path / "patients.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def test_an_audit_of_a_csv_ends_in_a_report_about_rows(command: Run, patients: Path, tmp_path: Path) -> None:
    defenses = ("--defense", "none", "--defense", "gaussian:scale=0.1")
    code, out, err = command("audit", *TABLE, *SHORT, *defenses, "--by", "hospital", "--out", "run", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["settings"]["model"] == "mlp"
    assert told["settings"]["partition"] == "natural"
    (control,) = [v for v in told["verdicts"] if v["defense"] == "none"]
    assert control["outcome"] == "recovered"  # analytic is exact on one row
    assert "gets the rows back (cells wrong 0" in control["text"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "blood_pressure" in page
    assert 'class="got"' in page
    assert "Column by column" in page
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    (sure,) = {
        len(row["confidence"]) for row in rows if row["kind"] == "attack" and row["attack"].startswith("tableak")
    }
    assert sure == 10  # columns beside the target and the hospital
    visible = page.partition("<body>")[2].partition('id="run"')[0]
    assert "image" not in visible.replace("--images", "")  # an option of the recommended command
    assert "pixel" not in visible
    assert "data:image" not in visible


def test_training_by_hospital_gives_each_hospital_its_own_rows(command: Run, patients: Path) -> None:
    local = ("--rounds", "2", "--clients", str(len(HOSPITALS)), "--out", "run", "--json")
    code, out, err = command("train", *TABLE, "--by", "hospital", *local)
    assert code == 0, err
    assert json.loads(out)["rounds"] == 2
    code, _, err = command("train", *TABLE, "--by", "hospital", "--clients", "6", "--out", "other")
    assert code == 2
    assert "6" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dataset", "patients.csv"), "give --target COLUMN as well"),
        (("--dataset", "digits", "--target", "outcome"), "give --dataset FILE.csv as well"),
        (("--dataset", "nobody.csv", "--target", "outcome"), "There is no file nobody.csv"),
        (("--dataset", "patients.csv", "--target", "outcom"), "Did you mean 'outcome'?"),
        ((*TABLE, "--categorical", "agee"), "has no column 'agee'. Did you mean 'age'?"),
        ((*TABLE, "--drop", "outcome"), "cannot be left out"),
        ((*TABLE, "--by", "clinic"), "has no column 'clinic'"),
        ((*TABLE, "--partition", "natural"), "Give a table with --by COLUMN"),
        (("--dataset", "digits", "--partition", "natural"), "Give a table with --by COLUMN"),
        (("--dataset", "diabetes", "--loss", "bce"), "bce takes targets of 0 and 1"),
        (("--dataset", "patients.csv", "--target", "age,sex"), "has a comma or an equals sign"),
        (("--dataset", "breast_cancer", "--attack", "tableak", "--images", "9999"), "9999 rows were asked for"),
    ],
)
def test_bad_options_are_one_line(command: Run, patients: Path, options: tuple[str, ...], said: str) -> None:
    code, _, err = command("audit", *options, "--out", "run")
    assert code == 2
    *columns, last = err.splitlines()  # what each column was read as comes first, where the file could be read
    assert said in last
    assert last.startswith("gradveil: ")
    assert not any(line.startswith(("gradveil:", "Traceback")) for line in columns)
    assert not Path("run").exists()


def test_a_function_may_give_a_data_frame(command: Run, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    source = "import pandas\nfrom gradveil.data.known import made_up_patients\n"
    source += "def frame():\n    return pandas.DataFrame(made_up_patients(200))\n"
    (tmp_path / "my_frame_of_patients.py").write_text(source)
    local = ("--rounds", "1", "--clients", "2", "--out", "run", "--json")
    code, _, err = command("train", "--dataset", "my_frame_of_patients:frame", "--target", "outcome", *local)
    assert code == 0, err
