"""Data sets by name, a user's own data, and how examples are dealt out to devices."""

from gradveil.data.base import DATASETS, Dataset, Source, Split, load

__all__ = ["DATASETS", "Dataset", "Source", "Split", "load"]
