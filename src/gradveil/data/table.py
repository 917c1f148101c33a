"""Tables: a CSV or parquet file, or a data frame, with a target column.

Kinds of columns are read off: texts and truths are categories, numbers are numbers unless there are two of them only,
or the column is named as categorical. What a column holds (range, mean, categories) is read from the whole table, and
counts as public.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.data.base import DATASETS, Array, Dataset, Source, Split, hold_out
from gradveil.data.folder import read_parquet
from gradveil.errors import DataError, did_you_mean
from gradveil.files import wrap_parse_errors
from gradveil.imports import calling, import_object, is_import_path
from gradveil.modalities.table import Column, Table
from gradveil.ranges import Between

MOST_CATEGORIES = 256  # of a column; with more it is a name or a number of a person, or free text
MOST_CLASSES = 20  # different whole numbers up to which a target is classes
MOST_COLUMNS = 20_000
_TOO_WIDE = "{name} has {count:,} columns, and the most is " + f"{MOST_COLUMNS:,}. Leave some out of the file."
MISSING = "(missing)"  # the category of an empty cell
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_LOG = logging.getLogger("gradveil")


def from_table(
    name: str,
    table: Any,
    target: str,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    by: str | None = None,
    test_share: float = 0.2,
) -> Dataset:
    """Return the data set of a pyarrow table, or of a data frame: rows with ``target`` as what is to be predicted.

    An empty cell of a category is a category of its own; a row with an empty number or target is left out, and how many
    were is said. Columns with one value only are left out. Numbers as a target are standardised. ``by`` names the
    column that says where a row comes from, for a natural partition; it is not learned from.
    """
    table = _as_arrow(name, table)
    _check_names(name, table, target, categorical, (*drop, *([by] if by else ())))
    kept = [n for n in table.column_names if n not in drop]
    read = {n: _column(name, n, table.column(n), n == by or n in categorical) for n in kept}
    missing = {n: one.missing for n, one in read.items() if n in (target, by) or not one.categories}
    whole = ~np.any(list(missing.values()), axis=0)
    if (gone := int((~whole).sum())) > table.num_rows / 2:
        worst = max(missing, key=lambda n: int(missing[n].sum()))
        raise DataError(
            f"{gone} of the {table.num_rows} rows of {name} lack a number or the target, most often {worst!r} "
            f"({int(missing[worst].sum())} empty cells). Fill them in, or leave the column out (--drop {worst})."
        )
    if gone:
        _LOG.info("%s: %d of %d rows lack a number or the target, and are left out", name, gone, table.num_rows)
    labels, names = _labels(name, target, read.pop(target).take(whole))
    places = read.pop(by).take(whole).values if by else None
    held = {n: one.take(whole) for n, one in read.items()}
    if same := [n for n, one in held.items() if one.is_constant]:
        _LOG.info("%s: every row has the same value in %s: left out", name, ", ".join(same))
    encoded = [one.encoded(n) for n, one in held.items() if n not in same]
    if not encoded:
        raise DataError(f"{name} has no column beside {target!r} that differs between rows, so nothing to learn from.")
    inputs = np.concatenate([x for _, x in encoded], axis=1)
    parts = hold_out(labels, test_share)
    train, test = (Split(inputs[i], torch.from_numpy(labels[i]), 1.0) for i in parts)
    table = Table(tuple(column for column, _ in encoded))
    return Dataset(name, train, test, names, table, None if places is None else places[parts[0]])


@dataclass(frozen=True)
class _Cells:
    """One column as read: numbers (N,), or places (N,) among its categories; -1 and NaN where a cell is empty."""

    values: Array
    categories: tuple[str, ...] = ()  # none: numbers

    @property
    def missing(self) -> Array:
        """Where cells are empty (N,)."""
        empty: Array = self.values < 0 if self.categories else np.isnan(self.values)
        return empty

    @property
    def is_constant(self) -> bool:
        """Whether all rows have the same."""
        return bool((self.values == self.values[0]).all())

    def take(self, rows: Array) -> "_Cells":
        """Return the cells of these rows."""
        return _Cells(self.values[rows], self.categories)

    def encoded(self, name: str) -> tuple[Column, Array]:
        """Return what the column is, and its part of the rows (N, width)."""
        if self.categories:
            there = (*self.categories, MISSING) if self.missing.any() else self.categories
            return Column(name, there), np.eye(len(there), dtype=np.float32)[self.values]
        x = self.values.astype(np.float64)
        whole = bool((x == np.round(x)).all())
        column = Column(name, (), float(x.min()), float(x.max()), float(x.mean()), float(x.std()), whole)
        return column, ((x - column.low) / column.span).astype(np.float32)[:, None]


def _column(table: str, name: str, cells: Any, categorical: bool) -> _Cells:
    """Return a column's cells, by what they are."""
    from pyarrow import types

    cells = cells.combine_chunks()
    if types.is_dictionary(cells.type):
        categorical, cells = True, cells.dictionary_decode()
    if types.is_string(cells.type) or types.is_large_string(cells.type):
        cells = _texts(table, name, cells, categorical)
    kind = cells.type
    if cells.null_count == len(cells):
        raise DataError(f"Column {name!r} of {table} is empty in every row. Leave it out: --drop {name}.")
    if types.is_decimal(kind) or types.is_integer(kind) or types.is_floating(kind):
        return _numbers(table, name, cells, categorical)
    if types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind):
        return _categories(table, name, cells)
    raise DataError(
        f"Column {name!r} of {table} holds {kind}, which is neither a number nor a category. Turn it into one, or "
        f"leave it out: --drop {name}."
    )


def _texts(table: str, name: str, cells: Any, categorical: bool) -> Any:
    """Return texts without what stands for nothing; as numbers where all of them are and no categories are wanted."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = pc.utf8_trim_whitespace(cells)
    cells = pc.if_else(pc.is_in(cells, pa.array(["", "?"], cells.type)), pa.scalar(None, cells.type), cells)
    is_number = pc.match_substring_regex(cells, _NUMBER)
    count, known = pc.sum(is_number).as_py() or 0, len(cells) - cells.null_count
    if categorical or not count:
        return cells
    if count < known:
        odd = pc.filter(cells, pc.invert(pc.fill_null(is_number, True)))[0].as_py()
        raise DataError(
            f"Column {name!r} of {table} mixes {count} numbers and {known - count} texts (e.g. {odd[:40]!r}). Make it "
            f"one kind, or take all as categories: --categorical {name}."
        )
    return cells.cast(pa.float64())


def _numbers(table: str, name: str, cells: Any, categorical: bool) -> _Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(cells.type):
        cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, cells.type), cells)
    if categorical or len(pc.drop_null(pc.unique(cells))) == 2:
        return _categories(table, name, cells)
    values = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if np.isnan(values).all() or np.isinf(values).any():
        what = "infinite numbers" if np.isinf(values).any() else "no number in any row"
        raise DataError(f"Column {name!r} of {table} holds {what}. Mend it, or leave it out: --drop {name}.")
    return _Cells(values)


def _categories(table: str, name: str, cells: Any) -> _Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    there = pc.drop_null(pc.unique(cells))
    if len(there) > MOST_CATEGORIES:
        raise DataError(
            f"Column {name!r} of {table} has {len(there)} categories; {MOST_CATEGORIES} are the most. Names and "
            f"numbers of people are no categories: leave it out (--drop {name}), or join rare ones."
        )
    there = there.take(pc.sort_indices(there))
    places = pc.fill_null(pc.index_in(cells, there), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _Cells(places, tuple(there.cast(pa.string()).to_pylist()))


def _labels(table: str, target: str, cells: _Cells) -> tuple[Array, tuple[str, ...]]:
    """Return the targets, classes from 0 or standardised numbers, and the names of the classes."""
    if cells.is_constant:
        what = cells.categories[cells.values[0]] if cells.categories else f"{cells.values[0]:g}"
        raise DataError(
            f"The target {target!r} of {table} is {what!r} in every row: there is one class only, and nothing to learn."
        )
    if cells.categories:
        used, places = np.unique(cells.values, return_inverse=True)
        return places.astype(np.int64), tuple(cells.categories[i] for i in used)
    numbers, places = np.unique(cells.values, return_inverse=True)
    if len(numbers) <= MOST_CLASSES and (numbers == np.round(numbers)).all():
        return places.astype(np.int64), tuple(f"{n:g}" for n in numbers)
    scaled = (cells.values - cells.values.mean()) / cells.values.std()
    return scaled.astype(np.float32), (target,)


def _check_names(name: str, table: Any, target: str, categorical: Sequence[str], drop: Sequence[str]) -> None:
    """Raise unless the table has rows, and the columns that are named."""
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
    import pyarrow as pa

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
    """Return a CSV or parquet file as a pyarrow table; a CSV's columns may be parted by commas, semicolons or tabs."""
    import pyarrow as pa
    from pyarrow import csv

    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    if path.suffix.lower() in (".parquet", ".pq"):
        return read_parquet([path])
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.readline()
        parted = max(",;\t", key=head.count)
        if (count := head.count(parted) + 1) > MOST_COLUMNS:
            raise DataError(_TOO_WIDE.format(name=path, count=count))
        return csv.read_csv(
            path,
            parse_options=csv.ParseOptions(delimiter=parted),
            convert_options=csv.ConvertOptions(strings_can_be_null=True),
        )
    except (UnicodeDecodeError, pa.ArrowException) as error:
        reason = "it is empty" if not path.stat().st_size else str(error).splitlines()[0]
        raise DataError(
            f"Cannot read {path} as a table ({reason}). Give a CSV file in UTF-8 with a line of names."
        ) from (error)


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
    test_share: Between = 0.2

    def load(self, data: Path | None) -> Dataset:
        """Return the table's data set."""
        if not self.path or not self.target:
            raise DataError("A table needs its file and its target: --dataset patients.csv --target outcome.")
        rest = (self.target, self.categorical, self.drop, self.by, self.test_share)
        if is_import_path(self.path):
            with calling(f"The table {self.path} cannot be made", DataError):
                return from_table(self.path, import_object(self.path)(), *rest)
        path = Path(self.path).expanduser()
        if data is not None and not path.is_file() and (data / path).is_file():
            path = data / path
        table = read_table(path)
        with wrap_parse_errors(path.name, DataError, "Write it again, its texts in UTF-8."):
            return from_table(path.name, table, *rest)
