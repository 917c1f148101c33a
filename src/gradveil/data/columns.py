"""One column of a table: what its cells are (numbers, categories, dates, ids, free text), and what it was read as.

A file's cells are texts. A column is numbers where every cell is one, written with a decimal point or a decimal comma;
dates and times where every cell is one; else categories. Two numbers, and texts, are categories.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gradveil.data.base import Array, ColumnRead
from gradveil.errors import DataError
from gradveil.imports import Later
from gradveil.modalities.table import Column

pa, pc, types = Later("pyarrow"), Later("pyarrow.compute"), Later("pyarrow.types")

MOST_CATEGORIES = 256  # of a column; rarer ones are joined
MISSING, OTHER = "(missing)", "(other)"  # the categories of an empty cell, and of all rare ones
WORDS = 4  # on the mean, from which texts that differ are free text
_MARKS = ("-", "--", "–", ".", "na", "n.a.", "n/a", "k.a.", "k. a.", "none", "null")  # empty, among numbers
_EXPONENT = r"([eE][+-]?\d+)?$"
_POINT = r"^[+-]?(\d+\.?\d*|\.\d+)" + _EXPONENT
_THOUSANDS = r"^[+-]?(\d{1,3}([,' ]\d{3})+|\d+)(\.\d*)?" + _EXPONENT
_COMMA = r"^[+-]?(([1-9]\d{0,2}([. ]\d{3})+|\d+)(,\d*)?|,\d+)" + _EXPONENT
_SURELY_COMMA = r"^[+-]?(\d+,(\d{1,2}|\d{4,})|0,\d+)$"
_ANY_COMMA = r"^[+-]?\d*,\d+$"
_CLOCK = r"( \d{1,2}:\d\d(:\d\d)?)?"
_DATES = (  # how a cell looks, and how its date is written; the day comes first where it may
    (rf"^\d{{4}}-\d\d-\d\d{_CLOCK}$", ("%Y-%m-%d",)),
    (rf"^\d{{4}}/\d\d/\d\d{_CLOCK}$", ("%Y/%m/%d",)),
    (rf"^\d{{1,2}}\.\d{{1,2}}\.\d{{4}}{_CLOCK}$", ("%d.%m.%Y",)),
    (rf"^\d{{1,2}}/\d{{1,2}}/\d{{4}}{_CLOCK}$", ("%d/%m/%Y", "%m/%d/%Y")),
    (r"^\d{1,2}:\d\d(:\d\d)?$", ("",)),
)
_ZONE = r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?([.,]\d+)?\s*(Z|[+-]\d\d:?\d\d)?$"
_ID = re.compile(
    r"(?i:(^|[\s_.-])(id|uuid|guid|mrn|nr|no|nummer|number)\.?$)|[a-z](Id|ID|Nr)$"
    r"|(?i:^(unnamed: ?\d+|index|row|zeile|name|(patient|fall|case|record|subject)[\s_.-]?(id|nr|no|nummer|number)?)$)"
)
_ROW_NUMBERS = 20  # rows from which numbers that go up by one are those of the rows
Form = Literal["", "date", "time"]


@dataclass(frozen=True)
class Cells:
    """One column as read: numbers (N,), or places (N,) among its categories; -1 and NaN where a cell is empty."""

    values: Array
    categories: tuple[str, ...] = ()  # none: numbers
    how: str = ""  # it was read, in words
    form: Form = ""  # what the numbers stand for: days since 1970, hours of a day

    @property
    def missing(self) -> Array:
        """Where cells are empty (N,)."""
        empty: Array = self.values < 0 if self.categories else np.isnan(self.values)
        return empty

    @property
    def is_constant(self) -> bool:
        return bool((self.values == self.values[0]).all())

    def take(self, rows: Array) -> "Cells":
        return replace(self, values=self.values[rows])

    def filled(self) -> "Cells":
        """Return numbers with the median, one that stands in the column, in the place of empty cells."""
        known = self.values[~self.missing]
        middle = np.sort(known)[(len(known) - 1) // 2]
        return replace(self, values=np.where(self.missing, middle, self.values))

    def encoded(self, name: str) -> tuple[Column, Array]:
        """Return what the column is, and its part of the rows (N, width)."""
        if self.categories:
            there = (*self.categories, MISSING) if self.missing.any() else self.categories
            return Column(name, there), np.eye(len(there), dtype=np.float32)[self.values]
        x = self.values.astype(np.float64)
        whole = bool((x == np.round(x)).all())
        column = Column(name, (), float(x.min()), float(x.max()), float(x.mean()), float(x.std()), whole, self.form)
        return column, ((x - column.low) / column.span).astype(np.float32)[:, None]


def has_decimal_commas(table: Any) -> bool:
    """Return whether some cell can only be a number with a decimal comma; where semicolons part, any comma is one."""
    kind = _ANY_COMMA if (table.schema.metadata or {}).get(b"parted") == b";" else _SURELY_COMMA
    texts = (table.column(i) for i, t in enumerate(table.schema.types) if types.is_string(t))
    return any(pc.any(pc.match_substring_regex(pc.utf8_trim_whitespace(t), kind)).as_py() for t in texts)


def read_column(
    table: str, name: str, cells: Any, *, categorical: bool = False, comma: bool = False, target: bool = False
) -> "Cells | ColumnRead":
    """Return a column's cells, by what they are; or, but of a target, why it is left out.

    ``categorical``: whatever is in it; ``comma``: the file has decimal commas.
    """
    if types.is_dictionary(cells.type):
        categorical, cells = True, cells.dictionary_decode()
    if types.is_large_string(cells.type) or types.is_null(cells.type):
        cells = cells.cast(pa.string())
    if types.is_string(cells.type):
        cells = _trimmed(cells)
    if cells.null_count == len(cells):
        raise DataError(f"Column {name!r} of {table} is empty in every row. Leave it out: --drop {name}.")
    if types.is_temporal(cells.type) and not categorical:
        return _typed_dates(cells)
    if categorical or types.is_boolean(cells.type):
        return _categories(table, name, cells)
    found, how = _read_texts(table, name, cells, comma) if types.is_string(cells.type) else (cells, "numbers")
    if isinstance(found, Cells):
        return found
    if found is None:
        return _categories(table, name, cells) if target else _names(table, name, cells)
    if not (types.is_decimal(found.type) or types.is_integer(found.type) or types.is_floating(found.type)):
        raise DataError(
            f"Column {name!r} of {table} holds {cells.type}, which is neither a number nor a category. Turn it into "
            f"one, or leave it out: --drop {name}."
        )
    numbers = _numbers(table, name, found, how)
    return numbers if target or numbers.categories else _id_of_rows(name, numbers.values) or numbers


def is_free_text(cells: Any) -> bool:
    """Return whether a column of texts is prose: of several words, and mostly different from row to row."""
    if not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        return False
    known = pc.drop_null(_trimmed(cells))
    words = pc.mean(pc.add(pc.count_substring_regex(known, r"\s+"), 1)).as_py() or 0
    return len(known) > 1 and words >= WORDS and pc.count_distinct(known).as_py() >= max(3, len(known) / 2)


def _trimmed(cells: Any) -> Any:
    cells = pc.utf8_trim_whitespace(cells)
    return pc.if_else(pc.is_in(cells, pa.array(["", "?"], cells.type)), pa.scalar(None, cells.type), cells)


def _all(cells: Any, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(cells, pattern)).as_py())  # empty cells do not count


def _read_texts(table: str, name: str, cells: Any, comma: bool) -> tuple[Any, str]:
    """Return texts as numbers, with how they were written, or as dates; nothing where they are neither."""
    empty = pc.is_in(pc.utf8_lower(cells), pa.array(_MARKS, cells.type))
    plain = pc.if_else(empty, pa.scalar(None, cells.type), cells)
    if plain.null_count < len(plain) and (found := _as_numbers(plain, comma)) is not None:
        marks = plain.null_count - cells.null_count
        odd = pc.filter(cells, pc.fill_null(empty, False))
        return found[0], found[1] + (f", {marks} marks such as {odd[0].as_py()!r} counted as empty" if marks else "")
    if (dates := _as_dates(cells)) is not None:
        return dates, ""
    is_number = pc.match_substring_regex(plain, f"{_POINT}|{_COMMA}")
    count, known = pc.sum(is_number).as_py() or 0, len(plain) - plain.null_count
    if 0 < known <= 2 * count:
        odd = pc.filter(plain, pc.invert(pc.fill_null(is_number, True)))[0].as_py()
        raise DataError(
            f"Column {name!r} of {table} mixes {count} numbers and {known - count} texts (e.g. {odd[:40]!r}). Make it "
            f"one kind, take all as categories (--categorical {name}), or leave it out (--drop {name})."
        )
    return None, ""


def _as_numbers(cells: Any, comma: bool) -> tuple[Any, str] | None:
    """Return texts as numbers and how they were written, where all of them are numbers."""
    cells = pc.replace_substring(cells, "−", "-")
    percent = _all(cells, r"%$")
    if percent:
        cells = pc.utf8_rtrim(cells, "% ")
    ways = [
        ("numbers", _POINT, ""),
        ("numbers, thousands apart", _THOUSANDS, "[,' ]"),
        ("numbers with a decimal comma", _COMMA, "[. ]"),
    ]
    for how, pattern, thousands in (ways[2], *ways[:2]) if comma else ways:
        if not _all(cells, pattern):
            continue
        if "comma" in how:
            if comma and _all(cells, r"^[+-]?\d+$"):
                how = "numbers"
            elif not pc.any(pc.match_substring(cells, ",")).as_py():
                how = "numbers, thousands apart"
        plain = pc.replace_substring_regex(cells, thousands, "") if thousands else cells
        return pc.replace_substring(plain, ",", ".").cast(pa.float64()), how + (", in percent" if percent else "")
    return None


def _as_dates(cells: Any) -> Cells | None:
    cells = pc.replace_substring_regex(cells, _ZONE, r"\1 \2\3")
    for pattern, ways in _DATES:
        if not _all(cells, pattern):
            continue
        clock = pc.replace_substring_regex(cells, r"^\S+ |^\S+[-./]\S+$", "")
        clock = pc.replace_substring_regex(clock, r"^(\d{1,2}:\d\d)$", r"\1:00")
        midnight = pa.scalar("00:00:00", pa.string())
        clock = pc.if_else(pc.equal(clock, ""), midnight, clock)
        for way in ways:
            day = pc.replace_substring_regex(cells, r" .*$", "") if way else pa.array(["1970-01-01"] * len(cells))
            whole = pc.binary_join_element_wise(day, clock, " ")
            parsed = pc.strptime(whole, format=f"{way or '%Y-%m-%d'} %H:%M:%S", unit="s", error_is_null=True)
            if parsed.null_count == cells.null_count:
                unclear = " (the day first)" if way == "%d/%m/%Y" else ""
                return _dated(parsed, "date" if way else "time", unclear)
    return None


def _typed_dates(cells: Any) -> Cells:
    if types.is_time(cells.type):
        return _dated(cells.cast(pa.time64("us")).cast(pa.int64()).cast(pa.timestamp("us")), "time")
    if types.is_duration(cells.type):
        return replace(_dated(cells.cast(pa.int64()).cast(pa.timestamp(cells.type.unit)), "date"), form="", how="days")
    return _dated(cells.cast(pa.timestamp("us"), safe=False), "date")


def _dated(moments: Any, form: Form, unclear: str = "") -> Cells:
    seconds = moments.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).cast(pa.float64())
    values = seconds.to_numpy(zero_copy_only=False) / (86400 if form == "date" else 3600)
    words = {"date": f"dates{unclear}, as days", "time": "times, as hours"}[form]
    return Cells(values, (), words, form)


def _numbers(table: str, name: str, cells: Any, how: str) -> Cells:
    if types.is_floating(cells.type):
        cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, cells.type), cells)
    if len(pc.drop_null(pc.unique(cells))) == 2:
        return _categories(table, name, cells)
    values = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if np.isnan(values).all() or np.isinf(values).any():
        what = "infinite numbers" if np.isinf(values).any() else "no number in any row"
        raise DataError(f"Column {name!r} of {table} holds {what}. Mend it, or leave it out: --drop {name}.")
    return Cells(values, (), how)


def _id_of_rows(name: str, values: Array) -> ColumnRead | None:
    if len(values) < 3 or (values != np.round(values)).any() or len(np.unique(values)) < len(values):
        return None
    if len(values) >= _ROW_NUMBERS and (np.diff(values) == 1).all():
        return ColumnRead(name, "left out", "the rows' own numbers")
    return ColumnRead(name, "left out", "a number for each row: an id") if _ID.search(name) else None


def _names(table: str, name: str, cells: Any) -> "Cells | ColumnRead":
    """Return texts as categories, or why they are left out: ids, and free text."""
    known = pc.drop_null(cells)
    count = pc.count_distinct(known).as_py()
    if is_free_text(known):
        return ColumnRead(name, "left out", f"free text; text={name} makes it the input")
    if count == len(known) > 2 and (_ID.search(name) or count > MOST_CATEGORIES):
        return ColumnRead(name, "left out", f"{count} different texts in {len(cells)} rows: names, or an id")
    if count <= MOST_CATEGORIES:
        return _categories(table, name, cells)
    counts = sorted(pc.value_counts(known).to_pylist(), key=lambda one: (-one["counts"], one["values"]))
    common = [one["values"] for one in counts[: MOST_CATEGORIES - 1]]
    rare = pc.and_(pc.is_valid(cells), pc.invert(pc.is_in(cells, pa.array(common, cells.type))))
    found = _categories(table, name, pc.if_else(rare, pa.scalar(OTHER, cells.type), cells))
    return replace(found, how=f"categories: the {len(common)} most frequent of {count}, and {OTHER!r}")


def _categories(table: str, name: str, cells: Any) -> Cells:
    there = pc.drop_null(pc.unique(cells))
    if len(there) > MOST_CATEGORIES:
        raise DataError(
            f"Column {name!r} of {table} has {len(there)} categories; {MOST_CATEGORIES} are the most. Names and "
            f"numbers of people are no categories: leave it out (--drop {name}), or join rare ones."
        )
    there = there.take(pc.sort_indices(there))
    places = pc.fill_null(pc.index_in(cells, there), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    names = tuple(there.cast(pa.string()).to_pylist())
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return Cells(places, names, f"{len(names)} categories: {shown}")
