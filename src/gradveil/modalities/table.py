"""Rows of a table: columns of numbers in their own ranges and columns of categories, measured cell by cell.

A row is a vector of numbers in [0, 1]: a number by its place in its column's range, a category as a one among zeros.
What is known of the columns (ranges, categories, means) is public, as in any federation that agreed on a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.modalities.base import MODALITIES, Bounds, Cell, Metric, Modality, by_name
from gradveil.modalities.image import mse

TOLERANCE = 0.319  # standard deviations: of normal numbers a quarter lie as near to their mean (Vero et al. 2023)


@dataclass(frozen=True)
class Column:
    """One column: numbers between ``low`` and ``high``, or one of ``categories``."""

    name: str
    categories: tuple[str, ...] = ()  # none: it holds numbers
    low: float = 0.0
    high: float = 1.0
    mean: float = 0.5
    std: float = 1.0
    whole: bool = False  # holds whole numbers only
    form: str = ""  # what its numbers stand for: "date", days since 1970, or "time", hours of a day

    @property
    def width(self) -> int:
        return len(self.categories) or 1

    @property
    def span(self) -> float:
        return self.high - self.low

    def text(self, place: float) -> str:
        """Return a number as it stands in the table, by its place in the range."""
        value = self.low + self.span * place
        if self.form:
            moment = datetime(1970, 1, 1) + timedelta(**{"days" if self.form == "date" else "hours": value})
            return f"{moment:%H:%M}" if self.form == "time" else f"{moment:%Y-%m-%d}"
        return f"{value:.0f}" if self.whole else f"{value:.4g}"


def wrong(found: Tensor, truth: Tensor, table: "Table") -> Tensor:
    """Return the share of each row's cells that are wrong: (N, D), (N, D) -> (N,)."""
    return 1 - table.right(found, truth).float().mean(dim=-1)


def numbers_off(found: Tensor, truth: Tensor, table: "Table") -> Tensor:
    """Return how far the numbers of each row are off, on the mean, in standard deviations; NaN without any: -> (N,)."""
    return table.away(found, truth)[..., table.numeric].mean(dim=-1)


def categories_wrong(found: Tensor, truth: Tensor, table: "Table") -> Tensor:
    """Return the share of each row's categories that are wrong; NaN where there are none: -> (N,)."""
    return table.away(found, truth)[..., ~table.numeric].mean(dim=-1)


@MODALITIES.register("table")
@dataclass(frozen=True)
class Table(Modality):
    """Rows with these columns, in this order."""

    columns: tuple[Column, ...] = ()
    standardised: bool = True  # by the model; not where the numbers were made ready before

    one, many, part = "row", "rows", "cell"
    guesses = ("middle of the ranges", "mean or mode", "mean or mode of the class")
    metrics: ClassVar[Mapping[str, Metric]] = by_name(
        Metric("wrong", wrong, "lower", "Share of the cells that are wrong."),
        Metric("numbers", numbers_off, "lower", "Mean distance of numbers, in standard deviations.", False,
               "numbers off, sd", ".2g"),
        Metric("categories", categories_wrong, "lower", "Share of the categories that are wrong.", False,
               "categories wrong", ".0%"),
        Metric("mse", lambda found, truth, table: mse(found, truth), "lower", "Of the row as numbers.", False, "MSE"),
    )  # fmt: skip
    error, error_name, error_axis = "wrong", "cells wrong", "share of cells wrong"
    error_text = (
        f"Share of a row's cells that are wrong: another category, or a number more than {TOLERANCE} standard "
        "deviations of its column away, after each is put into its range"
    )
    guess_text = "the middle of each range, the mean or mode of each column, or that among rows of the right class"
    is_share = True
    default_model = "mlp"

    @property
    def told(self) -> tuple[Any, ...]:
        return (self,)

    @cached_property
    def numeric(self) -> Tensor:
        """Which columns hold numbers (C,)."""
        return torch.tensor([not c.categories for c in self.columns], dtype=torch.bool)

    @cached_property
    def owner(self) -> Tensor:
        """Which column each number of a row belongs to (D,)."""
        return torch.repeat_interleave(torch.tensor([c.width for c in self.columns], dtype=torch.long))

    @cached_property
    def blocks(self) -> Tensor:
        """Where the categories of each column of them stand in a row (B, K); D fills what a shorter one leaves."""
        size, firsts = len(self.owner), torch.tensor([c.width for c in self.columns]).cumsum(0)
        held = [(int(end) - c.width, c.width) for c, end in zip(self.columns, firsts, strict=True) if c.categories]
        most = max((width for _, width in held), default=0)
        rows = [[*range(first, first + width), *[size] * (most - width)] for first, width in held]
        return torch.tensor(rows, dtype=torch.long).reshape(len(held), most)

    @cached_property
    def _whole(self) -> Tensor:
        """The steps (D,) between the whole numbers of a column, by place in its range; 0 elsewhere."""
        steps = torch.tensor([1 / c.span if c.whole else 0.0 for c in self.columns])
        return steps[self.owner]

    def _by_block(self, x: Tensor) -> Tensor:
        """Return the categories of rows (..., D) by column (..., B, K), minus infinity where there is none."""
        padded = torch.cat([x, x.new_full((*x.shape[:-1], 1), -torch.inf)], dim=-1)
        return padded[..., self.blocks.to(x.device)]

    def _with_blocks(self, x: Tensor, values: Tensor) -> Tensor:
        """Return rows (..., D) with these categories (..., B, K) in the place of theirs."""
        places = self.blocks.to(x.device).flatten()
        padded = torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], dim=-1)
        return padded.index_copy(-1, places, values.flatten(-2).to(x))[..., :-1]

    def relaxed(self, free: Tensor) -> Tensor:
        """Return rows whose categories are shares: the softmax of free numbers (..., D) in each column of them."""
        return self._with_blocks(free, self._by_block(free).softmax(dim=-1)) if self.blocks.numel() else free

    def unit(self, x: Tensor, bounds: Bounds) -> Tensor:
        low, high = bounds
        x = ((x.detach().cpu().float() - low) / (high - low)).nan_to_num(nan=0.5, posinf=1.0, neginf=0.0)
        if self.blocks.numel():
            found = self._by_block(x)
            best = found.argmax(dim=-1, keepdim=True)
            x = self._with_blocks(x, torch.zeros_like(found).scatter(-1, best, 1.0))
        steps = self._whole.where(self._whole > 0, 1.0)
        return torch.where(self._whole > 0, (x / steps).round() * steps, x).clamp(0.0, 1.0)

    def ignorant(self, like: Tensor, bounds: Bounds) -> Tensor:
        return torch.full_like(like, sum(bounds) / 2)

    def typical(self, public: Tensor) -> Tensor:
        return self.unit(public.mean(dim=0)[None], (0.0, 1.0))[0].to(public)

    def away(self, found: Tensor, truth: Tensor) -> Tensor:
        """Return how far each cell is off (..., C): numbers in standard deviations of the column, categories 0 or 1."""
        scale = torch.tensor([0.5 if c.categories else c.span / c.std for c in self.columns])
        return self._per_cell((found - truth).abs() * scale[self.owner])

    def right(self, found: Tensor, truth: Tensor) -> Tensor:
        """Return which cells are right (..., C)."""
        return self.away(found, truth) <= TOLERANCE

    def _per_cell(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], len(self.columns)).index_add(-1, self.owner, x)

    def distance(self, found: Tensor, truth: Tensor) -> Tensor:
        """Return the mean over cells of numbers' distances as shares of the range and of unequal categories (...,).

        Gower's distance (1971), the usual one between rows of mixed kinds.
        """
        half = torch.where(self.numeric, 1.0, 0.5)[self.owner]
        return self._per_cell((found - truth).abs() * half).mean(dim=-1)

    def order(self, found: Tensor, truth: Tensor) -> Tensor:
        from scipy.optimize import linear_sum_assignment

        pairs = found[None], truth[:, None]
        _, order = linear_sum_assignment((wrong(*pairs, self) + self.distance(*pairs)).numpy())
        return torch.from_numpy(order)

    def identified(self, found: Tensor, truth: Tensor, gallery: Tensor) -> Tensor:
        own, others = self.distance(found, truth), self.distance(found[:, None], gallery[None])
        return (own[:, None] < others).all(dim=1).float()

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)

    def cells(self, x: Tensor, truth: Tensor | None = None) -> list[Cell] | None:
        x = self.unit(x[None], (0.0, 1.0))[0]
        right: Sequence[bool | None] = [None] * len(self.columns)
        off: Sequence[float | None] = right
        if truth is not None:
            true = self.unit(truth[None], (0.0, 1.0))[0]
            right = self.right(x, true).tolist()
            far = zip(self.columns, self.away(x, true).tolist(), strict=True)
            off = [None if c.categories else c.std * away for c, away in far]
        parts = x.split([c.width for c in self.columns])
        texts = [
            c.categories[int(part.argmax())] if c.categories else c.text(float(part))
            for c, part in zip(self.columns, parts, strict=True)
        ]
        return [Cell(*one) for one in zip(texts, right, off, strict=True)]

    @property
    def scaling(self) -> tuple[list[float], list[float]] | None:
        if not self.standardised:
            return None
        pairs = [
            pair
            for c in self.columns
            for pair in ([(0.0, 1.0)] * c.width if c.categories else [((c.mean - c.low) / c.span, c.std / c.span)])
        ]
        return [mean for mean, _ in pairs], [std for _, std in pairs]

    def row(self) -> dict[str, Any]:
        return {"columns": [asdict(c) for c in self.columns], "standardised": self.standardised}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Table":
        columns = tuple(Column(**c | {"categories": tuple(c["categories"])}) for c in row["columns"])
        return cls(columns, row["standardised"])

    @classmethod
    def of_vectors(cls, inputs: Tensor) -> "Table":
        """Return a table of nameless columns of numbers in [0, 1], for rows (N, D) that nothing else is known of."""
        means, stds = inputs.mean(dim=0).tolist(), inputs.std(dim=0, correction=0).tolist()
        pairs = enumerate(zip(means, stds, strict=True))
        return cls(tuple(Column(f"x{i}", mean=mean, std=std or 1.0) for i, (mean, std) in pairs), standardised=False)
