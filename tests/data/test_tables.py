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


def lines(spec: str) -> dict[str, str]:
    return {one.name: one.line for one in load(spec).columns_read}


def test_rows_without_a_target_are_left_out_and_empty_numbers_filled_in_and_both_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = written(tmp_path, SMALL.replace("41,m", ",m").replace("5.5,yes", "5.5,"))
    with caplog.at_level(logging.INFO, "gradveil"):
        data = load(spec)
    assert len(data.train) + len(data.test) == 5
    assert "1 of 6 rows lack a number or the target" in caplog.text
    assert "age: numbers, 1 empty cells (20.0%) filled with the median" in caplog.text
    assert isinstance(data.modality, Table)
    ages = torch.cat([data.train.batch().inputs, data.test.batch().inputs])[:, 0]
    age = data.modality.columns[0]
    assert sorted(round(age.low + age.span * float(a)) for a in ages) == [30, 52, 52, 63, 74]  # 52 stands twice
    dropped = load(f"{spec},missing=drop")
    assert len(dropped.train) + len(dropped.test) == 4
    marked = load(f"{spec},missing=mark").modality
    assert isinstance(marked, Table)
    assert [(c.name, c.categories) for c in marked.columns[:2]] == [("age is", ("there", "missing")), ("age", ())]


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
    "no target": (SMALL.replace("outcome", "result"), "has no column 'outcome'. It has: age, sex, score, result"),
    "empty": ("", "(it is empty)"),
    "names only": ("age,outcome\n", "patients.csv has no rows"),
    "one class": (SMALL.replace("yes", "no"), "is 'no' in every row: there is one class only"),
    "twice": (SMALL.replace("sex", "age"), "more than one column called 'age'"),
    "mostly no target": ("x,outcome\n1,a\n2,b\n3,\n4,\n5,\n", "3 of the 5 rows of patients.csv lack the target"),
    "no text": ("x\0,outcome\n1,a\n2,b\n", "it holds bytes that are no text"),
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


def test_most_rows_may_lack_a_number_but_where_they_are_to_be_left_out(tmp_path: Path) -> None:
    spec = written(tmp_path, "x,y,outcome\n1,,a\n2,,b\n3,4,a\n5,6,b\n7,8,a\n9,,b\n6,,a\n")
    assert len(load(spec).train) + len(load(spec).test) == 7
    with pytest.raises(DataError, match=r"4 of the 7 rows of patients.csv lack a number or the target, most often 'y'"):
        load(f"{spec},missing=drop")


GERMAN = (
    "Pat-Nr;Alter;Hämoglobin;Größe;Aufnahme;Uhrzeit;Erythrozyten;Anteil;outcome\n"
    "1001;30;13,5;1,72;01.02.2020;08:30;4.500.000;12,5 %;gut\n"
    "1002;41;11,25;1,65;15.02.2020;09:00;5.100.000;7 %;schlecht\n"
    "1003;52;k.A.;1,80;03.03.2021;23:59;4.900.000;3,25 %;gut\n"
    "1004;63;9,0;1,59;28.12.2021;00:15;3.999.999;80 %;schlecht\n"
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16"])
def test_a_file_of_a_german_spreadsheet_is_read_as_it_was_meant(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_bytes(GERMAN.encode(encoding))
    (tmp_path / "b.csv").write_bytes(("sep=;\n" + GERMAN).encode(encoding))
    for name in ("a.csv", "b.csv"):
        data = load(f"table:path={tmp_path}/{name},target=outcome")
        assert isinstance(data.modality, Table)
        held = {c.name: c for c in data.modality.columns}
        assert list(held) == ["Alter", "Hämoglobin", "Größe", "Aufnahme", "Uhrzeit", "Erythrozyten", "Anteil"]
        assert (held["Hämoglobin"].low, held["Hämoglobin"].high) == (9.0, 13.5)
        assert held["Erythrozyten"].high == 5_100_000
        assert held["Anteil"].low == 3.25
        assert held["Größe"].text(0.0) == "1.59"
        assert (held["Aufnahme"].text(0.0), held["Aufnahme"].text(1.0)) == ("2020-02-01", "2021-12-28")
        assert (held["Uhrzeit"].text(0.0), held["Uhrzeit"].text(1.0)) == ("00:15", "23:59")
        said = {one.name: one.line for one in data.columns_read}
        assert said["Pat-Nr"] == "Pat-Nr: left out, a number for each row: an id"
        assert said["Hämoglobin"] == (
            "Hämoglobin: numbers with a decimal comma, 1 marks such as 'k.A.' counted as empty, "
            "1 empty cells (25.0%) filled with the median"
        )
        assert said["outcome"] == "outcome: target, 2 categories: gut, schlecht; 2 classes: gut 50.0%, schlecht 50.0%"
        assert "columns parted by semicolons" in said[name]


@pytest.mark.parametrize(
    ("cells", "how", "low", "high"),
    [
        (("1.5", "2", "-3e1"), "numbers", -30.0, 2.0),
        (('"1,500"', '"12,000.5"', '"7"'), "numbers, thousands apart", 7.0, 12000.5),
        (('"0,5"', '"12,25"', '"7"'), "numbers with a decimal comma", 0.5, 12.25),
        (('"0,5"', '"1.012,25"', '"7"'), "numbers with a decimal comma", 0.5, 1012.25),
        (("1'500", "2'500", "7"), "numbers, thousands apart", 7.0, 2500.0),
        (("12 %", "3%", "4.5 %"), "numbers, in percent", 3.0, 12.0),
        (("0.123", "0.456", "0.5"), "numbers", 0.123, 0.5),
        (("2020-01-02T10:00:00.5Z", "2020-01-01 10:00", "2020-01-03"), "dates, as days", 18262 + 10 / 24, 18264.0),
        (("31/12/2020", "01/12/2020", "05/12/2020"), "dates (the day first), as days", 18597.0, 18627.0),
        (("12/31/2020", "12/01/2020", "12/05/2020"), "dates, as days", 18597.0, 18627.0),
    ],
)
def test_numbers_and_dates_however_they_are_written(
    tmp_path: Path, cells: tuple[str, ...], how: str, low: float, high: float
) -> None:
    rows = "".join(f"{cell},{i},{'yes' if i % 2 else 'no'}\n" for i, cell in enumerate(cells))
    data = load(written(tmp_path, "x,other,outcome\n" + rows))
    assert isinstance(data.modality, Table)
    column = data.modality.columns[0]
    assert (column.name, column.low, column.high) == ("x", pytest.approx(low), pytest.approx(high))
    assert {one.name: one.how for one in data.columns_read}["x"] == how


def test_numbers_with_points_stay_so_beside_semicolons(tmp_path: Path) -> None:
    spec = written(tmp_path, "x;y;outcome\n0.123;1;a\n0.456;2;b\n2.500;3;a\n")
    assert lines(spec)["x"] == "x: numbers"


def test_typed_columns_of_a_data_frame_are_dates_too() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"day": pandas.to_datetime(["2020-01-01", "2020-01-03", None]), "outcome": ["a", "b", "a"]}
    )
    data = from_table("frame", frame, "outcome")
    assert isinstance(data.modality, Table)
    assert (data.modality.columns[0].form, data.modality.columns[0].span) == ("date", 2.0)


def test_ids_row_numbers_and_names_are_left_out_and_said(tmp_path: Path) -> None:
    said = lines(written(tmp_path, many))
    assert said["id"] == "id: left out, 300 different texts in 300 rows: names, or an id"
    counted = "Unnamed: 0,acid,patientId,x,outcome\n" + "".join(
        f"{i},{7 * i % 31},{1000 + 7 * i},{i % 3},{'a' if i % 2 else 'b'}\n" for i in range(30)
    )
    data = load(written(tmp_path, counted))
    assert isinstance(data.modality, Table)
    assert [c.name for c in data.modality.columns] == ["acid", "x"]  # all of acid's differ, and it is no id
    assert "rows' own numbers" in lines(written(tmp_path, counted))["Unnamed: 0"]


def test_rare_categories_are_joined(tmp_path: Path) -> None:
    codes = [f"c{i}" for i in range(300) for _ in range(1 + (i < 250))]
    text = "code,x,outcome\n" + "".join(f"{c},{i % 5},{'a' if i % 2 else 'b'}\n" for i, c in enumerate(codes))
    found = columns(written(tmp_path, text))["code"]
    assert (len(found), "(other)" in found, "c0" in found) == (256, True, True)
    assert "the 255 most frequent of 300" in lines(written(tmp_path, text))["code"]


def test_a_target_of_numbers_is_classes_or_numbers_as_asked(tmp_path: Path) -> None:
    text = "x,outcome\n" + "".join(f"{i % 13},{i % 5}\n" for i in range(60))
    spec = written(tmp_path, text)
    assert load(spec).num_classes == 5
    numbers = load(f"{spec},task=numbers")
    assert numbers.train.labels.is_floating_point()
    assert numbers.fitting_loss("cross_entropy") == "mse"
    comma = written(tmp_path, text.replace(",", ";").replace(";1\n", ";1,5\n").replace(";3\n", ";3,25\n"))
    assert load(comma).train.labels.is_floating_point()
    with pytest.raises(DataError, match="holds 2 categories, no numbers: task=classes"):
        load(written(tmp_path, SMALL) + ",task=numbers")


NOTES = "id,ward,note,label\n" + "".join(
    f'{i},w{i % 3},"the patient number {i} came in, with {"fever" if i % 2 else "a cough"}",{"a" if i % 2 else "b"}\n'
    for i in range(40)
)


def test_a_column_of_texts_beside_few_others_is_the_input(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text(NOTES)
    spec = f"table:path={tmp_path}/notes.csv,target=label"
    data = load(spec)
    assert (data.modality.spec_name, data.default_model) == ("tokens", "bert_tiny")
    shown = data.modality.cells(data.train.batch().inputs[0])
    assert shown is not None
    assert {"patient", "came"} <= {cell.text for cell in shown}
    assert lines(spec)["ward"] == "ward: left out, the data set is of texts"
    table = load(f"{spec},drop=note")
    assert isinstance(table.modality, Table)
    assert [c.name for c in table.modality.columns] == ["ward"]
    wide = NOTES.replace(",w", ",1,2,3,w").replace("1,2,3,ward,", "ward,a,b,c,")
    (tmp_path / "wide.csv").write_text("".join(f"{line}\n" for line in _varied(wide)))
    by_default = f"table:path={tmp_path}/wide.csv,target=label"
    assert isinstance(load(by_default).modality, Table)
    assert lines(by_default)["note"] == "note: left out, free text; text=note makes it the input"
    assert load(f"{by_default},text=note").modality.spec_name == "tokens"


def _varied(text: str) -> list[str]:
    head, *rows = text.splitlines()
    return [head, *(row.replace("1,2,3", f"{i % 7},{i % 5},{i % 9}") for i, row in enumerate(rows))]


def test_a_column_of_texts_with_a_target_of_numbers_is_refused_with_what_to_write(tmp_path: Path) -> None:
    text = NOTES.replace(",a\n", ",0.5\n").replace(",b\n", ",0.75\n").replace("0.5", "0.25", 3)
    (tmp_path / "notes.csv").write_text(text)
    with pytest.raises(DataError, match="--drop note"):
        load(f"table:path={tmp_path}/notes.csv,target=label")


def test_wide_tables_are_told_in_few_lines(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(190)]
    rows = [",".join([*(f"{(i * 7 + k * 3) % 11}" for k in range(190)), "a" if i % 2 else "b"]) for i in range(50)]
    rows[3] = "," + rows[3].partition(",")[2]
    data = load(written(tmp_path, ",".join([*names, "outcome"]) + "\n" + "\n".join(rows) + "\n"))
    told = data.columns_text.splitlines()
    assert len(data.train) + len(data.test) == 50  # 2 % without a number are no reason to refuse
    assert len(told) == 4
    assert told[-1] == "189 more: plain"
    assert len(data.columns_read) == 192
