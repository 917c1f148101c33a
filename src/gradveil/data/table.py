"""Tables: a CSV or parquet file, or a data frame, with a target column.

What each column was read as (``columns.py``) is kept, to be shown. What a column holds (range, mean, categories) is
read from the whole table, and counts as public.
"""

import codecs
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gradveil.data.base import DATASETS, Array, ColumnRead, Dataset, Source, Split, hold_out, inside
from gradveil.data.columns import Cells, has_decimal_commas, is_free_text, read_column
from gradveil.data.folder import read_parquet
from gradveil.data.text import from_texts
from gradveil.errors import DataError, did_you_mean
from gradveil.files import wrap_parse_errors
from gradveil.imports import Later, calling, import_object, is_import_path
from gradveil.modalities.table import Column, Table
from gradveil.ranges import Between

pa, pc, csv = Later("pyarrow"), Later("pyarrow.compute"), Later("pyarrow.csv")

_LOG = logging.getLogger("gradveil")

MOST_CLASSES = 20  # different whole numbers up to which a target is classes
MOST_COLUMNS = 20_000
FEW_COLUMNS = 3  # beside a column of free text, up to which the text is what the data set is of
_TOO_WIDE = "{name} has {count:,} columns, and the most is " + f"{MOST_COLUMNS:,}. Leave some out of the file."

Missing = Literal["fill", "mark", "drop"]
Task = Literal["auto", "classes", "numbers"]


def from_table(
    name: str,
    table: Any,
    target: str,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    by: str | None = None,
    test_share: float = 0.2,
    *,
    missing: Missing = "fill",
    task: Task = "auto",
    text: str | None = None,
) -> Dataset:
    """Return the data set of a pyarrow table, or of a data frame: rows with ``target`` as what is to be predicted.

    An empty cell of a category is a category of its own. An empty number is filled in (``fill``: the column's median),
    filled in and marked by a column of its own (``mark``), or its row is left out (``drop``); so is a row without a
    target. Columns with one value only, ids and free text are left out; ``text``, or free text beside few columns, is
    the input of a data set of texts. ``task``: whether a target of numbers is classes. Numbers as a target are
    standardised. ``by`` names the column that says where a row comes from, for a natural partition; it is not learned
    from.
    """
    table = _as_arrow(name, table)
    _check_names(name, table, target, categorical, (*drop, *((by,) if by else ()), *((text,) if text else ())))
    cells = {n: table.column(n).combine_chunks() for n in table.column_names if n not in drop}
    comma = has_decimal_commas(table)
    read = {
        n: read_column(name, n, c, categorical=n == by or n in categorical, comma=comma, target=n == target)
        for n, c in cells.items()
        if n != text
    }
    goal, place = read.pop(target), read.pop(by) if by else None
    assert isinstance(goal, Cells)
    assert place is None or isinstance(place, Cells)
    held = {n: one for n, one in read.items() if isinstance(one, Cells)}
    left_out = [one for one in read.values() if isinstance(one, ColumnRead)]
    free = [n for n in cells if n not in (target, by, *categorical) and n not in held and is_free_text(cells[n])]
    if text is None and free and len(held) <= FEW_COLUMNS:
        text = free[0]
    known = _known_rows(name, [goal, *([place] if place else [])], {} if missing != "drop" else held)
    labels, names, told = _labels(name, target, goal.take(known), task)
    about = [_about_rows(name, table, known), ColumnRead(target, "target", f"{goal.how}; {told}"), *left_out]
    if text is not None:
        lost = [ColumnRead(n, "left out", "the data set is of texts") for n in held]
        return _of_texts(name, cells, text, known, names, labels, test_share, (*about, *lost))
    encoded, inputs_read = _encoded({n: one.take(known) for n, one in held.items()}, mark=missing == "mark")
    about += inputs_read
    if not encoded:
        raise DataError(f"{name} has no column beside {target!r} that differs between rows, so nothing to learn from.")
    if place is not None:
        about.append(ColumnRead(str(by), "place", "where a row comes from"))
    inputs = np.concatenate([x for _, x in encoded], axis=1)
    parts = hold_out(labels, test_share)
    train, test = (Split(inputs[i], torch.from_numpy(labels[i]), 1.0) for i in parts)
    places = None if place is None else place.take(known).values[parts[0]]
    rows = Table(tuple(column for column, _ in encoded))
    return Dataset(name, train, test, names, rows, places, columns_read=tuple(about))


def _encoded(held: dict[str, Cells], mark: bool) -> tuple[list[tuple[Column, Array]], list[ColumnRead]]:
    """Return the columns that are learned from, with their part of the rows, and what each was read as."""
    encoded, about = [], []
    for name, one in held.items():
        empty, how = int(one.missing.sum()), one.how
        if empty and not one.categories:
            how += f", {empty} empty cells ({empty / len(one.values):.1%}) filled with the median"
            if mark:
                how += " and marked"
                encoded.append(Cells(one.missing.astype(np.int64), ("there", "missing")).encoded(f"{name} is"))
            one = one.filled()
        elif empty:
            how += f", {empty} empty cells"
        if one.is_constant:
            about.append(ColumnRead(name, "left out", "the same in every row"))
        else:
            encoded.append(one.encoded(name))
            about.append(ColumnRead(name, "input", how))
    return encoded, about


def _labels(table: str, target: str, cells: Cells, task: Task) -> tuple[Array, tuple[str, ...], str]:
    """Return the targets, classes from 0 or standardised numbers, the names of the classes, and what they are."""
    if cells.is_constant:
        what = cells.categories[cells.values[0]] if cells.categories else f"{cells.values[0]:g}"
        raise DataError(
            f"The target {target!r} of {table} is {what!r} in every row: there is one class only, and nothing to learn."
        )
    numbers, places, counts = np.unique(cells.values, return_inverse=True, return_counts=True)
    few = len(numbers) <= MOST_CLASSES and bool((numbers == np.round(numbers)).all())
    if not cells.categories and (task == "numbers" or (task == "auto" and not few)):
        mean, spread = cells.values.mean(), cells.values.std()
        told = f"numbers to predict, standardised (mean {mean:.4g}, deviation {spread:.4g}); task=classes: as classes"
        return ((cells.values - mean) / spread).astype(np.float32), (target,), told
    if task == "numbers":
        raise DataError(f"The target {target!r} of {table} holds {len(numbers)} categories, no numbers: task=classes.")
    if len(numbers) > MOST_CLASSES and not cells.categories and len(numbers) > len(cells.values) / 2:
        raise DataError(f"The target {target!r} of {table} has {len(numbers)} values in as many rows: task=numbers.")
    names = tuple(cells.categories[int(i)] if cells.categories else f"{i:g}" for i in numbers)
    shares = ", ".join(f"{n} {c / len(places):.1%}" for n, c in zip(names, counts, strict=True))
    told = f"{len(names)} classes" + (f": {shares}" if len(names) <= 6 else "")
    return places.astype(np.int64), names, told + ("" if cells.categories else "; task=numbers: as numbers")


def _about_rows(name: str, table: Any, known: Array) -> ColumnRead:
    about = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if k in (b"parted", b"encoding")}
    how = f"{len(known):,} rows"
    if gone := int((~known).sum()):
        how = f"{gone:,} of {len(known):,} rows lack a number or the target, and are left out"
    marks = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
    how += f"; columns parted by {marks[about['parted']]}, in {about['encoding']}" if about else ""
    return ColumnRead(name, "input", how)


def _known_rows(name: str, needed: list[Cells], numbers: dict[str, Cells]) -> Array:
    """Return which rows have what is needed, and every number of these columns; raise where most have not."""
    empty = {n: one.missing for n, one in numbers.items() if not one.categories}
    known: Array = ~np.any([*(one.missing for one in needed), *empty.values()], axis=0)
    if (gone := int((~known).sum())) > len(known) / 2:
        worst = max(empty, key=lambda n: int(empty[n].sum()), default="the target")
        what = f"a number or the target, most often {worst!r}" if empty else "the target, or where they come from"
        raise DataError(
            f"{gone} of the {len(known)} rows of {name} lack {what}. Fill them in (missing=fill does so with numbers), "
            f"or leave a column out (--drop {worst})."
        )
    return known


def _of_texts(
    name: str, cells: dict[str, Any], text: str, known: Array, names: tuple[str, ...], labels: Array, share: float,
    about: tuple[ColumnRead, ...],
) -> Dataset:  # fmt: skip
    if labels.dtype != np.int64:
        raise DataError(
            f"{name}: column {text!r} is free text, and texts are told to classes, not numbers. Give another --target, "
            f"or leave the text out: --drop {text}."
        )
    texts = [one or "" for one in cells[text].filter(pa.array(known)).to_pylist()]
    made = from_texts(name, texts, [names[i] for i in labels], test_share=share)
    return replace(made, columns_read=(*about, ColumnRead(text, "input", "free text, word by word")))


def _check_names(name: str, table: Any, target: str, categorical: Sequence[str], drop: Sequence[str]) -> None:
    names = table.column_names
    if table.num_rows == 0:
        raise DataError(f"{name} has no rows.")
    if len(names) > MOST_COLUMNS:
        raise DataError(_TOO_WIDE.format(name=name, count=len(names)))
    for column in (target, *categorical, *drop):
        if column not in names:
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise DataError(f"{name} has no column {column!r}. {did_you_mean(column, names)}It has: {shown}.")
    if twice := sorted(n for n, count in Counter(names).items() if count > 1):
        raise DataError(f"{name} has more than one column called {twice[0]!r}. Give each a name of its own.")
    if target in drop:
        raise DataError(f"The target {target!r} of {name} cannot be left out.")


def _as_arrow(name: str, table: Any) -> Any:
    if isinstance(table, pa.Table):
        return table
    try:
        return pa.table(table) if isinstance(table, dict) else pa.Table.from_pandas(table, preserve_index=False)
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0][:150]
        raise DataError(
            f"{name} gave a {type(table).__name__} that is no table ({reason}). Give a pandas data frame of numbers "
            "and texts, or a pyarrow table."
        ) from error


def read_table(path: Path) -> Any:
    """Return a CSV or parquet file as a pyarrow table; the columns of a CSV are texts, as they stand there.

    Columns may be parted by commas, semicolons, tabs or bars, and the text be UTF-8, UTF-16 or Windows-1252 (latin-1).
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    if path.suffix.lower() in (".parquet", ".pq"):
        return read_parquet([path])
    try:
        encoding = _encoding(path)
        with path.open(encoding=encoding) as file:
            head = file.readline()
            told = re.match("sep=(.)$", head.strip().removeprefix("\ufeff"))  # how Excel says what parts columns
            head = file.readline() if told else head
        bare = re.sub('"[^"]*"', "", head)
        parted = told[1] if told else max(",;\t|", key=bare.count)
        if (count := bare.count(parted) + 1) > MOST_COLUMNS:
            raise DataError(_TOO_WIDE.format(name=path, count=count))
        parsing = csv.ParseOptions(delimiter=parted, newlines_in_values=True)
        reading = csv.ReadOptions(encoding=encoding.removesuffix("-sig"), skip_rows=1 if told else 0)
        names = csv.open_csv(path, reading, parsing).schema.names
        texts = csv.ConvertOptions(strings_can_be_null=True, column_types=dict.fromkeys(names, pa.string()))
        words = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252", "latin-1": "latin-1"}
        return csv.read_csv(path, reading, parsing, texts).replace_schema_metadata(
            {"parted": parted, "encoding": words[encoding]}
        )
    except (UnicodeError, pa.ArrowException) as error:
        reason = "it is empty" if not path.stat().st_size else str(error).splitlines()[0]
        raise DataError(f"Cannot read {path} as a table ({reason}). Give a CSV file with a line of names.") from error


def _encoding(path: Path) -> str:
    """Return in which encoding a file is text; raise where it is none."""
    decoders = {name: codecs.getincrementaldecoder(name)() for name in ("utf-8-sig", "cp1252")}
    with path.open("rb") as file:
        while part := file.read(2**20):
            if part.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and file.tell() == len(part):
                return "utf-16"
            if b"\0" in part:
                raise UnicodeError("it holds bytes that are no text")
            for name in tuple(decoders):
                try:
                    decoders[name].decode(part)
                except UnicodeDecodeError:
                    del decoders[name]
    return next(iter(decoders), "latin-1")


@DATASETS.register("table")
@dataclass(frozen=True)
class TableFile(Source):
    """Your own table: ``table:path=patients.csv,target=outcome``, CSV or parquet.

    The path may be ``module:function``, which returns a data frame. A share of the rows is set aside for the test.
    """

    path: str = ""
    target: str = ""  # the column to predict
    categorical: tuple[str, ...] = ()  # columns of numbers that are categories
    drop: tuple[str, ...] = ()  # columns to leave out
    by: str | None = None  # the column that says where a row comes from, for partition=natural
    missing: Missing = "fill"  # of numbers: the median, the median and a mark, or no such row
    task: Task = "auto"  # whether a target of numbers is classes; auto: few whole numbers are
    text: str | None = None  # the column of texts that is the input; None: free text beside few columns
    test_share: Between = 0.2

    def load(self, data: Path | None) -> Dataset:
        if not self.path or not self.target:
            raise DataError("A table needs its file and its target: --dataset patients.csv --target outcome.")
        rest = (self.target, self.categorical, self.drop, self.by, self.test_share)
        more: dict[str, Any] = {"missing": self.missing, "task": self.task, "text": self.text}
        with calling(f"The table {self.path} cannot be made", DataError):
            made = (
                from_table(self.path, import_object(self.path)(), *rest, **more) if is_import_path(self.path) else None
            )
        if made is None:
            path = inside(data, self.path)
            table = read_table(path)
            with wrap_parse_errors(path.name, DataError, "Write it again, its texts in UTF-8."):
                made = from_table(path.name, table, *rest, **more)
        for line in made.columns_text.splitlines():
            _LOG.info("%s", line)
        return made
