"""The well-known data sets by name: from a local folder, else from the Hugging Face hub; and digits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from gradveil.data.base import DATASETS, Dataset, Source, Split, hold_out
from gradveil.data.cache import Decoded, cached, key_of
from gradveil.data.folder import class_names, decode_table, parquet_files, read_parquet
from gradveil.data.originals import CIFAR, IDX, SVHN, Format
from gradveil.errors import DataError, GradveilError, MissingExtraError
from gradveil.ranges import Between


def download(repository: str, config: str | None) -> dict[str, Any]:
    """Return the splits ``train`` and ``test`` as pyarrow tables with the images still encoded."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"Downloading {repository}", "hub") from error
    found = datasets.load_dataset(repository, config)
    return {part: found[part].with_format("arrow")[:] for part in ("train", "test")}


_DIGITS = tuple("0123456789")


class Known(Source):
    """A set whose files have well-known names."""

    folders: ClassVar[tuple[str, ...]]  # its names in a data folder
    repository: ClassVar[str]
    config: ClassVar[str | None] = None
    names: ClassVar[tuple[str, ...]]
    originals: ClassVar[Format]

    def load(self, data: Path | None) -> Dataset:
        """Return the set from the local folder, else from the hub; both are decoded once."""
        for folder in self._places(data):
            found = self._local(folder)
            if found is not None:
                return found
        return self._from_hub(data)

    def _places(self, data: Path | None) -> list[Path]:
        if data is None:
            return []
        inside = [path for path in sorted(data.iterdir()) if path.is_dir() and path.name.lower() in self.folders]
        return [*inside, data] if data.name.lower() in self.folders else inside

    def _local(self, folder: Path) -> Dataset | None:
        name = self.spec_name
        for place in (folder / self.config, folder) if self.config else (folder,):
            train, test = parquet_files(place, "train"), parquet_files(place, "test")
            if train and test:
                return cached(name, key_of(name, [*train, *test]), lambda a=train, b=test: self._decode(a, b))  # type: ignore[misc]
        files = self.originals.find(folder)
        if files is None:
            return None
        return cached(name, key_of(name, files), lambda: Decoded(*self.originals.read(files), self.names))

    def _decode(self, train: list[Path], test: list[Path]) -> Decoded:
        first = read_parquet(train)
        names = class_names(first) or self.names
        return Decoded(decode_table(first), decode_table(read_parquet(test)), names)

    def _from_hub(self, data: Path | None) -> Dataset:
        def decode() -> Decoded:
            tables = download(self.repository, self.config)
            return Decoded(decode_table(tables["train"]), decode_table(tables["test"]), self.names)

        try:
            return cached(self.spec_name, key_of(self.spec_name, [], self.repository), decode)
        except DataError:
            raise
        except Exception as error:  # the hub's client raises errors of many libraries
            missing = isinstance(error, MissingExtraError)
            reason = (
                "" if missing else f" (the download failed: {str(error).splitlines()[0] if str(error) else error!r})"
            )
            where = f"{data} has no folder {self.folders[0]!r} with them" if data else "no data folder is set"
            raise DataError(
                f"No files of {self.spec_name!r}: {where}{reason}. Either put its parquet or original files into "
                f"FOLDER/{self.folders[0]} and give --data FOLDER (or GRADVEIL_DATA), or install the extra "
                f"gradveil[hub] and go online to download {self.repository}."
            ) from (None if isinstance(error, GradveilError) else error)


@DATASETS.register("mnist")
@dataclass(frozen=True)
class Mnist(Known):
    """Handwritten digits, grey 28x28: 60,000 to train, 10,000 to test (LeCun et al. 1998)."""

    folders = ("mnist",)
    repository = "ylecun/mnist"
    config = "mnist"
    names = _DIGITS
    originals = IDX


@DATASETS.register("fashion_mnist")
@dataclass(frozen=True)
class FashionMnist(Known):
    """Pieces of clothing, grey 28x28: 60,000 to train, 10,000 to test (Xiao et al. 2017)."""

    folders = ("fashion_mnist", "fashionmnist", "fashion-mnist")
    repository = "zalando-datasets/fashion_mnist"
    config = "fashion_mnist"
    names = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
    originals = IDX


@DATASETS.register("cifar10")
@dataclass(frozen=True)
class Cifar10(Known):
    """Small colour photographs, 32x32: 50,000 to train, 10,000 to test (Krizhevsky 2009)."""

    folders = ("cifar10", "cifar-10", "cifar-10-batches-py", "cifar-10-batches-bin")
    repository = "uoft-cs/cifar10"
    config = "plain_text"
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    originals = CIFAR


@DATASETS.register("svhn")
@dataclass(frozen=True)
class Svhn(Known):
    """House numbers cropped to one digit, colour 32x32: 73,257 to train, 26,032 to test (Netzer et al. 2011)."""

    folders = ("svhn",)
    repository = "ufldl-stanford/svhn"
    config = "cropped_digits"
    names = _DIGITS
    originals = SVHN


@DATASETS.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, grey 8x8 with 17 levels: 1,797 images, a fifth of each class set aside for the test."""

    test_share: Between = 0.2

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
        return Dataset("digits", train, test, _DIGITS)
