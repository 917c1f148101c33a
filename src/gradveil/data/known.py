"""Data sets by name: well-known images from a folder or the Hugging Face hub, scikit-learn's, and made-up patients.

Files as their makers publish them are MNIST's idx and CIFAR-10's batches. A batch is a text in the pickle language.
Nothing of it is carried out: its words are gone through once, and those that hold the pixels and the labels are kept.
"""

import gzip
import pickletools
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from gradveil.data.base import DATASETS, Array, Dataset, Source, Split, hold_out
from gradveil.data.folder import Folder, class_names, parquet_files, read_parquet
from gradveil.data.images import Decoded, cached, key_of
from gradveil.data.table import from_table
from gradveil.errors import DataError, GradveilError, MissingExtraError
from gradveil.files import read_whole, wrap_parse_errors
from gradveil.ranges import Between, Range, Seed

Pair = tuple[Array, Array]  # uint8 images (N, C, H, W), int64 labels (N,)
Files = tuple[Path, ...]
LARGEST = 2**28  # bytes of a file, and of what it unpacks to: the largest of these sets has 225 million
_WORDS = 10**6  # of a batch: 10,000 images have 60,000
_KEYS = (b"data", b"labels", b"batch_label", b"filenames")
_WHOLE = ("BININT", "BININT1", "BININT2")  # words of a whole number
_PIXELS = 3 * 32 * 32


def download(repository: str, config: str | None) -> tuple[Any, Any]:
    """Return the splits ``train`` and ``test`` as pyarrow tables with the images still encoded."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"Downloading {repository}", "hub") from error
    found = datasets.load_dataset(repository, config)
    return found["train"].with_format("arrow")[:], found["test"].with_format("arrow")[:]


_DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Known(Source):
    """A set whose files have well-known names."""

    folders: ClassVar[tuple[str, ...]]  # its names in a data folder
    repository: ClassVar[str]
    config: ClassVar[str | None] = None
    names: ClassVar[tuple[str, ...]]

    def originals(self, folder: Path) -> Files | None:
        """Return the files of a folder as their makers publish them, where it has all of them."""
        return None

    def read(self, files: Files) -> tuple[Pair, Pair]:
        """Return what is to train on, and the test, of such files."""
        raise NotImplementedError

    def load(self, data: Path | None) -> Dataset:
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
                decode = partial(self._from_files, train, test)
                return cached(name, key_of(name, [*train, *test]), decode)
        if (files := self.originals(folder)) is None:
            return None
        return cached(name, key_of(name, files), lambda: Decoded(*self.read(files), self.names))

    def _from_files(self, train: list[Path], test: list[Path]) -> Decoded:
        return self._decoded(read_parquet(train), read_parquet(test))

    def _decoded(self, train: Any, test: Any) -> Decoded:
        found = Folder().decoded_tables(train, test)
        return found if class_names(train) else replace(found, class_names=self.names)

    def _downloaded(self) -> Decoded:
        return self._decoded(*download(self.repository, self.config))

    def _from_hub(self, data: Path | None) -> Dataset:
        try:
            return cached(self.spec_name, key_of(self.spec_name, [], self.repository), self._downloaded)
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


class Idx(Known):
    """MNIST and its likes: four files, plain or gzipped."""

    def originals(self, folder: Path) -> Files | None:
        stems = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
        for place in (folder, folder / "raw"):
            found = []
            for stem in stems:
                names = (stem, f"{stem}.gz", stem.replace("-idx", ".idx"))
                found += [place / name for name in names if (place / name).is_file()][:1]
            if len(found) == len(stems):
                return tuple(found)
        return None

    def read(self, files: Files) -> tuple[Pair, Pair]:
        images, labels, *test = files
        return _idx_pair(images, labels), _idx_pair(*test)


def _idx_pair(images: Path, labels: Path) -> Pair:
    return _idx(images, 3)[:, None], _idx(labels, 1).astype(np.int64)


def _idx(path: Path, dims: int) -> Array:
    with (
        wrap_parse_errors(path, DataError, "It is not a whole idx file: download it again."),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        start = file.read(4 + 4 * dims)
        if start[:4] != bytes((0, 0, 8, dims)):
            raise ValueError(f"it begins with {start[:4].hex()}")
        shape = np.frombuffer(start, ">u4", dims, offset=4).tolist()
        if prod(shape) > LARGEST:
            raise ValueError(f"it declares the shape {shape}")
        return np.frombuffer(file.read(prod(shape) + 1), np.uint8).reshape(shape)  # no less, no more


@DATASETS.register("mnist")
class Mnist(Idx):
    """Handwritten digits, grey 28x28: 60,000 to train, 10,000 to test (LeCun et al. 1998)."""

    folders = ("mnist",)
    repository = "ylecun/mnist"
    config = "mnist"
    names = _DIGITS


@DATASETS.register("fashion_mnist")
class FashionMnist(Idx):
    """Pieces of clothing, grey 28x28: 60,000 to train, 10,000 to test (Xiao et al. 2017)."""

    folders = ("fashion_mnist", "fashionmnist", "fashion-mnist")
    repository = "zalando-datasets/fashion_mnist"
    config = "fashion_mnist"
    names = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@DATASETS.register("cifar10")
class Cifar10(Known):
    """Small colour photographs, 32x32: 50,000 to train, 10,000 to test (Krizhevsky 2009)."""

    folders = ("cifar10", "cifar-10", "cifar-10-batches-py", "cifar-10-batches-bin")
    repository = "uoft-cs/cifar10"
    config = "plain_text"
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def originals(self, folder: Path) -> Files | None:
        stems = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
        for sub, suffix in (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin")):
            for place in (folder, folder / sub):
                files = tuple(place / f"{stem}{suffix}" for stem in stems)
                if all(path.is_file() for path in files):
                    return files
        return None

    def read(self, files: Files) -> tuple[Pair, Pair]:
        *parts, test = map(_cifar_pair, files)
        images, labels = (np.concatenate(some) for some in zip(*parts, strict=True))
        return (images, labels), test


def _cifar_pair(path: Path) -> Pair:
    with wrap_parse_errors(path, DataError, "It is not a whole CIFAR-10 file: download it again."):
        content = read_whole(path, LARGEST)
        if path.suffix == ".bin":
            rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
            pixels, labels = rows[:, 1:], rows[:, 0].astype(np.int64)
        else:
            pixels, labels = read_batch(content)
        return pixels.reshape(-1, 3, 32, 32), labels


def read_batch(content: bytes) -> tuple[Array, Array]:
    """Return the pixels (N, 3072) and the labels (N,) of a batch that Python 2 wrote, or 3 (protocols 2 to 4)."""
    labels: list[int] = []
    key, pixels, by_columns = b"", b"", False
    for word, given, _ in islice(pickletools.genops(content), _WORDS):
        text = given.encode("latin-1") if isinstance(given, str) else given
        if word.name in ("NEWTRUE", "NEWFALSE"):
            by_columns = word.name == "NEWTRUE"  # of an array the last before its bytes
        elif isinstance(text, bytes) and text in _KEYS:
            key = text
        elif key == b"labels" and word.name in _WHOLE:
            labels.append(int(given or 0))
        elif key == b"data" and isinstance(text, bytes) and len(text) >= _PIXELS:
            pixels = text
        if word.name == "STOP":
            break
    else:
        raise ValueError("it has no end")
    if not labels or by_columns or len(pixels) != _PIXELS * len(labels) or not all(0 <= one < 10 for one in labels):
        raise ValueError("it holds no bytes of images row by row under 'data', or no list of as many labels, 0 to 9")
    return np.frombuffer(pixels, np.uint8).reshape(-1, _PIXELS), np.array(labels, np.int64)


@DATASETS.register("svhn")
class Svhn(Known):
    """House numbers cropped to one digit, colour 32x32: 73,257 to train, 26,032 to test (Netzer et al. 2011)."""

    folders = ("svhn",)
    repository = "ufldl-stanford/svhn"
    config = "cropped_digits"
    names = _DIGITS


@DATASETS.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, grey 8x8 with 17 levels: 1,797 images, a fifth of each class set aside for the test."""

    test_share: Between = 0.2

    def load(self, data: Path | None) -> Dataset:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = pixels.reshape(-1, 1, 8, 8).astype(np.uint8)
        labels = labels.astype(np.int64)
        train, test = (
            Split(images[chosen], torch.from_numpy(labels[chosen]), scale=16.0)
            for chosen in hold_out(labels, self.test_share)
        )
        return Dataset("digits", train, test, _DIGITS)


@dataclass(frozen=True)
class Bundled(Source):
    """A table that comes with scikit-learn."""

    test_share: Between = 0.2

    def load(self, data: Path | None) -> Dataset:
        from sklearn import datasets

        settings = {"scaled": False} if self.spec_name == "diabetes" else {}
        found = getattr(datasets, f"load_{self.spec_name}")(**settings)
        columns = {str(name): found.data[:, i] for i, name in enumerate(found.feature_names)}
        names = found.get("target_names")
        target = found.target if names is None else np.asarray(names).astype(str)[found.target]
        return from_table(self.spec_name, columns | {"target": target}, "target", test_share=self.test_share)


@DATASETS.register("breast_cancer")
class BreastCancer(Bundled):
    """Measurements of breast masses, 30 columns of numbers, malignant or benign: 569 rows (Wolberg et al. 1995)."""


@DATASETS.register("wine")
class Wine(Bundled):
    """Analyses of wines of three growers, 13 columns of numbers: 178 rows (Aeberhard and Forina 1991)."""


@DATASETS.register("diabetes")
class Diabetes(Bundled):
    """Diabetes after a year, a number (``loss=mse``), by 9 columns of numbers and sex: 442 rows (Efron et al. 2004)."""


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
        table = made_up_patients(self.rows, self.seed)
        return from_table(self.spec_name, table, "outcome", test_share=self.test_share)
