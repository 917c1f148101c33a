"""The settings of gradveil's own Flower app; a run config is the same by other names (``batch-size``)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from gradveil import data as datasets
from gradveil import models
from gradveil.data.base import Dataset
from gradveil.data.partition import Indices, partition
from gradveil.errors import SpecError, did_you_mean
from gradveil.federated.client import Local
from gradveil.federated.schedules import SCHEDULES
from gradveil.federated.server import SERVERS
from gradveil.federated.simulate import Training, sample_clients
from gradveil.registry import parse
from gradveil.seeds import Seeds


@dataclass(frozen=True)
class FlowerSettings:
    """One federated training run on Flower. All values are numbers or text, as Flower's run config asks."""

    dataset: str = "digits"
    data: str = ""  # the local data folder; a site's --node-config "data='...'" stands above it
    model: str = "lenet"
    partition: str = "iid:devices=10"
    defense: str = "none"
    strategy: str = "fedavg"  # any of flwr.serverapp.strategy, e.g. fedadam:eta=0.01
    rounds: int = 3
    devices: int = 10  # per round
    epochs: int = 1
    batch_size: int = 32  # 0: all of a client's examples at once
    lr: float = 0.01
    schedule: str = "constant"
    weight_decay: float = 0.0
    proximal: float = 0.0
    seed: int = 0
    secret: bool = False  # clients draw their randomness from the operating system, not from the seed
    audit: str = ""  # attack a sample of the updates in each round with this; empty: no audit
    audit_sample: int = 1
    audit_max_examples: int = 16  # an update of more examples is not attacked
    out: str = ""  # folder on the server for rounds.jsonl and model.safetensors; empty: keep nothing

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FlowerSettings":
        """Read a run config; what it does not name keeps its default."""
        types: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(cls)}
        values = {}
        for key, value in config.items():
            name = key.replace("-", "_")
            if name not in types:
                hint = did_you_mean(name, types)
                raise SpecError(f"The run config has {key!r}, which the app does not know. {hint}It has: {_known()}.")
            values[name] = types[name](value)
        return cls(**values)

    def to_config(self) -> dict[str, str | int | float | bool]:
        """Return the run config."""
        return {name.replace("_", "-"): value for name, value in dataclasses.asdict(self).items()}

    def local_with(self, proximal: float) -> Local:
        """Return how a client trains; the strategy may set FedProx's factor itself."""
        return Local(self.epochs, self.batch_size or None, self.weight_decay, proximal)

    @property
    def seeds(self) -> Seeds:
        """The generators of the run."""
        return Seeds(self.seed)

    def lr_of(self, number: int) -> float:
        """Return the learning rate of a round."""
        return SCHEDULES.build(self.schedule).lr(self.lr, number, self.rounds)

    def order_of(self, number: int, sizes: list[int]) -> list[int]:
        """Return all devices in the order in which a round draws them: the first ones take part."""
        return sample_clients(self.seeds, number, sizes, Training(devices=len(sizes)))


def _known() -> str:
    return ", ".join(f.name.replace("_", "-") for f in dataclasses.fields(FlowerSettings))


@lru_cache(maxsize=4)
def load_data(dataset: str, data: str, spec: str, seed: int) -> tuple[Dataset, list[Indices]]:
    """Return the data set and what each device holds; kept for the next message of this process."""
    loaded = datasets.load(dataset, data or None)
    return loaded, partition(loaded.train.labels, spec, Seeds(seed)("partition"))


def build_model(settings: FlowerSettings, dataset: Dataset) -> nn.Module:
    """Return the model with the weights that the run starts from."""
    return models.build(settings.model, dataset.input_shape, dataset.num_classes, settings.seed)


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
