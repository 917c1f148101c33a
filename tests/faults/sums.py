"""An item of work that needs no data."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row
from gradveil_studies.paper.figures import Dot, dot_panels


@ITEMS.register("sums")
@dataclass(frozen=True)
class Sums(Item):
    """Eight units that add up a few numbers, and a figure."""

    title = "Eight sums"

    def work(self, context: Context) -> dict[str, int]:
        return {f"sum {i}": i for i in range(8)}

    def run(self, unit: str, context: Context) -> list[Row]:
        time.sleep(0.02)
        drawn = torch.rand(100, generator=context.seeds(unit))
        return [{"kind": "sum", "sum": float(drawn.sum())}, {"kind": "largest", "largest": float(drawn.max())}]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        return [{"unit": row["unit"], "sum": row["sum"]} for row in rows if row["kind"] == "sum"]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        return []

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        sums: list[Any] = [Dot.of(row["unit"], [row["sum"]]) for row in rows if row["kind"] == "sum"]
        dot_panels(path, {"sums": sums}, "sum")
        return True
