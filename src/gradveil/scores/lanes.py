"""Exact row norms by the compiled kernel: rows in an order that keeps their windows small, and the plan of the call."""

import threading
from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor

from gradveil.scores import library
from gradveil.scores.exact import Start, live_first
from gradveil.scores.gram import Shape, Split, best_split
from gradveil.scores.pieces import Image, Piece, pieces_of
from gradveil.scores.rows import TINY, Rows
from gradveil.scores.tape import Tape

_MOST_KEPT = 2**23  # floats
_LARGEST = 2**18  # entries of a tensor; larger ones leave the processor's cache, where torch is as good
_BLOCKS = (16, 12, 8, 4, 3, 2, 1)  # channels worked on at once


def lanes_rows(tape: Tape, ps: Sequence[float], memory: int) -> Rows | None:
    """Return r and the norms of all rows; None where the kernel is absent or cannot do this tape as well as torch."""
    n, length = tape.r.shape[0], tape.r[0].numel()
    if library.library() is None or tape.x.is_cuda or tape.x.dtype != torch.float32 or length > 8 * tape.x[0].numel():
        return None
    start = Start.of(tape)
    pieces = pieces_of(tape, start.node)
    if not pieces or pieces[0].weight is None:
        return None
    largest = max(prod(piece.below) for piece in pieces)
    if largest > _LARGEST or 2 * largest * library.lanes() * 4 * torch.get_num_threads() > memory:
        return None
    order, count = live_first(start.factor)
    index = start.index if order is None else start.index.expand(n, -1).gather(1, order[:, :count])
    sorting = _by_place(index, pieces[0].above)
    split = best_split(tuple(map(Shape.of, pieces)), count, library.lanes()) if set(ps) == {2.0} else None
    found = _run(pieces, split, index.gather(1, sorting), n, ps)
    if bool(((found[2.0] < TINY) & (found[inf] > 0)).any()):  # squares have lost digits: torch has a way round
        return None
    norms = {}
    for p in ps:
        rows = torch.zeros(n, count).scatter_(1, sorting.expand(n, -1), found[p])
        if order is not None:
            rows = torch.zeros(n, length).scatter_(1, order[:, :count].expand(n, -1), rows)
        norms[p] = rows * start.factor.abs()
    return Rows(tape.r.flatten(1), norms)


def _by_place(index: Tensor, shape: Image) -> Tensor:
    """Return the order in which rows of one place come together, so that lanes share a small window."""
    c, h, w = shape
    return (index % (h * w) * c + index // (h * w)).argsort(dim=1)


class _Kept:
    """Pointers to tensors that live as long as this does."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor | None) -> object:
        if tensor is not None:
            self._tensors.append(tensor)
        return library.pointer(tensor)


def _run(pieces: list[Piece], split: Split | None, rows: Tensor, n: int, ps: Sequence[float]) -> dict[float, Tensor]:
    kept = _Kept()
    blocked = [_blocked(pieces, k) for k in range(len(pieces))]
    margins = [*(_margins(piece, b) for piece, b in zip(pieces, blocked, strict=True)), (0, pieces[-1].below[2])]
    stages = (library.Stage * len(pieces))()
    sizes = []
    for k, piece in enumerate(pieces):
        follows = k + 1 == len(pieces) or pieces[k + 1].above == piece.below
        after = margins[k + 1] if follows else (0, piece.below[2])
        sizes.append(piece.below[0] * piece.below[1] * after[1])
        stages[k] = _stage(piece, blocked[k], margins[k], after, kept)
    found = {p: torch.empty(n, rows.shape[1]) for p in (2.0, 1.0, inf) if p != 1 or p in ps}
    if split is not None:
        found[inf].zero_()  # where the form is good, no square has lost digits
    plan = library.Plan(
        len(pieces), n, rows.shape[1], rows.shape[0], 1.0 in ps, True, stages, kept(rows.contiguous()),
        kept(_by_output(pieces[0])), *(kept(found.get(p)) for p in (2.0, 1.0, inf)),
        kept(torch.zeros(1, dtype=torch.int64)), max(sizes), _gram(pieces, split, n, kept),
    )  # fmt: skip
    library.run(plan, n * rows.shape[1])
    return found


def _stage(piece: Piece, blocked: int, before: tuple[int, int], after: tuple[int, int], kept: _Kept) -> library.Stage:
    scale, index = piece.scale, piece.index
    return library.Stage(
        library.MAX_POOL if piece.weight is None else library.CONVOLUTION, *piece.above, *piece.below, *piece.geometry,
        *before, *after, blocked, 0, 0 if scale is None or scale.shape[0] == 1 else scale[0].numel(),
        kept(_packed(piece.weight)), kept(scale), kept(index), 0 if index is None else index[0].numel(),
    )  # fmt: skip


def _gram(pieces: list[Piece], split: Split | None, n: int, kept: _Kept) -> library.Gram:
    if split is None:
        return library.Gram()
    channels, height, width = pieces[split.at].above
    offsets = split.offsets(channels)
    firsts, lasts = zip(*split.neighbours_x, strict=True)
    bounds = (kept(torch.tensor(some, dtype=torch.int32)) for some in (split.last_y, firsts, lasts))
    patch = split.area * pieces[-1].below[0]
    matrices, patches = (
        _scratch("matrix", 2 * offsets[-1]),
        _scratch("patch", 2 * height * width * patch * library.lanes()),
    )
    return library.Gram(
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
