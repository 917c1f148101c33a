"""Where a run on Flower stands: saved after each round, and read where a run is continued."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from gradveil.auditing.run_files import FolderError, read_rows
from gradveil.auditing.run_folder import CHECKPOINT, ROUNDS, RunFolder
from gradveil.errors import DataError
from gradveil.federated.server import Checkpoint, Memory
from gradveil.files import write_atomically

ENGINE = "flower"  # what a checkpoint's notes call it
LEAKS = "leaks.jsonl"  # what an audit found in each round
BY_NAME, IN_ORDER = ("m_t", "v_t"), ("momentum_vector",)  # what Flower's strategies remember from round to round


def standing(folder: RunFolder, resume: bool) -> Checkpoint | None:
    """Return where the run stands, without the lines of rounds that are done again; None where it begins."""
    path = folder.path / CHECKPOINT
    if not resume:
        if path.exists() or folder.rounds:
            raise FolderError(f"{folder.path} already holds a run. Continue it with --resume, or choose another --out.")
        return None
    found = Checkpoint.read(path) if path.exists() else None
    if found is not None and found.notes.get("engine") != ENGINE:
        raise DataError(f"{path} is not of a run on Flower. Continue it with the --engine that it had.")
    last = found.round if found else 0
    folder.keep_rounds(last)
    leaks = folder.path / LEAKS
    if leaks.exists():
        kept = [json.dumps(row) + "\n" for row in read_rows(leaks, {"round": int}) if row["round"] <= last]
        write_atomically(leaks, "".join(kept).encode())
    if last and [row["round"] for row in folder.rounds][-1:] != [last]:
        raise FolderError(f"{path} is of round {last}, and {ROUNDS} has no such round. Choose another --out.")
    return found


class Continued(flower.Strategy):  # type: ignore[misc]
    """A strategy that has some rounds behind it: it is told the numbers of the whole run, and what it remembered."""

    def __init__(self, strategy: flower.Strategy, start: Checkpoint | None, names: Iterable[str]) -> None:
        self._strategy, self.done, self._names = strategy, 0 if start is None else start.round, list(names)
        for kind in (*BY_NAME, *IN_ORDER):
            if start is not None and kind in start.memory:
                arrays = {name: start.memory[kind][name].numpy() for name in self._names}
                setattr(strategy, kind, list(arrays.values()) if kind in IN_ORDER else arrays)

    @property
    def memory(self) -> Memory:
        """What the strategy remembers, by the names of the model's tensors."""
        found: Memory = {}
        for kind in (*BY_NAME, *IN_ORDER):
            if (kept := getattr(self._strategy, kind, None)) is not None:
                by_name = dict(zip(self._names, kept, strict=True)) if kind in IN_ORDER else kept
                found[kind] = {name: torch.from_numpy(np.array(value)) for name, value in by_name.items()}
        return found

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Say what is sent to whom."""
        sent: Iterable[Message] = self._strategy.configure_train(self.done + server_round, arrays, config, grid)
        return sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make one model of the replies."""
        made: tuple[Any, Any] = self._strategy.aggregate_train(self.done + server_round, replies)
        return made

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Say what is sent to whom."""
        sent: Iterable[Message] = self._strategy.configure_evaluate(self.done + server_round, arrays, config, grid)
        return sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Make one record of the replies."""
        return self._strategy.aggregate_evaluate(self.done + server_round, replies)

    def summary(self) -> None:
        """Log what the strategy is."""
        self._strategy.summary()
