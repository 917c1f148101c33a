"""The tables that come with scikit-learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.data.base import DATASETS, Dataset, Source
from gradveil.data.table import from_table
from gradveil.ranges import Between


class Bundled(Source):
    """A table that comes with scikit-learn."""

    test_share: float

    def bunch(self) -> Any:
        """Return it as scikit-learn does."""
        raise NotImplementedError

    def load(self, data: Path | None) -> Dataset:
        """Return the set; no folder is needed."""
        found = self.bunch()
        columns = {str(name): found.data[:, i] for i, name in enumerate(found.feature_names)}
        names = found.get("target_names")
        target = found.target if names is None else np.asarray(names).astype(str)[found.target]
        return from_table(self.spec_name, columns | {"target": target}, "target", test_share=self.test_share)


@DATASETS.register("breast_cancer")
@dataclass(frozen=True)
class BreastCancer(Bundled):
    """Measurements of breast masses, 30 columns of numbers, malignant or benign: 569 rows (Wolberg et al. 1995)."""

    test_share: Between = 0.2

    def bunch(self) -> Any:
        """Return it as scikit-learn does."""
        from sklearn.datasets import load_breast_cancer

        return load_breast_cancer()


@DATASETS.register("wine")
@dataclass(frozen=True)
class Wine(Bundled):
    """Analyses of wines of three growers, 13 columns of numbers: 178 rows (Aeberhard and Forina 1991)."""

    test_share: Between = 0.2

    def bunch(self) -> Any:
        """Return it as scikit-learn does."""
        from sklearn.datasets import load_wine

        return load_wine()


@DATASETS.register("diabetes")
@dataclass(frozen=True)
class Diabetes(Bundled):
    """Diabetes after a year, a number (``loss=mse``), by 9 columns of numbers and sex: 442 rows (Efron et al. 2004)."""

    test_share: Between = 0.2

    def bunch(self) -> Any:
        """Return it as scikit-learn does."""
        from sklearn.datasets import load_diabetes

        return load_diabetes(scaled=False)
