"""The files as their makers publish them: MNIST's idx, and CIFAR-10's batches, read without ``pickle``.

Of the pickle language, the words that a batch is written in: another one ends the reading. Nothing is imported and
nothing is called: the three names that arrays take (``_reconstruct``, ``ndarray``, ``dtype``), and ``_codecs.encode``,
with which Python 3 spells bytes, are marks that this reader knows.
"""

import gzip
import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.data.base import Array
from gradveil.errors import DataError
from gradveil.files import read_whole, wrap_parse_errors

_ARRAY, _DTYPE, _ENCODE = object(), object(), object()
_NAMES = {
    "numpy.core.multiarray _reconstruct": _ARRAY,
    "numpy._core.multiarray _reconstruct": _ARRAY,
    "numpy ndarray": np.ndarray,
    "numpy dtype": _DTYPE,
    "_codecs encode": _ENCODE,
}
_TYPES = ("u1", "i4", "i8")
_MARK = object()
_WORDS = 10**6  # of a file: a batch of 10,000 images has 60,000


class _Held:
    """An array, or the type of one, as far as the file has said what it is."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.value: Array = np.empty(0)

    def build(self, state: Any) -> None:
        """Fill in what a file says of it: of a type the order of its bytes, of an array its shape, type and bytes."""
        if self.kind:
            if state[1] not in ("<", "|"):
                raise ValueError("its numbers have the high byte first")
            return
        _, shape, held, by_columns, raw = state
        if not all(type(side) is int for side in shape):
            raise ValueError("its shape is none")
        values = np.frombuffer(_bytes(raw), np.dtype(held.kind).newbyteorder("<"))
        self.value = values.reshape(shape, order="F" if by_columns else "C")


def read_batch(content: bytes) -> tuple[Array, Array]:
    """Return the pixels (N, 3072) and the labels (N,) of a batch."""
    batch = _read_words(content)
    found = {_bytes(key): value for key, value in batch.items()}
    images, labels = found[b"data"], found[b"labels"]
    images = images.value if isinstance(images, _Held) else None
    if isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels):
        labels = np.array(labels, np.int64)
    else:
        labels = labels.value if isinstance(labels, _Held) else None
    if images is None or labels is None or images.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise ValueError("it holds no bytes of images under 'data', or no whole numbers under 'labels'")
    if images.ndim != 2 or labels.shape != (len(images),) or images.shape[1] != 3072:
        raise ValueError(f"images are {images.shape}, labels {labels.shape}")
    return images, labels.astype(np.int64)


def _read_words(content: bytes) -> dict[Any, Any]:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    words: Iterable[tuple[Any, Any, Any]] = pickletools.genops(content)
    for word, given, _ in islice(words, _WORDS):
        name = word.name
        if name == "STOP" and len(stack) == 1 and isinstance(stack[0], dict):
            return stack[0]
        if name in _KEEPS:
            memo[len(memo) if given is None else given] = stack[-1]
        elif name in _GIVES:
            stack.append(memo[given])
        elif name in _MAKES:
            stack.append(_MAKES[name](given))
        elif name in _CHANGES:
            _CHANGES[name](stack)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"{name} has no place in a CIFAR-10 batch")
    raise ValueError("it ends early, or never")


def _upto_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("a mark is missing")
    taken = stack[at + 1 :]
    del stack[at:]
    return taken


def _last(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise ValueError("a value is missing")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


def _set(stack: list[Any], pairs: list[Any]) -> None:
    table = stack[-1]
    if type(table) is not dict or len(pairs) % 2:
        raise ValueError("a table is missing")
    table.update(zip(map(_key, pairs[::2]), pairs[1::2], strict=True))


def _key(value: Any) -> str | bytes:
    if not isinstance(value, str | bytes):
        raise ValueError("a key is no text")
    return value


def _add(stack: list[Any], values: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise ValueError("a list is missing")
    stack[-1].extend(values)


def _reduce(stack: list[Any]) -> None:
    what, given = _last(stack, 2)
    if what is _ARRAY:
        stack.append(_Held())
    elif what is _DTYPE and given[0] in _TYPES:
        stack.append(_Held(given[0]))
    elif what is _ENCODE:
        stack.append(_bytes(given[0]))
    else:
        raise ValueError("it makes something that is no array")


def _build(stack: list[Any]) -> None:
    held, state = _last(stack, 2)
    if not isinstance(held, _Held):
        raise ValueError("it fills in something that is no array")
    held.build(state)
    stack.append(held)


def _bytes(text: Any) -> bytes:
    """Return bytes; Python 2 wrote them as texts, which are read letter by letter."""
    if not isinstance(text, str | bytes):
        raise ValueError("bytes are missing")
    return text.encode("latin-1") if isinstance(text, str) else text


_KEEPS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GIVES = ("GET", "BINGET", "LONG_BINGET")
_VALUES = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
_MAKES: dict[str, Callable[[Any], Any]] = {name: lambda given: given for name in _VALUES} | {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "MARK": lambda _: _MARK,
    "GLOBAL": lambda given: _NAMES[given],
}
_CHANGES: dict[str, Callable[[list[Any]], None]] = {
    "LIST": lambda stack: stack.append(_upto_mark(stack)),
    "TUPLE": lambda stack: stack.append(tuple(_upto_mark(stack))),
    "TUPLE1": lambda stack: stack.append(tuple(_last(stack, 1))),
    "TUPLE2": lambda stack: stack.append(tuple(_last(stack, 2))),
    "TUPLE3": lambda stack: stack.append(tuple(_last(stack, 3))),
    "DICT": lambda stack: _set_new(stack, _upto_mark(stack)),
    "APPEND": lambda stack: _add(stack, _last(stack, 1)),
    "APPENDS": lambda stack: _add(stack, _upto_mark(stack)),
    "SETITEM": lambda stack: _set(stack, _last(stack, 2)),
    "SETITEMS": lambda stack: _set(stack, _upto_mark(stack)),
    "STACK_GLOBAL": lambda stack: stack.append(_NAMES[" ".join(_last(stack, 2))]),
    "REDUCE": _reduce,
    "BUILD": _build,
}


def _set_new(stack: list[Any], pairs: list[Any]) -> None:
    stack.append({})
    _set(stack, pairs)


Pair = tuple[Array, Array]  # uint8 images (N, C, H, W), int64 labels (N,)


Files = tuple[Path, ...]
LARGEST = 2**28  # bytes of a file, and of what it unpacks to: the largest of these sets has 225 million
_AGAIN = "It is not a whole {} file: download it again."


@dataclass(frozen=True)
class Format:
    """How to find a set's files in a folder, and how to read them."""

    find: Callable[[Path], Files | None]
    read: Callable[[Files], tuple[Pair, Pair]]  # train, test


def _find_idx(folder: Path) -> Files | None:
    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    for place in (folder, folder / "raw"):
        found = [_first(place / stem, place / f"{stem}.gz", place / stem.replace("-idx", ".idx")) for stem in stems]
        if all(found):
            return tuple(path for path in found if path)
    return None


def _read_idx(files: Files) -> tuple[Pair, Pair]:
    return _idx_pair(files[0], files[1]), _idx_pair(files[2], files[3])


def _find_cifar(folder: Path) -> Files | None:
    stems = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    for sub, suffix in (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin")):
        for place in (folder, folder / sub):
            files = tuple(place / f"{stem}{suffix}" for stem in stems)
            if all(path.is_file() for path in files):
                return files
    return None


def _read_cifar(files: Files) -> tuple[Pair, Pair]:
    read = _cifar_bin if files[0].suffix == ".bin" else _cifar_python
    pairs = [read(path) for path in files[:-1]]
    train = np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
    return train, read(files[-1])


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _idx(path: Path, dims: int) -> Array:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start = file.read(4 + 4 * dims)
        if start[:4] != bytes((0, 0, 8, dims)):
            raise ValueError(f"it begins with {start[:4].hex()}")
        shape = np.frombuffer(start, ">u4", dims, offset=4).tolist()
        if prod(shape) > LARGEST:
            raise ValueError(f"it declares the shape {shape}")
        return np.frombuffer(file.read(prod(shape) + 1), np.uint8).reshape(shape)  # no less, no more


def _idx_pair(images: Path, labels: Path) -> Pair:
    with wrap_parse_errors(images, DataError, _AGAIN.format("idx")):
        pixels = _idx(images, 3)[:, None]
    with wrap_parse_errors(labels, DataError, _AGAIN.format("idx")):
        return pixels, _idx(labels, 1).astype(np.int64)


def _cifar_python(path: Path) -> Pair:
    with wrap_parse_errors(path, DataError, _AGAIN.format("CIFAR-10")):
        images, labels = read_batch(read_whole(path, LARGEST))
    return images.reshape(-1, 3, 32, 32), labels


def _cifar_bin(path: Path) -> Pair:
    with wrap_parse_errors(path, DataError, _AGAIN.format("CIFAR-10")):
        rows = np.frombuffer(read_whole(path, LARGEST), np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


IDX = Format(_find_idx, _read_idx)  # MNIST and Fashion-MNIST: four files, plain or gzipped
CIFAR = Format(_find_cifar, _read_cifar)  # the Python or the binary version
