"""MATLAB's files of level 5 (1996 on), as far as SVHN needs them: real arrays of numbers by name, packed or not.

SciPy's reader ends the process at some damaged files. This one takes slices of bytes alone: what a file declares is
held against what is there, and against a limit, before anything is made of it.
"""

import struct
import zlib
from collections.abc import Collection, Iterator
from math import prod

import numpy as np

from gradveil.data.base import Array

_HEADER, _LITTLE = 128, b"\x00\x01IM"  # its length, and its end: version 1, the low byte first
_MATRIX, _PACKED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_HEADS, _HEAD = (6, 5, 1), 256  # of an array: flags, shape and name, each of so many bytes at most
_CLASS, _COMPLEX = 0xFF, 0x800  # of an array's flags
_NUMBERS = range(6, 16)  # the classes double to uint64


def read_mat(content: bytes, names: Collection[str], most: int) -> dict[str, Array]:
    """Return the arrays of these names, of the types in which they are stored.

    ``most`` bounds the bytes that all packed parts unpack to.
    """
    if content[_HEADER - 4 : _HEADER] != _LITTLE:
        raise ValueError("it has not the header of a mat file of level 5")
    found: dict[str, Array] = {}
    for kind, data in _elements(memoryview(content)[_HEADER:]):
        if kind == _PACKED:
            unpacked = _unpacked(data, most)
            most -= len(unpacked)
            kind, data = next(_elements(unpacked), (0, unpacked))
        if kind == _MATRIX:
            name, array = _matrix(data, names)
            if array is not None:
                found[name] = array
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"it has no array of numbers named {', '.join(missing)}")
    return found


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the kind and the bytes of each part; a part of up to four bytes lies within its own tag."""
    while data:
        if len(data) < 8:
            raise ValueError("it ends within a tag")
        kind, size = struct.unpack_from("<II", data)
        start, step = 8, size if kind == _PACKED else -(-size // 8) * 8
        if kind >> 16:
            kind, size, start, step = kind & 0xFFFF, kind >> 16, 4, 4
        if size > len(data) - start or (start == 4 and size > 4):
            raise ValueError(f"a part of {size:,} bytes is declared where {len(data) - start:,} are left")
        yield kind, data[start : start + size]
        data = data[start + step :]


def _unpacked(data: memoryview, most: int) -> memoryview:
    inflate = zlib.decompressobj()
    whole = inflate.decompress(data, most + 1)
    if len(whole) > most:
        raise ValueError("it unpacks to too many bytes")
    if not inflate.eof:
        raise ValueError("a packed part ends early")
    return memoryview(whole)


def _matrix(data: memoryview, names: Collection[str]) -> tuple[str, Array | None]:
    """Return an array and its name; None for one that is not wanted or holds no real numbers."""
    parts = _elements(data)
    heads = [next(parts, (0, data)) for _ in _HEADS]
    if any(kind != own or len(head) > _HEAD for (kind, head), own in zip(heads, _HEADS, strict=True)):
        raise ValueError("an array without flags, shape and name")
    flags, shape, _ = (_numbers(*head).tolist() for head in heads)
    called, kind = bytes(heads[2][1]).decode("latin-1"), flags[0] if flags else 0
    if called not in names or kind & _CLASS not in _NUMBERS or kind & _COMPLEX:
        return called, None
    values = _numbers(*next(parts, (0, data)))
    if any(side < 0 for side in shape) or prod(shape) != len(values):
        raise ValueError(f"{called} has {len(values):,} numbers and declares the shape {shape}")
    return called, values.reshape(shape, order="F")


def _numbers(kind: int, data: memoryview) -> Array:
    if kind not in _STORED or len(data) % np.dtype(_STORED[kind]).itemsize:
        raise ValueError(f"{len(data):,} bytes are no numbers of kind {kind}")
    return np.frombuffer(data, _STORED[kind])
