"""A training run in a folder: a line for each round, a checkpoint to go on from, an end when nothing improves."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.data.base import Split
from gradveil.federated.checkpoint import Checkpoint
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import Round

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes: ``rounds.jsonl``, ``checkpoint.safetensors`` and, at its end, ``model.safetensors``."""

    path: Path

    @property
    def rounds(self) -> Path:
        """One JSON line for each finished round."""
        return self.path / "rounds.jsonl"

    @property
    def checkpoint(self) -> Path:
        """Where the run stands."""
        return self.path / "checkpoint.safetensors"

    @property
    def model(self) -> Path:
        """The weights that the run ended with."""
        return self.path / "model.safetensors"

    def rows(self) -> list[Row]:
        """Return the rounds so far; a line that was cut off by a kill is dropped."""
        rows: list[Row] = []
        for line in self.rounds.read_text(encoding="utf-8").splitlines() if self.rounds.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def add(self, row: Row) -> None:
        """Write one round."""
        plain = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        with self.rounds.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")

    def resume(self) -> Checkpoint | None:
        """Return where the run stands, and drop the lines of rounds that are to be done again."""
        if not self.checkpoint.exists():
            self.rounds.unlink(missing_ok=True)
            return None
        found = Checkpoint.read(self.checkpoint)
        kept = [row for row in self.rows() if row["round"] <= found.round]
        part = self.rounds.with_name(self.rounds.name + ".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(part, self.rounds)
        return found


def run(
    rounds: Iterable[Round],
    test: Split,
    folder: RunFolder,
    *,
    last: int,
    patience: int | None = None,
    evaluate_every: int = 1,
    save_every: int = 1,
    watch: Callable[[Row], None] = lambda row: None,
) -> Iterator[Row]:
    """Drive the rounds; measure, write and yield a row for each.

    Accuracy is measured every ``evaluate_every`` rounds and after the last one. With ``patience`` the run ends when
    that many measurements in a row brought no higher accuracy.
    """
    best, since = _standing(folder.rows())
    started = time.perf_counter()
    final: Round | None = None
    for final in rounds:
        row: Row = {"round": final.number, "lr": final.lr, "clients": list(final.clients)}
        row |= {"accepted": final.accepted, "rejected": final.rejected}
        if final.number % evaluate_every == 0 or final.number == last:
            seen = evaluate(final.model, test)
            row |= {"accuracy": seen.accuracy, "loss": seen.loss}
            best, since = (seen.accuracy, 0) if seen.accuracy > best else (best, since + 1)
        row["seconds"] = round(time.perf_counter() - started, 4)
        started = time.perf_counter()
        folder.add(row)
        stop = patience is not None and since >= patience
        if final.number % save_every == 0 or final.number == last or stop:
            final.checkpoint().save(folder.checkpoint)
        watch(row)
        yield row
        if stop:
            break
    if final is not None:
        final.checkpoint().save(folder.model)


def _standing(rows: Iterable[Row]) -> tuple[float, int]:
    """Return the best accuracy so far and how many measurements ago it was."""
    best, since = -1.0, 0
    for accuracy in (row["accuracy"] for row in rows if row.get("accuracy") is not None):
        best, since = (accuracy, 0) if accuracy > best else (best, since + 1)
    return best, since
