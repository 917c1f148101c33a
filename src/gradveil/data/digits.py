"""Small digits that ship with scikit-learn: the set that needs no files and no network."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gradveil.data.base import DATASETS, Dataset, Source, Split
from gradveil.data.own import hold_out


@DATASETS.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, grey 8x8 with 17 levels: 1,797 images, a fifth of each class set aside for the test."""

    test_share: float = 0.2

    def load(self, data: Path | None) -> Dataset:
        """Return the set; no folder is needed."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = pixels.reshape(-1, 1, 8, 8).astype(np.uint8)
        labels = labels.astype(np.int64)
        train, test = (
            Split(images[chosen], torch.from_numpy(labels[chosen]), scale=16.0)
            for chosen in hold_out(labels, self.test_share)
        )
        return Dataset("digits", train, test, tuple("0123456789"))
