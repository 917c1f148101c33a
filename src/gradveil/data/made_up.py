"""A made-up table of patients: numbers and categories that hang together, the same on every machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from gradveil.data.base import DATASETS, Dataset, Source
from gradveil.data.table import from_table
from gradveil.ranges import Between, Range, Seed

HOSPITALS = ("centre", "east", "harbour", "north", "south")


def made_up_patients(rows: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Return a made-up table by column: four of numbers, seven of categories, and ``outcome``, yes or no."""
    rng = np.random.default_rng(seed % 2**64)

    def drawn(names: tuple[str, ...], shares: tuple[float, ...]) -> Any:
        return rng.choice(np.array(names), rows, p=shares)

    age = np.clip(np.round(rng.normal(58, 15, rows)), 18, 95)
    sex = drawn(("female", "male"), (0.52, 0.48))
    smoker = drawn(("current", "former", "never"), (0.2, 0.3, 0.5))
    bmi = np.round(np.clip(rng.normal(26, 4.5, rows) + 0.8 * (sex == "male"), 15, 50), 1)
    pressure = np.round(95 + 0.55 * age + 0.6 * bmi + rng.normal(0, 11, rows))
    risk = 0.05 * (age - 58) + 0.03 * (pressure - 142) + 0.08 * (bmi - 26) + 1.2 * (smoker == "current")
    diabetic = np.where(rng.random(rows) < 1 / (1 + np.exp(2.2 - 0.5 * risk)), "yes", "no")
    cholesterol = np.round(rng.normal(5.2, 0.9, rows) + 0.15 * risk, 2)
    outcome = np.where(rng.random(rows) < 1 / (1 + np.exp(0.6 - risk - 0.8 * (diabetic == "yes"))), "yes", "no")
    regions = tuple(f"region {i:02d}" for i in range(1, 13))
    return {
        "age": age, "sex": sex, "bmi": bmi, "blood_pressure": pressure, "cholesterol": cholesterol,
        "smoker": smoker, "diabetic": diabetic, "blood_group": drawn(("A", "AB", "B", "O"), (0.4, 0.04, 0.11, 0.45)),
        "insurance": drawn(("none", "private", "public", "state"), (0.08, 0.3, 0.5, 0.12)),
        "hospital": drawn(HOSPITALS, (0.3, 0.2, 0.1, 0.25, 0.15)),
        "region": drawn(regions, (1 / 12,) * 12),
        "outcome": outcome,
    }  # fmt: skip


@DATASETS.register("made_up_patients")
@dataclass(frozen=True)
class MadeUpPatients(Source):
    """Made-up patients, no real person's: 4 columns of numbers, 7 of categories, and an outcome."""

    rows: Annotated[int, Range(10, 10**6)] = 2000
    seed: Seed = 0
    test_share: Between = 0.2

    def load(self, data: Path | None) -> Dataset:
        """Return the set; no folder is needed."""
        table = made_up_patients(self.rows, self.seed)
        return from_table(self.spec_name, table, "outcome", test_share=self.test_share)
