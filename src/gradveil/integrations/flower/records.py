"""Between Flower's records and gradveil's ``Params``; all that the mods need to read or change in a message."""

import logging
from collections.abc import Callable

import torch

from gradveil.defenses.base import Defense, build
from gradveil.errors import DefenseError, MissingExtraError, UpdateError
from gradveil.tree import Params

try:
    from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord
except ImportError as error:
    raise MissingExtraError("Working with Flower", "flower") from error

MOD_FAILED_PRECONDITION = 6  # flwr.common.constant.ErrorCode: what Flower's own mods answer with
LOG = logging.getLogger("flwr")  # Flower shows what is said here with a run's log
Next = Callable[[Message, Context], Message]  # the next mod, and in the end the client's own function


def arrays_of(message: Message) -> tuple[str, ArrayRecord]:
    """Return the one ArrayRecord of a message with its key."""
    records = message.content.array_records
    if len(records) != 1:
        raise UpdateError(f"The message holds {len(records)} ArrayRecords; exactly one is the model. Send one.")
    key, record = next(iter(records.items()))
    return key, record


def params_of(record: ArrayRecord) -> Params:
    """Return the tensors of an ArrayRecord by name."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def record_of(params: Params) -> ArrayRecord:
    """Return the ArrayRecord of these tensors, in their order."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in params.items()})


def number(message: Message, name: str, default: float) -> float:
    """Return a number that a config or metric record of the message holds under this name."""
    for records in (message.content.config_records, message.content.metric_records):
        for record in records.values():
            if name in record:
                return float(record[name])
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
    return Message(Error(code=MOD_FAILED_PRECONDITION, reason=f"Update withheld: {reason}"), reply_to=message)


def defense_for(given: str | Defense | None, context: Context) -> Defense:
    """Return the defence in force, read when a message comes: the site's, else the one given, else the run's.

    A mod is built when the app is imported, and the settings are known only later. What the site says in its
    ``--node-config`` stands above all: whoever submits a run cannot weaken it by another spec.
    """
    spec = context.node_config.get("defense", given)
    if spec is None:
        spec = context.run_config.get("defense")
    if spec is None:
        raise DefenseError("No defense is set. Give the mod one, or set 'defense' in --node-config or the run config.")
    return build(spec)
