"""Tables from files: what is read off them, and what is refused in one line."""

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gradveil.data import load
from gradveil.data.known import made_up_patients
from gradveil.data.table import from_table
from gradveil.errors import DataError
from gradveil.modalities.table import Table

SMALL = "age,sex,score,outcome\n30,f,1.5,yes\n41,m,2.5,no\n52,f,0.5,yes\n63,m,3.5,no\n74,,4.5,no\n35,f,5.5,yes\n"


def written(folder: Path, text: str, name: str = "patients.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return f"table:path={path},target=outcome"


def columns(spec: str) -> dict[str, tuple[str, ...]]:
    modality = load(spec).modality
    assert isinstance(modality, Table)
    return {c.name: c.categories for c in modality.columns}


def test_numbers_texts_and_empty_cells_are_read_off_a_csv(tmp_path: Path) -> None:
    data = load(written(tmp_path, SMALL))
    assert isinstance(data.modality, Table)
    age, sex, score = data.modality.columns
    assert (age.low, age.high, age.whole) == (30.0, 74.0, True)
    assert sex.categories == ("f", "m", "(missing)")
    assert (score.mean, score.whole) == (3.0, False)
    assert data.class_names == ("no", "yes")
    inputs = torch.cat([data.train.batch().inputs, data.test.batch().inputs])
    texts = {tuple(cell.text for cell in data.modality.cells(x) or []) for x in inputs}
    expected = {tuple(line.split(",")[:3]) for line in SMALL.splitlines()[1:]}
    assert texts == {(a, s or "(missing)", v) for a, s, v in expected}


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_marks_between_columns_are_found(tmp_path: Path, mark: str) -> None:
    assert list(columns(written(tmp_path, SMALL.replace(",", mark)))) == ["age", "sex", "score"]


def test_parquet_and_a_data_frame_give_the_same_as_csv(tmp_path: Path) -> None:
    table = made_up_patients(60)
    pq.write_table(pa.table(table), tmp_path / "p.parquet")
    by_file = load(f"table:path={tmp_path / 'p.parquet'},target=outcome")
    pandas = pytest.importorskip("pandas")
    by_frame = from_table("frame", pandas.DataFrame(table), "outcome")
    assert by_file.modality == by_frame.modality
    assert np.array_equal(by_file.train.images, by_frame.train.images)
    assert torch.equal(by_file.test.labels, by_frame.test.labels)


def test_columns_are_left_out_and_taken_as_categories_where_they_are_named(tmp_path: Path) -> None:
    spec = written(tmp_path, SMALL)
    assert columns(f"{spec},drop=sex/score,categorical=age") == {"age": ("30", "35", "41", "52", "63", "74")}


def test_rows_without_a_number_or_a_target_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = written(tmp_path, SMALL.replace("41,m", ",m").replace("5.5,yes", "5.5,"))
    with caplog.at_level(logging.INFO, "gradveil"):
        data = load(spec)
    assert len(data.train) + len(data.test) == 4
    assert "2 of 6 rows lack a number or the target" in caplog.text


def test_a_number_as_target_is_standardised_and_two_numbers_are_categories() -> None:
    data = load("diabetes")
    whole = torch.cat([data.train.labels, data.test.labels])
    assert whole.is_floating_point()
    assert abs(float(whole.mean())) < 1e-5
    assert float(whole.std(correction=0)) == pytest.approx(1, abs=1e-4)
    assert isinstance(data.modality, Table)
    assert {c.name: c.categories for c in data.modality.columns if c.categories} == {"sex": ("1", "2")}


def test_the_same_split_comes_every_time() -> None:
    first, again = load("wine"), load("wine")
    assert np.array_equal(first.train.images, again.train.images)


many = "id,x,outcome\n" + "".join(f"p{i},{i % 7},{'yes' if i % 2 else 'no'}\n" for i in range(300))
BAD = {
    "all missing": (SMALL.replace(",f,", ",,").replace(",m,", ",,"), "'sex' of patients.csv is empty in every row"),
    "mixed": (SMALL.replace("2.5", "about 2"), "'score' of patients.csv mixes 5 numbers and 1 texts (e.g. 'about 2')"),
    "too many": (many, "'id' of patients.csv has 300 categories; 256 are the most"),
    "no target": (SMALL.replace("outcome", "result"), "has no column 'outcome'. It has: age, sex, score, result"),
    "empty": ("", "(it is empty)"),
    "names only": ("age,outcome\n", "patients.csv has no rows"),
    "one class": (SMALL.replace("yes", "no"), "is 'no' in every row: there is one class only"),
    "twice": (SMALL.replace("sex", "age"), "more than one column called 'age'"),
    "dates": ("day,outcome\n2020-01-01,a\n2020-01-02,b\n", "holds date32[day], which is neither a number nor"),
    "mostly missing": ("x,y,outcome\n1,,a\n2,,b\n3,4,a\n5,6,b\n7,8,a\n9,,b\n6,,a\n", "4 of the 7 rows of patients.csv"),
    "ragged": ("x,outcome\n1,a\n1,2,b\n", "Cannot read"),
    "nothing to learn from": ("x,outcome\n1,a\n1,b\n", "no column beside 'outcome' that differs"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_tables_are_refused_in_one_line_that_says_where(tmp_path: Path, what: str) -> None:
    text, said = BAD[what]
    with pytest.raises(DataError) as error:
        load(written(tmp_path, text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_million_categories_are_refused() -> None:
    names = pa.array(np.arange(10**6)).cast(pa.string())
    table = pa.table({"name": names, "outcome": pa.array(np.arange(10**6) % 2)})
    with pytest.raises(DataError, match="'name' of t has 1000000 categories"):
        from_table("t", table, "outcome", categorical=("name",))
