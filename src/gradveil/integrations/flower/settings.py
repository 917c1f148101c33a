"""The settings of gradveil's own Flower app, its strategies by name, and how one is continued.

A run config is the settings by other names (``batch-size``).
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from flwr.serverapp import strategy as flower
from torch import nn

from gradveil import data as datasets
from gradveil import models
from gradveil.auditing.run_folder import CHECKPOINT, ROUNDS, FolderError, RunFolder
from gradveil.data.base import Dataset
from gradveil.data.partition import Indices, deal
from gradveil.errors import DataError, DefenseError, SpecError, did_you_mean
from gradveil.federated.server import SERVERS, Checkpoint, Ledger, Memory, planned_run, sample_clients
from gradveil.federated.settings import Averaging, Training, only_trained
from gradveil.integrations.flower.site import lacks, settings_of
from gradveil.protection.defense import Defense, accounted, build
from gradveil.ranges import Count, Positive, Weight, Whole, hints_of, read
from gradveil.registry import parse
from gradveil.seeds import Seeds

SINGLE = ("fedmedian", "fedtrimmedavg", "krum", "multikrum", "bulyan")  # look at each update
MODULUS = 2**32  # of the ring in which a secure sum is taken
NEIGHBOURS = 21  # clients that hold shares of one's keys, itself among them, where there are more (odd)


@dataclass(frozen=True)
class Cohort:
    """The clients of one secure sum: K are asked, and a share of them may be lost on the way."""

    size: int
    lost: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 2:
            raise DefenseError("A sum of one client is that client's update. Ask for at least two clients.")
        if not 0 <= self.lost < 1:
            raise DefenseError(f"lost={self.lost:g} is no share: give a number from 0 to below 1.")

    @property
    def min_clients(self) -> int:
        """How many must arrive before anything is unmasked."""
        return max(2, math.ceil(self.size * (1 - self.lost) - 1e-9))

    @property
    def shares(self) -> int:
        """Among how many clients each one's keys are shared: all of them, or so many neighbours of a large cohort."""
        return min(self.size, NEIGHBOURS)

    @property
    def threshold(self) -> int:
        """How many of these must arrive before any of them helps to unmask; of neighbours it takes more than half."""
        return self.min_clients if self.shares == self.size else self.shares // 2 + 1

    @property
    def levels(self) -> int:
        """Into how many steps a number's range is cut: as many as K of them can be added up without overflow."""
        return int(min(2**30, 2 ** math.floor(math.log2((MODULUS - 1) / self.size))))


@dataclass(frozen=True, kw_only=True)
class FlowerSettings(Averaging):
    """One federated training run on Flower; ``clients`` train in a round."""

    dataset: str = "digits"
    data: str = ""  # the local data folder; a site's --node-config "data='...'" stands above it
    model: str = "lenet"
    partition: str = "iid:devices=10"
    defense: str = "none"
    strategy: str = "fedavg"  # any of flwr.serverapp.strategy, e.g. fedadam:eta=0.01
    rounds: int = 3
    seed: int = 0
    secure_aggregation: bool = False  # SecAgg+: the server sees the sum of a round's updates only
    lost: float = 0.0  # share of a round's clients that may drop out of a secure sum; with fewer it is not released
    max_change: Weight = 10.0  # times a round's median change of the weights that one reply's may be; 0: no bound
    max_examples: Whole = 0  # that a client can have; 0: as many as the largest device of the partition
    require_defense: str = ""  # replies that do not say that this was done are refused: the client's word, no proof
    deadline: Positive = 600.0  # seconds that a round waits for nodes, and then for their replies
    min_replies: Count = 1  # sound ones that a round needs; with fewer the model stays as it is
    resume: bool = False  # go on from the checkpoint in ``out``
    out: str = ""  # folder on the server for rounds.jsonl and model.safetensors; empty: keep nothing

    def __post_init__(self) -> None:
        if self.batch_size == 0:  # a run config has no None
            object.__setattr__(self, "batch_size", None)
        super().__post_init__()
        if self.require_defense and lacks(build(self.require_defense), settings_of(build(self.defense))):
            raise SpecError(
                f"The run demands {self.require_defense!r} and its own defence is {self.defense!r}: every client that "
                f"does as it is told would be refused. Give the same."
            )
        if self.resume and not self.out:
            raise SpecError("resume goes on from the checkpoint in a folder. Give out as well.")
        if self.min_replies > self.clients:
            raise SpecError(f"min_replies={self.min_replies} are more than the {self.clients} clients of a round.")
        if self.secure_aggregation:
            self._check_secure()
        elif self.lost:
            raise SpecError("lost is a share of the clients of a secure sum. Set secure-aggregation = true as well.")

    def _check_secure(self) -> None:
        """Raise where a sum of all updates is not what the run asks for."""
        Cohort(self.clients, self.lost)
        if (name := parse(self.strategy).name) in SINGLE:
            raise SpecError(f"{name} compares single updates, and under secure aggregation there is only their sum.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FlowerSettings":
        """Read a run config; what it does not name keeps its default."""
        kinds = hints_of(cls)
        values: dict[str, Any] = {}
        for key, value in config.items():
            name = key.replace("-", "_")
            if name not in kinds:
                known = ", ".join(cls().to_config())
                raise SpecError(
                    f"The run config has {key!r}, which the app does not know. {did_you_mean(name, kinds)}"
                    f"It has: {known}."
                )
            nothing = name == "batch_size" and value == 0  # a run config has no None
            values[name] = None if nothing else read(str(value), kinds[name], key)
        return cls(**values)

    def to_config(self) -> dict[str, str | int | float | bool]:
        """Return the run config: all values are numbers or text, as Flower asks."""
        values = dataclasses.asdict(self) | {"batch_size": self.batch_size or 0}
        return {name.replace("_", "-"): value for name, value in values.items()}

    def ledger(self, shares: list[Indices], spec: str = "", noise: str | None = None) -> tuple[Defense, Ledger]:
        """Return the defence as this run needs it, or a site's own, and what it costs each device.

        Raises where its promise would not hold.
        """
        training = Training(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Averaging)})
        defense = build(spec or self.defense)
        run = dataclasses.replace(planned_run(self.seeds, shares, training, defense, False), lost=self.lost)
        defense = accounted(defense).for_run(run)
        if accounted(defense).min_clients and not self.secure_aggregation:
            raise DefenseError(
                "tier=aggregate is for servers that see the sum of a cohort only. Set secure-aggregation = true "
                "(--secure-aggregation), or use tier=local."
            )
        if spec not in ("", self.defense) and any(accounted(one).min_clients for one in (defense, build(self.defense))):
            raise DefenseError(
                f"tier=aggregate needs the same defence on every site: the run has {self.defense!r}, and this site "
                f"{spec!r}."
            )
        return defense, Ledger(shares, training, defense, noise)

    @property
    def seeds(self) -> Seeds:
        """The generators of the run."""
        return Seeds(self.seed)

    def order_of(self, number: int, sizes: list[int]) -> list[int]:
        """Return all devices in the order in which a round draws them: the first ones take part."""
        return sample_clients(self.seeds, number, sizes, Training(clients=len(sizes)))


@lru_cache(maxsize=4)
def load_data(dataset: str, data: str, spec: str, seed: int) -> tuple[Dataset, list[Indices]]:
    """Return the data set and what each device holds; kept for the next message of this process."""
    loaded = datasets.load(dataset, data or None)
    return loaded, deal(loaded, spec, Seeds(seed)("partition"))


def build_model(settings: FlowerSettings, dataset: Dataset) -> nn.Module:
    """Return the model with the weights that the run starts from."""
    outputs = dataset.outputs(settings.loss)
    model = models.build(settings.model, dataset.input_shape, outputs, settings.seed, dataset.modality)
    return only_trained(model, settings.trains)


# those that work on any model's weights; users of the others write their own ServerApp
STRATEGIES: dict[str, Any] = {
    name.lower(): getattr(flower, name)
    for name in (
        "FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedAdagrad", "FedYogi",
        "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan",
    )
}  # fmt: skip


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
    if last and [row["round"] for row in folder.rounds][-1:] != [last]:
        raise FolderError(f"{path} is of round {last}, and {ROUNDS} has no such round. Choose another --out.")
    return found


def carry_on(strategy: flower.Strategy, start: Checkpoint | None, names: Iterable[str]) -> int:
    """Tell a strategy of the rounds behind it, so that it counts on and remembers; return how many these are."""
    if start is None:
        return 0
    for kind in (*BY_NAME, *IN_ORDER):
        if kind in start.memory:
            arrays = {name: start.memory[kind][name].numpy() for name in names}
            setattr(strategy, kind, list(arrays.values()) if kind in IN_ORDER else arrays)
    for act in ("configure_train", "aggregate_train"):
        setattr(strategy, act, partial(_later, getattr(strategy, act), start.round))
    return start.round


def _later(act: Callable[..., Any], done: int, server_round: int, *given: Any) -> Any:
    return act(done + server_round, *given)


def memory_of(strategy: flower.Strategy, names: Iterable[str]) -> Memory:
    """Return what a strategy remembers, by the names of the model's tensors."""
    found: Memory = {}
    for kind in (*BY_NAME, *IN_ORDER):
        if (kept := getattr(strategy, kind, None)) is not None:
            by_name = dict(zip(names, kept, strict=True)) if kind in IN_ORDER else kept
            found[kind] = {name: torch.from_numpy(np.array(value)) for name, value in by_name.items()}
    return found


# the settings of gradveil's own server rules -> Flower's names for them
RENAMED = {
    "fedavg": {},
    "fedavgm": {"lr": "server_learning_rate", "momentum": "server_momentum"},
    "fedadam": {"lr": "eta", "beta1": "beta_1", "beta2": "beta_2", "tau": "tau"},
}


def strategy_for(server: str) -> str:
    """Return the Flower strategy that stands for one of gradveil's server rules; any other text as it is.

    Flower's FedAdam corrects its first steps for bias and gradveil's does not, so these two differ a little.
    """
    spec = parse(server)
    if spec.name not in RENAMED or not spec.settings.keys() <= RENAMED[spec.name].keys():
        return server
    rule: Any = SERVERS.build(server)
    pairs = [f"{name}={getattr(rule, own)}" for own, name in RENAMED[spec.name].items()]
    return ":".join(filter(None, [spec.name, ",".join(pairs)]))
