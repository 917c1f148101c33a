"""The strategies of gradveil's Flower app, by name: Flower's own, and a clipped mean; and how one is continued."""

import inspect
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from gradveil.auditing.run_folder import CHECKPOINT, ROUNDS, FolderError, RunFolder, read_rows
from gradveil.errors import DataError, SpecError, did_you_mean
from gradveil.federated.server import Checkpoint, Memory
from gradveil.files import write_atomically
from gradveil.integrations.flower.checks import lengths, middle
from gradveil.integrations.flower.records import arrays_of, params_of, record_of
from gradveil.integrations.local_training import is_trained
from gradveil.ranges import read
from gradveil.registry import parse
from gradveil.tree import Params


class FedClippedAvg(flower.FedAvg):  # type: ignore[misc]
    """The mean of changes that are cut to the round's median length (norm bounding, Sun et al. 2019).

    No client moves the model further than a usual one, however far off it is; in which direction is left to it.
    Running statistics are cut in the same way, by themselves.
    """

    def __init__(self, times: float = 1.0, **settings: Any) -> None:
        if not 0 < times < math.inf:
            raise ValueError(f"times={times:g}: how many times the median a change may be long; above 0")
        super().__init__(**settings)
        self.times = times
        self._before: Params = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._before = params_of(arrays)
        sent: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the changes, none of them longer than the median allows."""
        arrived = list(replies)
        good = [reply for reply in arrived if not reply.has_error()]
        found = [lengths(self._before, params_of(arrays_of(reply)[1])) for reply in good]
        limits = [self.times * middle(some) for some in zip(*found, strict=True)]
        for reply, own in zip(good, found, strict=True):
            parts = [1.0 if have <= limit else limit / have for have, limit in zip(own, limits, strict=True)]
            if min(parts) < 1:
                self._shorten(reply, parts)
        result: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, arrived)
        return result

    def _shorten(self, reply: Message, parts: list[float]) -> None:
        key, record = arrays_of(reply)
        state = params_of(record)
        for name, old in self._before.items():
            if old.is_floating_point():
                part = parts[not is_trained(name, old)]
                change = part * (state[name].double() - old.double())
                state[name] = (old.double() + change).to(state[name].dtype)
        reply.content[key] = record_of(state)


# those that work on any model's weights; users of the others write their own ServerApp
STRATEGIES: dict[str, Any] = {
    name.lower(): getattr(flower, name)
    for name in (
        "FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedAdagrad", "FedYogi",
        "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan",
    )
} | {"fedclippedavg": FedClippedAvg}  # fmt: skip


def build_strategy(spec: str, clients: int | None = None) -> flower.Strategy:
    """Return the strategy; which nodes take part is decided by the grid, so it is told to take all it sees.

    Raises where it could do nothing for so many clients a round.
    """
    parsed = parse(spec)
    if parsed.name not in STRATEGIES:
        hint = did_you_mean(parsed.name, STRATEGIES)
        raise SpecError(f"No strategy is called {parsed.name!r}. {hint}Known: {', '.join(STRATEGIES)}.")
    cls = STRATEGIES[parsed.name]
    numbers = {
        name: type(p.default)
        for name, p in inspect.signature(cls).parameters.items()
        if isinstance(p.default, (int, float)) and not name.startswith(("fraction_", "min_"))
    }
    values: dict[str, Any] = {}
    for key, text in parsed.settings.items():
        if key not in numbers:
            raise SpecError(f"Flower's {parsed.name} has no {key!r}. It has: {', '.join(numbers) or 'no settings'}.")
        values[key] = read(text, numbers[key], f"{parsed.name}:{key}")
    try:
        built = cls(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, **values)
    except ValueError as error:
        raise SpecError(f"{spec}: {error}") from error
    if clients is not None:
        _check_cohort(built, clients)
    return built


def _check_cohort(built: flower.Strategy, clients: int) -> None:
    """Raise where a robust rule is one by name alone: it leaves out nobody, or never gets enough replies."""
    if isinstance(built, flower.FedTrimmedAvg) and not int(built.beta * clients):
        raise SpecError(
            f"fedtrimmedavg:beta={built.beta:g} leaves out nobody of {clients} clients. Give beta={1 / clients:.2g} or "
            f"more (below 0.5), or use fedmedian."
        )
    needed = 4 * built.num_malicious_nodes + 3 if isinstance(built, flower.Bulyan) else 0
    if clients < needed:
        raise SpecError(f"bulyan needs {needed} clients a round for that many malicious ones, and there are {clients}.")


ENGINE = "flower"  # what a checkpoint's notes call it
LEAKS = "leaks.jsonl"  # what an audit found in each round
BY_NAME, IN_ORDER = ("m_t", "v_t"), ("momentum_vector",)  # what Flower's strategies remember from round to round


def last_checkpoint(folder: RunFolder, resume: bool) -> Checkpoint | None:
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
        sent: Iterable[Message] = self._strategy.configure_evaluate(self.done + server_round, arrays, config, grid)
        return sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._strategy.aggregate_evaluate(self.done + server_round, replies)

    def summary(self) -> None:
        self._strategy.summary()
