"""The settings of gradveil's own Flower app; a run config is the same by other names (``batch-size``)."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from gradveil import data as datasets
from gradveil import models
from gradveil.data.base import Dataset
from gradveil.data.partition import Indices, deal
from gradveil.errors import DefenseError, SpecError, did_you_mean
from gradveil.federated.ledger import Ledger, planned_run, sample_clients
from gradveil.federated.server import SERVERS
from gradveil.federated.settings import Averaging, Training, only_trained
from gradveil.integrations.flower.required_defense import RequiredDefense, parts_of
from gradveil.protection.defense import Defense, accounted, build
from gradveil.ranges import Count, Positive, Weight, Whole
from gradveil.registry import parse
from gradveil.seeds import Seeds

SINGLE = (
    "fedclippedavg",
    "fedmedian",
    "fedtrimmedavg",
    "krum",
    "multikrum",
    "bulyan",
)  # look at each update
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
    audit: str = ""  # attack a sample of the updates in each round with this; empty: no audit
    audit_sample: int = 1
    audit_max_examples: int = 16  # an update of more examples is not attacked
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
        if self.require_defense and RequiredDefense(build(self.require_defense)).lacks(parts_of(build(self.defense))):
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
        if self.audit:
            raise SpecError("Under secure aggregation the server sees no single update to audit. Leave audit out.")
        if (name := parse(self.strategy).name) in SINGLE:
            raise SpecError(f"{name} compares single updates, and under secure aggregation there is only their sum.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FlowerSettings":
        """Read a run config; what it does not name keeps its default."""
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, value in config.items():
            name = key.replace("-", "_")
            name = cls.RENAMED.get(name, name)
            if name not in defaults:
                known = ", ".join(cls().to_config())
                raise SpecError(
                    f"The run config has {key!r}, which the app does not know. {did_you_mean(name, defaults)}"
                    f"It has: {known}."
                )
            values[name] = type(defaults[name])(value)
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


# the settings of gradveil's own server rules -> Flower's names for them
RENAMED = {
    "fedavg": {"lr": ""},
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
    if spec.name == "fedavg" and rule.lr != 1.0:
        raise SpecError("Flower's FedAvg takes the average as it is. Use fedavgm:lr=...,momentum=0 for a smaller step.")
    pairs = [f"{name}={getattr(rule, own)}" for own, name in RENAMED[spec.name].items() if name]
    return ":".join(filter(None, [spec.name, ",".join(pairs)]))
