"""Exact row norms by the compiled kernel: the chain as a plan, rows in an order that keeps their windows small."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import torch
from torch import Tensor

from gradveil.scores import library
from gradveil.scores.convolution import Convolution
from gradveil.scores.exact import Start, live_first
from gradveil.scores.operators import Dense, Operator, Reshape, Scale
from gradveil.scores.pooling import Choose
from gradveil.scores.rows import TINY, Rows
from gradveil.scores.tape import Tape

_LARGEST = 2**15  # entries of a tensor whose rows stay in a processor's cache
_BLOCKS = (16, 12, 8, 4, 3, 2, 1)  # channels worked on at once


@dataclass(frozen=True)
class Piece:
    """One convolution or max pooling, with the slopes that follow it on the way back; channels last throughout."""

    above: tuple[int, int, int]  # channels, height, width that cotangents come from
    below: tuple[int, int, int]
    weight: Tensor | None  # (out, in, kh, kw); None: max pooling
    geometry: tuple[int, ...]  # kernel, stride, padding, dilation, each for rows and columns
    index: Tensor | None = None  # max pooling: (N, oh, ow, c)
    scale: Tensor | None = None  # (n, h, w, c)


def lanes_rows(tape: Tape, ps: Sequence[float], memory: int) -> Rows | None:
    """Return r and the norms of all rows; None where the kernel is absent or cannot do this tape as well as torch."""
    n, length = tape.r.shape[0], tape.r[0].numel()
    if library.library() is None or tape.x.is_cuda or tape.x.dtype != torch.float32 or length > 8 * tape.x[0].numel():
        return None
    start = Start.of(tape)
    pieces = _pieces(tape, start.node)
    if not pieces or pieces[0].weight is None or max(prod(piece.below) for piece in pieces) > _LARGEST:
        return None
    order, count = live_first(start.factor)
    index = start.index if order is None else start.index.expand(n, -1).gather(1, order[:, :count])
    sorting = _by_place(index, pieces[0].above)
    found = _run(pieces, index.gather(1, sorting), n, ps)
    if bool(((found[2.0] < TINY) & (found[inf] > 0)).any()):  # squares have lost digits: torch has a way round
        return None
    norms = {}
    for p in ps:
        rows = torch.zeros(n, count).scatter_(1, sorting.expand(n, -1), found[p])
        if order is not None:
            rows = torch.zeros(n, length).scatter_(1, order[:, :count].expand(n, -1), rows)
        norms[p] = rows * start.factor.abs()
    return Rows(tape.r.flatten(1), norms)


def _by_place(index: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the order in which rows of one place come together, so that lanes share a small window."""
    c, h, w = shape
    return (index % (h * w) * c + index // (h * w)).argsort(dim=1)


def _pieces(tape: Tape, start: int) -> list[Piece] | None:
    """Return the maps from a node back to the input, or None where they are no chain that the kernel knows."""
    found: list[Piece] = []
    at, image = start, _image(tape.nodes[start].shape)
    while at:
        if len(tape.nodes[at].edges) != 1 or image is None:
            return None
        (edge,) = tape.nodes[at].edges
        at, operator = edge.source, edge.operator
        if isinstance(operator, Scale):
            if not found or operator.source != operator.target:
                return None
            found[-1] = _scaled(found[-1], operator)
            continue
        if isinstance(operator, Reshape):
            image = _reshaped(found, operator, image)
            continue
        piece = _piece(operator, image)
        if piece is None:
            return None
        found.append(piece)
        image = piece.below
    return found


def _image(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    if len(shape) == 4:
        return shape[1], shape[2], shape[3]
    return (shape[1], 1, 1) if len(shape) == 2 else None


def _reshaped(found: list[Piece], operator: Reshape, image: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """Take a flattened image up again: the last matrix writes to it with channels last."""
    target = _image(operator.source)
    if target is None or target == image or operator.source[0] != operator.target[0]:
        return target if operator.source[0] == operator.target[0] else None
    if not found or image[1:] != (1, 1) or found[-1].weight is None:
        return None
    last = found[-1]
    assert last.weight is not None
    order = torch.arange(prod(target)).view(target).permute(1, 2, 0).flatten()
    scale = None if last.scale is None else last.scale.expand(-1, 1, 1, prod(target))[..., order].contiguous()
    found[-1] = replace(last, weight=last.weight[:, order], scale=scale)
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


def _piece(operator: Operator, image: tuple[int, int, int]) -> Piece | None:
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
        index = operator.index.permute(0, 2, 3, 1).contiguous()
        return Piece(image, below, None, operator.window, index)
    return None


def _run(pieces: list[Piece], rows: Tensor, n: int, ps: Sequence[float]) -> dict[float, Tensor]:
    keep: list[Tensor] = []  # what the plan points to

    def kept(tensor: Tensor | None) -> Tensor | None:
        if tensor is not None:
            keep.append(tensor)
        return tensor

    stages = (library.Stage * len(pieces))()
    blocked = [_blocked(piece) if k and piece.weight is not None else 0 for k, piece in enumerate(pieces)]
    for k in range(1, len(pieces)):  # a flattened image has no room for columns of zeros
        if pieces[k - 1].below != pieces[k].above:
            blocked[k] = 0
    largest = 1
    for k, piece in enumerate(pieces):
        left, pitch = _margins(piece, blocked[k])
        after = _margins(pieces[k + 1], blocked[k + 1]) if k + 1 < len(pieces) else (0, piece.below[2])
        if k + 1 < len(pieces) and pieces[k + 1].above != piece.below:
            after = (0, piece.below[2])
        largest = max(largest, piece.below[0] * piece.below[1] * after[1])
        scale = None if piece.scale is None else kept(piece.scale)
        index = kept(piece.index)
        weight = kept(_packed(piece.weight, blocked[k])) if k and piece.weight is not None else None
        stages[k] = library.Stage(
            library.CONVOLUTION if piece.weight is not None else library.MAX_POOL, *piece.above, *piece.below,
            *piece.geometry, left, pitch, *after, blocked[k], 0,
            0 if scale is None or scale.shape[0] == 1 else scale[0].numel(), library.pointer(weight),
            library.pointer(scale), library.pointer(index), 0 if index is None else index[0].numel(),
        )  # fmt: skip
    first = pieces[0].weight
    assert first is not None
    kernel = first.permute(0, 2, 3, 1).contiguous()
    rows = rows.contiguous()
    found = {p: torch.empty(n, rows.shape[1]) for p in (2.0, 1.0, inf) if p != 1 or p in ps}
    counter = torch.zeros(1, dtype=torch.int64)
    plan = library.Plan(
        len(pieces), n, rows.shape[1], rows.shape[0], 1.0 in ps, True, stages, library.pointer(rows),
        library.pointer(kernel), *(library.pointer(found.get(p)) for p in (2.0, 1.0, inf)), library.pointer(counter),
        largest,
    )  # fmt: skip
    library.run(plan, n * rows.shape[1])
    return found


def _blocked(piece: Piece) -> int:
    """Return how many columns to work on at once where channels are few; 0 where they are many."""
    columns = -(-piece.below[2] // piece.geometry[3])  # of one phase
    if piece.below[0] > 4:
        return 0
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


def _packed(weight: Tensor, blocked: int) -> Tensor:
    """Return weights (out, in, kh, kw) as blocks of input channels, [block][kh][kw][out][channel]."""
    if blocked:
        return weight.permute(2, 3, 0, 1).contiguous()
    parts, at = [], 0
    while at < weight.shape[1]:
        size = next(b for b in _BLOCKS if b <= weight.shape[1] - at)
        parts.append(weight[:, at : at + size].permute(2, 3, 0, 1).flatten())
        at += size
    return torch.cat(parts)
