"""A tape as the compiled kernel takes it: convolutions and max pooling one after the other, slopes merged into them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from gradveil.representation.layers.jacobian import Tape
from gradveil.representation.layers.rules.arithmetic import Scale
from gradveil.representation.layers.rules.base import Operator
from gradveil.representation.layers.rules.convolution import Convolution
from gradveil.representation.layers.rules.dense import Dense
from gradveil.representation.layers.rules.pooling import Choose
from gradveil.representation.layers.rules.shapes import Reshape

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
    """Return the piece with these slopes after it."""
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


_BLOCKS = (1, 2, 3, 4, 8, 12, 16)  # sizes of blocks that the kernel was compiled for
_GAIN = 1.2  # times fewer multiplications, or rows go all the way


@dataclass(frozen=True)
class RowSplit:
    """Rows stop before piece ``at``; which places of that tensor see overlapping parts of the input."""

    at: int
    block: int
    windows: tuple[list[tuple[int, int]], list[tuple[int, int]]]  # by row, by column: what a place sees of the input

    @cached_property
    def last_y(self) -> list[int]:
        """Return, for each row, the last one whose places overlap with its own."""
        return [_overlapping(self.windows[0], y)[-1] for y in range(len(self.windows[0]))]

    @cached_property
    def neighbours_x(self) -> list[tuple[int, int]]:
        """Return, for each column, the first and the last one whose places overlap with its own."""
        found = [_overlapping(self.windows[1], x) for x in range(len(self.windows[1]))]
        return [(some[0], some[-1]) for some in found]

    @cached_property
    def blocks(self) -> list[int]:
        """Return how many blocks each place has: with itself, and with the neighbours after it."""
        counts = []
        for y, last in enumerate(self.last_y):
            for x, (first, end) in enumerate(self.neighbours_x):
                counts.append(end - x + 1 + (last - y) * (end - first + 1))
        return counts

    @property
    def area(self) -> int:
        """The most that a place sees of the input."""
        return prod(max(high - low for low, high in some) for some in self.windows)

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
        """Return the shape of a piece."""
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
    """Return the split before piece ``at``, where the kernel can do it."""
    channels, height, width = pieces[at].above
    rest = pieces[at:]
    joined = all(a.below == b.above for a, b in zip(pieces[at - 1 :], rest, strict=False))
    if channels > min(lanes, _BLOCKS[-1]) or not joined or not all(piece.weights for piece in rest):
        return None
    windows = [_seen(rest, size, dim) for dim, size in enumerate((height, width))]
    if any(low >= high for some in windows for low, high in some):
        return None
    return RowSplit(at, next(b for b in _BLOCKS if b >= channels), (windows[0], windows[1]))


def _seen(pieces: Sequence[PieceShape], size: int, dim: int) -> list[tuple[int, int]]:
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


def _overlapping(spans: list[tuple[int, int]], k: int) -> list[int]:
    low, high = spans[k]
    return [j for j, (other_low, other_high) in enumerate(spans) if other_low < high and low < other_high]


def _cost(pieces: Sequence[PieceShape], split: RowSplit, rows: int, lanes: int) -> float:
    """Return the vector multiplications of one example."""
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
