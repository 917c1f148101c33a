"""The compiled kernel (``cpu_kernel.c``, ``gram.c``), where it was built: a tape as it takes it, and calls by ctypes.

Convolutions and max pooling one after the other, slopes merged into them.
"""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.imports import on_threads, variants_of
from gradveil.representation.jacobian import Tape
from gradveil.representation.rows import TINY, RowNorms, Start, live_first
from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.base import Operator
from gradveil.representation.rules.products import Dense
from gradveil.representation.rules.shapes import Reshape
from gradveil.representation.rules.windows import Choose, Convolution

Image = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Piece:
    """One convolution or max pooling, with the slopes that follow it on the way back; channels last throughout."""

    above: Image  # that cotangents come from
    below: Image  # that they go to
    weight: Tensor | None  # (out, in, kh, kw); None: max pooling
    geometry: tuple[int, ...]  # kernel, stride, padding, dilation, each for rows and columns
    index: Tensor | None = None  # max pooling: (N, oh, ow, c)
    scale: Tensor | None = None  # (n, h, w, c)


def pieces_of(tape: Tape, start: int) -> list[Piece] | None:
    """Return the maps from a node back to the input, or None where they are no chain that the kernel knows."""
    operators, image = tape.chain(start), _image(tape.nodes[start].shape)
    if operators is None:
        return None
    pieces: list[Piece] = []
    for operator in operators:
        if image is None:
            return None
        if isinstance(operator, Scale):
            if not pieces or operator.source != operator.target:
                return None
            pieces[-1] = _scaled(pieces[-1], operator)
        elif isinstance(operator, Reshape):
            image = _reshaped(pieces, operator, image)
        else:
            piece = _piece(operator, image)
            if piece is None:
                return None
            pieces.append(piece)
            image = piece.below
    return pieces


def _image(shape: tuple[int, ...]) -> Image | None:
    if len(shape) == 4:
        return shape[1], shape[2], shape[3]
    return (shape[1], 1, 1) if len(shape) == 2 else None


def _reshaped(pieces: list[Piece], operator: Reshape, image: Image) -> Image | None:
    """Take a flattened image up again: the last matrix writes to it with channels last."""
    target = _image(operator.source)
    if target is None or operator.source[0] != operator.target[0]:
        return None
    if target == image:
        return target
    if not pieces or image[1:] != (1, 1) or pieces[-1].weight is None:
        return None
    last, weight = pieces[-1], pieces[-1].weight
    order = torch.arange(prod(target)).view(target).permute(1, 2, 0).flatten()
    scale = None if last.scale is None else last.scale[..., order].contiguous()
    pieces[-1] = replace(last, weight=weight[:, order], scale=scale)
    return target


def _scaled(piece: Piece, operator: Scale) -> Piece:
    c, h, w = piece.below
    by, shape = operator.by, operator.source
    if not isinstance(by, Tensor):
        by = torch.full((1,) * len(shape), float(by))
    whole = by.expand(by.shape[0] if by.ndim == len(shape) else 1, *shape[1:])
    last = (whole.permute(0, 2, 3, 1) if len(shape) == 4 else whole).reshape(-1, h, w, c)
    return replace(piece, scale=(last if piece.scale is None else last * piece.scale).float().contiguous())


def _piece(operator: Operator, image: Image) -> Piece | None:
    if isinstance(operator, Dense) and len(operator.batch_shape) == 1 and image[1:] == (1, 1):
        below = (operator.weight.shape[1], 1, 1)
        return Piece(image, below, operator.weight[:, :, None, None], (1, 1, 1, 1, 0, 0, 1, 1))
    if isinstance(operator, Convolution) and len(operator.stride) == 2 and operator.groups == 1:
        kernel = tuple(operator.weight.shape[2:])
        below = operator.source[1], operator.source[2], operator.source[3]
        geometry = (*kernel, *operator.stride, *operator.padding, *operator.dilation)
        return Piece(image, below, operator.weight, geometry) if max(kernel) <= 64 else None
    if isinstance(operator, Choose) and operator.window is not None:
        below = operator.source[1], operator.source[2], operator.source[3]
        return Piece(image, below, None, operator.window, operator.index.permute(0, 2, 3, 1).contiguous())
    return None


_BLOCK_SIZES = (1, 2, 3, 4, 8, 12, 16)  # sizes of blocks that the kernel was compiled for
_GAIN = 1.2  # times fewer multiplications, or rows go all the way


Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class RowSplit:
    """Rows stop before piece ``at``; which places of that tensor see overlapping parts of the input."""

    at: int
    block: int
    area: int  # of the input that a place sees, at most
    rows: Spans  # by row: the first and the last one whose places overlap with its own
    columns: Spans

    @cached_property
    def blocks(self) -> list[int]:
        """How many blocks each place has: with itself, and with the neighbours after it."""
        return [
            end - x + 1 + (last - y) * (end - first + 1)
            for y, (_, last) in enumerate(self.rows)
            for x, (first, end) in enumerate(self.columns)
        ]

    def offsets(self, channels: int) -> list[int]:
        """Return where the blocks of each place begin, and, last, where all end."""
        return list(accumulate((count * channels * self.block for count in self.blocks), initial=0))


@dataclass(frozen=True)
class PieceShape:
    """What of a piece decides where to split; never its numbers."""

    above: Image
    below: Image
    geometry: tuple[int, ...]
    weights: int  # 0: max pooling

    @classmethod
    def of(cls, piece: Piece) -> "PieceShape":
        return cls(piece.above, piece.below, piece.geometry, 0 if piece.weight is None else piece.weight.numel())

    @property
    def cost(self) -> int:
        """Multiplications that one row takes; pooling takes none that count."""
        return self.weights * self.above[1] * self.above[2]


@lru_cache(maxsize=64)
def best_split(pieces: tuple[PieceShape, ...], rows: int, lanes: int) -> RowSplit | None:
    """Return where rows should stop, by the number of multiplications; None: nowhere before the input."""
    direct = rows / lanes * sum(piece.cost for piece in pieces[1:])
    best, found = direct / _GAIN, None
    for at in range(1, len(pieces)):
        split = _split(pieces, at, lanes)
        if split is not None and (cost := _cost(pieces, split, rows, lanes)) < best:
            best, found = cost, split
    return found


def _split(pieces: Sequence[PieceShape], at: int, lanes: int) -> RowSplit | None:
    channels, height, width = pieces[at].above
    rest = pieces[at:]
    joined = all(a.below == b.above for a, b in zip(pieces[at - 1 :], rest, strict=False))
    if channels > min(lanes, _BLOCK_SIZES[-1]) or not joined or not all(piece.weights for piece in rest):
        return None
    windows = [_seen(rest, size, dim) for dim, size in enumerate((height, width))]
    if any(low >= high for some in windows for low, high in some):
        return None
    area = prod(max(high - low for low, high in some) for some in windows)
    return RowSplit(at, next(b for b in _BLOCK_SIZES if b >= channels), area, *map(_neighbours, windows))


def _seen(pieces: Sequence[PieceShape], size: int, dim: int) -> Spans:
    """Return which part of the input each row (or column) of a tensor sees: from, up to."""
    spans = [(k, k + 1) for k in range(size)]
    for piece in pieces:
        kernel, stride, padding, dilation = piece.geometry[dim::2]
        edge = piece.below[dim + 1]
        spans = [
            (max(0, low * stride - padding), min(edge, (high - 1) * stride - padding + (kernel - 1) * dilation + 1))
            for low, high in spans
        ]
    return spans


def _neighbours(spans: Spans) -> Spans:
    """Return, for each span, the first and the last one that overlaps with it."""
    found = []
    for low, high in spans:
        some = [j for j, (other_low, other_high) in enumerate(spans) if other_low < high and low < other_high]
        found.append((some[0], some[-1]))
    return found


def _cost(pieces: Sequence[PieceShape], split: RowSplit, rows: int, lanes: int) -> float:
    before, rest = pieces[1 : split.at], pieces[split.at :]
    channels, height, width = rest[0].above
    blocks = sum(split.blocks)
    form = blocks * channels * split.block
    own, area = 0, 1  # rows of a place: their window grows from piece to piece
    for k, piece in enumerate(rest):
        kernel, stride, dilation = piece.geometry[0:2], piece.geometry[2:4], piece.geometry[6:8]
        if k:
            own += area * piece.weights
        sides = (max(1, round(area**0.5)), max(1, round(area**0.5)))
        area = prod((s - 1) * t + (m - 1) * d + 1 for s, t, m, d in zip(sides, stride, kernel, dilation, strict=True))
    products = blocks * split.area * rest[-1].below[0] * split.block * 0.3  # neighbours overlap in part
    return rows / lanes * (sum(piece.cost for piece in before) + form) + 1.5 * height * width * own + products


ABI = 4
CONVOLUTION, MAX_POOL = 0, 1


class KernelStage(Structure):
    """One map of the chain, as ``cpu_kernel.h`` has it."""

    _fields_ = (
        *((name, c_int32) for name in (
            "kind", "co", "oh", "ow", "ci", "h", "w", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw",
            "in_left", "in_pitch", "out_left", "out_pitch", "blocked", "unused",
        )),
        ("scale_stride", c_int64), ("weight", POINTER(c_float)), ("scale", POINTER(c_float)),
        ("index", POINTER(c_int64)), ("index_stride", c_int64),
    )  # fmt: skip


class Gram(Structure):
    """Where rows stop, and the Gram matrix that gives their norms there, as ``cpu_kernel.h`` has it."""

    _fields_ = (
        ("split", c_int32), ("block", c_int32), ("kernel", POINTER(c_float)),
        *((name, POINTER(c_int32)) for name in ("last_y", "first_x", "last_x")),
        ("offset", POINTER(c_int64)), ("matrix_size", c_int64), ("patch_size", c_int64),
        ("matrix", POINTER(c_float)), ("patch", POINTER(c_float)), ("done", POINTER(c_int64)),
    )  # fmt: skip


class KernelPlan(Structure):
    """One call, as ``cpu_kernel.h`` has it."""

    _fields_ = (
        *((name, c_int32) for name in ("stages", "examples", "rows", "row_lists", "wants_one", "wants_max")),
        ("stage", POINTER(KernelStage)), ("row", POINTER(c_int64)), ("kernel", POINTER(c_float)),
        ("two", POINTER(c_float)), ("one", POINTER(c_float)), ("max", POINTER(c_float)),
        ("next", POINTER(c_int64)), ("buffer", c_int64), ("gram", Gram),
    )  # fmt: skip


def lanes() -> int:
    """Return how many rows go together."""
    width: int = library().lanes_width()
    return width


@cache
def variants() -> dict[str, Any]:
    """Return the compiled kernels that this processor can run, the best first."""
    found = variants_of(Path(__file__).with_name("_cpu_kernel"), "lanes", ABI)
    for kernel in found.values():
        kernel.lanes_run.argtypes = (POINTER(KernelPlan),)
    return found


@cache
def library() -> Any:
    """Return the best kernel, or None where there is none."""
    return next(iter(variants().values()), None)


def run(plan: KernelPlan, pieces: int) -> None:
    """Run a plan on as many threads as torch uses."""

    def work() -> None:
        if library().lanes_run(ctypes.byref(plan)):  # without the interpreter's lock
            raise MemoryError("No memory for the buffers of the compiled score kernel.")

    on_threads(work, pieces)


_MOST_KEPT = 2**23  # floats
_LARGEST = 2**18  # entries of a tensor; larger ones leave the processor's cache, where torch is as good
_BLOCKS = (16, 12, 8, 4, 3, 2, 1)  # channels worked on at once


def lanes_rows(tape: Tape, ps: Sequence[float], memory: int) -> RowNorms | None:
    """Return r and the norms of all rows; None where the kernel is absent or cannot do this tape as well as torch."""
    n, length = tape.r.shape[0], tape.r[0].numel()
    if library() is None or tape.x.is_cuda or tape.x.dtype != torch.float32 or length > 8 * tape.x[0].numel():
        return None
    start = Start.of(tape)
    pieces = pieces_of(tape, start.node)
    if not pieces or pieces[0].weight is None:
        return None
    largest = max(prod(piece.below) for piece in pieces)
    if largest > _LARGEST or 2 * largest * lanes() * 4 * torch.get_num_threads() > memory:
        return None
    order, count = live_first(start.factor)
    index = start.index if order is None else start.index.expand(n, -1).gather(1, order[:, :count])
    sorting = _by_place(index, pieces[0].above)
    split = best_split(tuple(map(PieceShape.of, pieces)), count, lanes()) if set(ps) == {2.0} else None
    found = _run(pieces, split, index.gather(1, sorting), n, ps)
    if bool(((found[2.0] < TINY) & (found[inf] > 0)).any()):  # squares have lost digits: torch has a way round
        return None
    norms = {}
    for p in ps:
        rows = torch.zeros(n, count).scatter_(1, sorting.expand(n, -1), found[p])
        if order is not None:
            rows = torch.zeros(n, length).scatter_(1, order[:, :count].expand(n, -1), rows)
        norms[p] = rows * start.factor.abs()
    return RowNorms(tape.r.flatten(1), norms)


def _by_place(index: Tensor, shape: Image) -> Tensor:
    """Return the order in which rows of one place come together, so that lanes share a small window."""
    c, h, w = shape
    return (index % (h * w) * c + index // (h * w)).argsort(dim=1)


class _Kept:
    """Pointers to where tensors' numbers lie; the tensors live as long as this does."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        self._tensors.append(tensor)
        kind: Any = {torch.int64: c_int64, torch.int32: c_int32, torch.float32: c_float}[tensor.dtype]
        return ctypes.cast(tensor.data_ptr(), POINTER(kind))


def _run(pieces: list[Piece], split: RowSplit | None, rows: Tensor, n: int, ps: Sequence[float]) -> dict[float, Tensor]:
    kept = _Kept()
    blocked = [_blocked(pieces, k) for k in range(len(pieces))]
    margins = [*(_margins(piece, b) for piece, b in zip(pieces, blocked, strict=True)), (0, pieces[-1].below[2])]
    stages = (KernelStage * len(pieces))()
    sizes = []
    for k, piece in enumerate(pieces):
        follows = k + 1 == len(pieces) or pieces[k + 1].above == piece.below
        after = margins[k + 1] if follows else (0, piece.below[2])
        sizes.append(piece.below[0] * piece.below[1] * after[1])
        stages[k] = _stage(piece, blocked[k], margins[k], after, kept)
    found = {p: torch.empty(n, rows.shape[1]) for p in (2.0, 1.0, inf) if p != 1 or p in ps}
    if split is not None:
        found[inf].zero_()  # where the form is good, no square has lost digits
    plan = KernelPlan(
        len(pieces), n, rows.shape[1], rows.shape[0], 1.0 in ps, True, stages, kept(rows.contiguous()),
        kept(_by_output(pieces[0])), *(kept(found.get(p)) for p in (2.0, 1.0, inf)),
        kept(torch.zeros(1, dtype=torch.int64)), max(sizes), _gram(pieces, split, n, kept),
    )  # fmt: skip
    run(plan, n * rows.shape[1])
    return found


def _stage(piece: Piece, blocked: int, before: tuple[int, int], after: tuple[int, int], kept: _Kept) -> KernelStage:
    scale, index = piece.scale, piece.index
    return KernelStage(
        MAX_POOL if piece.weight is None else CONVOLUTION, *piece.above, *piece.below, *piece.geometry,
        *before, *after, blocked, 0, 0 if scale is None or scale.shape[0] == 1 else scale[0].numel(),
        kept(_packed(piece.weight)), kept(scale), kept(index), 0 if index is None else index[0].numel(),
    )  # fmt: skip


def _gram(pieces: list[Piece], split: RowSplit | None, n: int, kept: _Kept) -> Gram:
    if split is None:
        return Gram()
    channels, height, width = pieces[split.at].above
    offsets = split.offsets(channels)
    bounds = (
        kept(torch.tensor([span[end] for span in some], dtype=torch.int32))
        for some, end in ((split.rows, 1), (split.columns, 0), (split.columns, 1))
    )
    patch = split.area * pieces[-1].below[0]
    matrices, patches = (
        _scratch("matrix", 2 * offsets[-1]),
        _scratch("patch", 2 * height * width * patch * lanes()),
    )
    return Gram(
        split.at, split.block, kept(_by_output(pieces[split.at])), *bounds, kept(torch.tensor(offsets)), offsets[-1],
        patch, kept(matrices), kept(patches), kept(torch.zeros(3 * n, dtype=torch.int64)),
    )  # fmt: skip


_SCRATCH = threading.local()


def _scratch(name: str, size: int) -> Tensor:
    """Return memory to work in, the same at every call of a thread: fresh memory costs a fault for every page."""
    kept: Tensor | None = getattr(_SCRATCH, name, None)
    if kept is None or len(kept) < size:
        kept = torch.empty(size)
        setattr(_SCRATCH, name, kept if size <= _MOST_KEPT else None)
    return kept


def _by_output(piece: Piece) -> Tensor:
    assert piece.weight is not None
    return piece.weight.permute(0, 2, 3, 1).contiguous()


def _blocked(pieces: list[Piece], k: int) -> int:
    """Return how many columns to work on at once where channels are few; 0 where they are many."""
    piece = pieces[k]
    if k == 0 or piece.weight is None or piece.below[0] > 4 or piece.above != pieces[k - 1].below:
        return 0
    columns = -(-piece.below[2] // piece.geometry[3])  # of one phase
    return 8 if piece.below[0] < 4 and columns >= 8 else 4


def _margins(piece: Piece, blocked: int) -> tuple[int, int]:
    """Return how many columns of zeros stand before each row that this piece reads, and how many columns a row has."""
    width = piece.above[2]
    if not blocked:
        return 0, width
    _, kernel, _, stride, _, padding, _, dilation = piece.geometry
    left = max(0, -(-(dilation * (kernel - 1) - padding) // stride))
    last = (piece.below[2] - 1 + padding) // stride
    return left, left + max(width, last + 1) + blocked


def _packed(weight: Tensor | None) -> Tensor | None:
    """Return weights (out, in, kh, kw) as blocks of input channels, [block][kh][kw][out][channel]."""
    if weight is None:
        return None
    parts, at = [], 0
    while at < weight.shape[1]:
        size = next(b for b in _BLOCKS if b <= weight.shape[1] - at)
        parts.append(weight[:, at : at + size].permute(2, 3, 0, 1).flatten())
        at += size
    return torch.cat(parts)
