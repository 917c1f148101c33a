"""gradveil's own ClientApp under ``verify``, as the nodes run it: message by message, each trial a node."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import save_file
from torch import Tensor, nn

from gradveil.data.base import Dataset
from gradveil.errors import GradveilError
from gradveil.files import read_safetensors
from gradveil.integrations.flower.app import make_client_app
from gradveil.integrations.flower.grids import DEVICE
from gradveil.integrations.flower.records import arrays_of, params_of
from gradveil.integrations.flower.settings import FlowerSettings
from gradveil.integrations.flower.site import statement_in
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.verification.pipelines import Canaries, OfDefense, Released, dataset_of, weights_of

FILE = "canaries.safetensors"


def read(data: Path) -> Dataset:
    """Return the records of all nodes as their data set; ``natural`` deals them out."""
    found, _ = read_safetensors(data / FILE)
    return dataset_of(Canaries(found["inputs"], found["labels"]), found["present"].bool())


@dataclass
class OnFlower(OfDefense):
    """Rounds of messages to the ClientApp, with the same weights in each, as a server that listens would send."""

    rounds: int = 2
    lr: float = 0.1
    name: str = "flower"
    trial_by_trial: bool = False

    def run(self, model: nn.Module, canaries: Canaries, present: Tensor) -> Iterator[Released]:
        """Send each node the weights, and read the update off the weights that come back."""
        start, state, count = weights_of(model), copy.deepcopy(model.state_dict()), len(canaries)
        self.before = (0, count - 1)
        with TemporaryDirectory() as folder:
            held = {"inputs": canaries.inputs, "labels": canaries.labels, "present": present.to(torch.uint8)}
            save_file({name: value.contiguous().cpu() for name, value in held.items()}, Path(folder) / FILE)
            settings = FlowerSettings(
                dataset=f"{__name__}:read",
                data=folder,
                model=copy.deepcopy(model),  # type: ignore[arg-type] # build takes a module as it is
                partition="natural",
                batch_size=None,
                lr=self.lr,
                defense=describe(self.defense),
                clients=len(present),
                rounds=self.rounds,
                loss=self.loss,
            )
            app, spent = make_client_app(settings), 0.0
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1  # as an engine sets them
            nodes = [_node(trial, folder) for trial in range(len(present))]
            for number in range(1, self.rounds + 1):
                for trial, node in enumerate(nodes):
                    reply = app(_asked(state, trial, number, self.lr), node)
                    if reply.has_error():
                        raise GradveilError(f"A node of Flower did not answer: {reply.error.reason}")
                    after = params_of(arrays_of(reply)[1])
                    change = torch.cat([((w - after[n]) / self.lr).flatten() for n, w in start.items()])
                    spent = max(spent, float((statement_in(reply) or {}).get("spent", 0.0)))
                    yield Released(trial, start, change)
            self.promised = sqrt(spent)


def _node(trial: int, folder: str) -> Context:
    config: dict[str, Any] = {DEVICE: trial, "account": str(Path(folder) / f"account-{trial}.json")}
    return Context(1, trial, config, RecordDict(), {})


def _asked(state: Params, node: int, number: int, lr: float) -> Message:
    config = ConfigRecord({"lr": lr, "server-round": number})
    content = RecordDict({"arrays": ArrayRecord(state), "config": config})
    return Message(content, dst_node_id=node, message_type="train")
