"""Between Flower's records and gradveil's ``Params``: what a message holds, and the numbers that it may hold."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from gradveil.errors import MissingExtraError, UpdateError
from gradveil.modules import is_trained
from gradveil.ranges import Range
from gradveil.tree import Params

try:
    from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, MetricRecord
except ImportError as error:
    raise MissingExtraError("Working with Flower", "flower") from error

MOD_FAILED_PRECONDITION = 6  # flwr.common.constant.ErrorCode: what Flower's own mods answer with
WITHHELD, SPENT, UNRELEASED = "Update withheld: ", "the budget is spent. ", "not released: "  # in errors' reasons
LOG = logging.getLogger("flwr")  # Flower shows what is said here with a run's log
Next = Callable[[Message, Context], Message]  # the next mod, and in the end the client's own function


class Refused(UpdateError):
    """A reply that a server turns away; ``why`` is the word under which it is counted."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


def arrays_of(message: Message) -> tuple[str, ArrayRecord]:
    """Return the one ArrayRecord of a message with its key."""
    records = message.content.array_records
    if len(records) != 1:
        raise UpdateError(f"The message holds {len(records)} ArrayRecords; exactly one is the model. Send one.")
    key, record = next(iter(records.items()))
    return key, record


def params_of(record: ArrayRecord) -> Params:
    """Return the tensors of an ArrayRecord by name."""
    return {name: _tensor(name, array) for name, array in record.items()}


def sent_weights(message: Message) -> Params:
    """Return the weights that a server sent, of real numbers."""
    weights = params_of(arrays_of(message)[1])
    if odd := [name for name, value in weights.items() if value.is_complex()]:
        raise UpdateError(f"the server sent {odd[0][:80]!r} as complex numbers. Nothing is done.")
    return weights


def _tensor(name: str, array: Array) -> torch.Tensor:
    """Return the tensor; the size that its header claims is held against its bytes before anything is that large."""
    try:
        file = BytesIO(array.data)
        of_version = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, kind = of_version[np.lib.format.read_magic(file)](file)
        if (there := len(array.data) - file.tell()) != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{there} bytes for {kind} {shape}")
        return torch.from_numpy(array.numpy().copy())
    except Exception as error:  # numpy reads a header as Python text, and hostile text fails in many ways
        raise UpdateError(f"{name!r} is no array of numbers ({' '.join(str(error).split())[:200]}).") from error


def record_of(params: Params) -> ArrayRecord:
    """Return the ArrayRecord of these tensors, in their order."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in params.items()})


def number(message: Message, name: str, default: float) -> float:
    """Return a number that a config or metric record of the message holds under this name."""
    for records in (message.content.config_records, message.content.metric_records):
        for record in records.values():
            if name in record:
                try:
                    return float(record[name])
                except (OverflowError, TypeError, ValueError) as error:
                    raise UpdateError(f"{name!r} is no number ({error}).") from error
    return default


def add_metrics(reply: Message, values: dict[str, float]) -> None:
    """Add numbers to the reply's MetricRecord: the strategies ask for exactly one record."""
    records = reply.content.metric_records
    if not records:
        reply.content["metrics"] = MetricRecord()
        records = reply.content.metric_records
    record = next(iter(records.values()))
    for name, value in values.items():
        record[name] = value


def withhold(message: Message, reason: str) -> Message:
    """Return an error in place of the reply: nothing of the client leaves, and the server is told why."""
    return Message(Error(code=MOD_FAILED_PRECONDITION, reason=f"{WITHHELD}{reason}"), reply_to=message)


_open: "list[ModelWatch]" = []
_lock = threading.Lock()
_plain_call: Any = nn.Module.__call__


class ModelWatch:
    """While it is open, tells of each module that is called for the first time and has the weights that were sent.

    It is told *before* the call, with the arguments, so that hooks put on the module then see this very pass. (A
    global forward pre-hook of torch comes too late for that: the module's own hooks are listed by then, and the
    keyword arguments are hidden from it.) Only the thread that opened the watch is watched, so that two clients in
    one process are not mixed up. A client that trains in a thread of its own, or through ``model.forward``, is
    not found.
    """

    def __init__(self, weights: Params, found: Callable[[nn.Module], None]) -> None:
        self._weights = weights
        self._found = found
        self._seen: dict[int, tuple[nn.Module, bool, int]] = {}  # by id, which it keeps from being used again
        self._inside = False  # a call of a model that was found is under way: its parts are no models
        self._thread = threading.get_ident()

    def __enter__(self) -> "ModelWatch":
        with _lock:
            _open.append(self)
            nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
        self._seen.clear()

    @contextmanager
    def call(self, module: nn.Module) -> Iterator[None]:
        """Take note of a module that is about to be called."""
        if self._inside or threading.get_ident() != self._thread:
            yield
            return
        parts = len(module._modules) + len(module._parameters)  # one that is called while it is built gets more
        known = self._seen.get(id(module))
        if known is None or (not known[1] and known[2] != parts):
            fits = named_as_in(module, self._weights) is not None
            self._seen[id(module)] = (module, fits, parts)
            if fits:
                self._found(module)
        self._inside = self._seen[id(module)][1]
        try:
            yield
        finally:
            self._inside = False


def named_as_in(module: nn.Module, weights: Params) -> Params | None:
    """Return weights that a server sent under the module's own names; None where they are not its weights.

    They are where the names are those of its state dict. Flower's older clients number the arrays instead, in the
    order of the state dict: there the shapes must be the same.
    """
    own = module.state_dict()
    if own.keys() == weights.keys():
        return weights
    numbered = list(weights) == [str(i) for i in range(len(own))]
    if numbered and [v.shape for v in own.values()] == [v.shape for v in weights.values()]:
        return dict(zip(own, weights.values(), strict=True))
    return None


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for watch in tuple(_open):
            stack.enter_context(watch.call(module))
        return _plain_call(module, *args, **kwargs)


def is_training(message: Message) -> bool:
    """Return whether a message asks for training, or answers such a one."""
    return bool(message.metadata.message_type.partition(".")[0] == MessageType.TRAIN)


@dataclass(frozen=True)
class Number:
    """A number in a range; a whole one only, where that is said."""

    range: Range
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        """Whether a value is such a number: no text, no list, no truth value, not NaN."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return value in self.range and (not self.whole or float(value).is_integer())

    def __str__(self) -> str:
        return f"a {'whole ' if self.whole else ''}number {self.range}"


COUNT = Number(Range(0), True)  # of examples or steps
ASKED = {  # of a training message's config
    "lr": Number(Range(1e-12, 1e6)),
    "server-round": COUNT,
    "batch-size": COUNT,
    "epochs": Number(Range(1, 10**6), True),
    "momentum": Number(Range(0, 1, below=True)),
    "weight-decay": Number(Range(0, 1e6)),
    "proximal-mu": Number(Range(0, 1e6)),
    "clip": Number(Range(0, 1e6)),
    "public-clip": Number(Range(1e-6, 1e6)),
}


def asked(message: Message, name: str, default: float) -> float:
    """Return what a server asks for under this name; anything that is no such number is refused."""
    for record in message.content.config_records.values():
        if name in record:
            if record[name] not in ASKED[name]:
                raise UpdateError(f"The server asks for a {name!r} that is not {ASKED[name]}. Nothing is done.")
            return float(record[name])
    return default


def check_asked(message: Message) -> None:
    """Raise where a number that a server asks for is none, or none that makes sense."""
    for name in ASKED:
        asked(message, name, math.nan)


def lengths(before: Params, after: Params) -> tuple[float, float]:
    """Return how far the weights and the running statistics moved; counters are no part of it."""
    squares = [0.0, 0.0]
    for name, value in before.items():
        if value.is_floating_point():
            change = after[name].double() - value.double()
            squares[not is_trained(name, value)] += float(change.square().sum())
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def middle(values: Iterable[float]) -> float:
    """Return the median of those above 0, the lower of two: 0 where there are none."""
    some = sorted(value for value in values if value > 0)
    return some[(len(some) - 1) // 2] if some else 0.0
