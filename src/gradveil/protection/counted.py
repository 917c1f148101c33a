"""Loaders that say which records their batches are of, and how a training pass finds its own among them."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from gradveil.errors import DefenseError
from gradveil.privacy.accountant import Used

B = TypeVar("B")

_LOOKED_AT = 1024  # entries of a row that tell it from others
_KEPT = 2**18  # rows that are known again
_ALIKE = 16  # records that one row may be of; with more it says too little


@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """A batch that was drawn, by its number among all of them."""

    number: int
    records: tuple[Hashable, ...]


@dataclass
class Board(threading.local):
    """The batches that a thread has drawn."""

    drawn: deque[DrawnBatch] = field(default_factory=lambda: deque(maxlen=64))
    rows: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # whose they are
    most: int = 0  # slots that one record had in a batch

    def draw(self, records: Sequence[Hashable], batch: Any = None) -> None:
        self.drawn.append(DrawnBatch(self.latest + 1, tuple(records)))
        self.most = max([self.most, *Counter(records).values()])
        if len(self.rows) > _KEPT:
            self.rows.clear()
        for t in _with_rows(batch, len(records)):
            for row, record in zip(_row_marks(t), records, strict=True):
                self.rows.setdefault(row, set()).add(record)

    @property
    def latest(self) -> int:
        return self.drawn[-1].number if self.drawn else 0


board = Board()


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Within, guards know of no batch that was drawn before: what is trained on is other data."""
    before = dict(vars(board))
    vars(board).update(vars(Board()))
    try:
        yield
    finally:
        vars(board).update(before)


class Following:
    """What one guard has seen of the board: each batch that is drawn makes one pass."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A batch that was drawn before may be of other data: its rows are known by what they hold, or not at all."""
        self._seen = board.latest

    def __setstate__(self, _: Any) -> None:
        self.begin()  # a copy may be in another thread or process

    def records_of(self, inputs: Any, count: int) -> Used:
        """Return the records of a pass with so many rows; where they are not known, what any of them may have of it.

        They are known by the rows' content, where it is what the loader gave. Where it was changed since (another kind
        of number, augmentation), they are those of the one batch that was drawn since the last pass.
        """
        since = [drawn for drawn in board.drawn if drawn.number > self._seen]
        lost = board.latest - self._seen > len(since)
        found = _owners(inputs, count)
        if found is not None and all(owners is not None for owners in found):
            return Counter(record for owners in found if owners is not None for record in owners)
        if len(since) != 1 or lost:
            return board.most
        known = since[0].records
        if count > len(known):
            raise DefenseError(
                f"A batch of {len(known)} records came to the model as {count} rows: a record in several slots of a "
                f"step moves it several times as far. Count them so: gradveil.counted() takes batches of record "
                f"numbers too, and one that stands m times in a batch pays m² uses."
            )
        some = {record for owners in found or () if owners is not None for record in owners}
        return Counter(known) if some <= set(known) else board.most

    def passed(self) -> None:
        """A release was made of the pass: its batch is used up."""
        self._seen = board.latest


def _with_rows(batch: Any, count: int) -> list[Tensor]:
    """Return the tensors of so many rows that tell something: more than one number or so."""
    tensors = (t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim > 1 and len(t) == count > 0)
    return [t for t in tensors if t[0].numel() * t.element_size() > 8 and t.layout is torch.strided]


def _row_marks(t: Tensor) -> list[Hashable]:
    flat = t.detach().flatten(1)
    some = flat[:, :: -(-flat.shape[1] // _LOOKED_AT)].contiguous()
    raw = (torch.view_as_real(some.resolve_conj()) if some.is_complex() else some).view(torch.uint8).cpu().numpy()
    kind = (str(t.dtype), tuple(t.shape[1:]))
    return [hash((kind, row.tobytes())) for row in raw]


def _owners(inputs: Any, count: int) -> list[set[Hashable] | None] | None:
    """Return the records that each row of a pass may be of; None for a row of nobody's.

    Inputs that say different things of a row are of different records, as in pairs: the row is of all of them.
    """
    found = [[board.rows.get(row, set()) for row in _row_marks(t)] for t in _with_rows(inputs, count)]
    some = [[own for own in row if 0 < len(own) <= _ALIKE] for row in zip(*found, strict=True)]
    return [set.intersection(*own) or set.union(*own) if own else None for own in some] if board.rows else None


class _Noted:
    """A batch sampler that leaves its batches' numbers where the loader finds them."""

    def __init__(self, sampler: Iterable[Sequence[Any]]) -> None:
        self.sampler = sampler
        self.notes: deque[list[Any]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.notes = deque()
        return self._numbers(self.notes)

    def _numbers(self, notes: deque[list[Any]]) -> Iterator[list[Any]]:
        for batch in self.sampler:
            notes.append(numbers := list(batch))
            yield numbers

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class Counted(Generic[B]):
    """A loader whose batches' records are counted by every guard in this thread."""

    def __init__(self, loader: "DataLoader[Any] | Iterable[B]") -> None:
        self.loader = loader
        self._noted = _Noted(()) if not isinstance(loader, DataLoader) else _Noted(_sampler_of(loader))
        self._copy = _with_sampler(loader, self._noted) if isinstance(loader, DataLoader) else None

    def __iter__(self) -> Iterator[B]:
        if self._copy is None:
            for numbers in self.loader:
                board.draw([_number(i) for i in numbers])  # type: ignore[union-attr]
                yield numbers
            return
        batches = iter(self._copy)
        notes, number_of = self._noted.notes, _numbering(self._copy.dataset)
        for batch in batches:
            board.draw([number_of(i) for i in notes.popleft()], batch)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def dataset(self) -> Any:
        return getattr(self.loader, "dataset", None)


def counted(loader: "DataLoader[Any] | Iterable[B]") -> Counted[B]:
    """Return the same loader, which also tells guards which records its batches are of.

    ``for x, y in gradveil.counted(loader)``: a defence of records then charges each record for its own uses. In place
    of a ``DataLoader`` of a dataset with numbers there may be batches of numbers: ``counted(order.split(16))``.
    """
    return Counted(loader)


def _sampler_of(loader: "DataLoader[Any]") -> Iterable[Sequence[Any]]:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise DefenseError(
            f"The records of this loader have no numbers ({type(loader.dataset).__name__}, batch_size="
            f"{loader.batch_size}): they cannot be counted. Leave counted() out, and every step counts for all records."
        )
    if type(loader).__iter__ is not DataLoader.__iter__ or not getattr(loader, "in_order", True):
        raise DefenseError(
            f"{type(loader).__name__} gives batches in an order of its own, so their records cannot be counted. Count "
            f"the plain DataLoader, with in_order=True, before a framework wraps it."
        )
    return loader.batch_sampler


def _with_sampler(loader: "DataLoader[Any]", sampler: Any) -> "DataLoader[Any]":
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device",
    )  # fmt: skip
    return DataLoader(loader.dataset, batch_sampler=sampler, **{name: getattr(loader, name) for name in names})


def _numbering(dataset: "Dataset[Any]") -> Callable[[Any], Hashable]:
    """Return what gives a record's number in the data that a part of it was taken from."""
    if isinstance(dataset, ConcatDataset) and any(isinstance(part, Subset) for part in dataset.datasets):
        raise DefenseError("Parts of a dataset were joined again, and a record may be in two. Count the whole dataset.")

    def number(index: Any) -> Hashable:
        own = dataset
        while isinstance(own, Subset):
            index, own = own.indices[index], own.dataset
        return _number(index)

    return number


def _number(index: Any) -> Hashable:
    """Return a number as Python's own, wherever it came from: 3 and tensor(3) are one record."""
    found: Hashable = index.item() if hasattr(index, "item") else index
    return found
