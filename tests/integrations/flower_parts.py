"""Messages, contexts and a grid in one process, for tests of the mods without an engine."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Generator, Tensor, nn

from gradveil import tree
from gradveil.attacks.base import Attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import AttackError
from gradveil.protection.defense import Defense
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Reconstruction, Update

LR = 0.1
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1  # what an engine sets when a run starts


@dataclass(frozen=True)
class Halved(Defense):
    """Sends half of the update: a defence whose effect is known exactly."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        return replace(update, gradient=tree.scale(update.gradient, 0.5))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@dataclass(frozen=True)
class ReadOff(Attack):
    """Reads one input off a linear layer: a row of dW over its entry of db. Exact for a batch of one."""

    spec_name: ClassVar[str] = "read_off"

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return [self._one(s) for s in seen]

    def _one(self, seen: Observation) -> Reconstruction:
        if "1.weight" not in seen.visible:
            raise AttackError("the weight is not to be seen")
        weight, bias = seen.update.gradient["1.weight"], seen.update.gradient["1.bias"]
        row = int(bias.argmin())
        x = (weight[row] / bias[row]).reshape(1, *seen.input_shape).clamp(*seen.bounds)
        return Reconstruction(
            x.expand(seen.num_examples, *seen.input_shape), torch.full((seen.num_examples,), row), 0.0, True
        )


def linear_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def with_batch_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's own model, by import path."""
    conv = nn.Conv2d(input_shape[0], 4, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))


def message(model: nn.Module, node: int = 7, kind: str = "train", **config: Any) -> Message:
    content = {"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord({"lr": LR, **config})}
    return Message(RecordDict(content), dst_node_id=node, message_type=kind)


SIMULATED = {"noise": "simulated"}  # of a site whose noise a test draws again


def context(node_config: dict[str, Any] | None = None, run_config: dict[str, Any] | None = None) -> Context:
    return Context(1, 7, node_config or {}, RecordDict(), run_config or {})


def train_plainly(model: nn.Module, batch: Batch, steps: int = 1) -> None:
    """A user's own training function: nothing of gradveil in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()


def client_app(
    build: Callable[[], nn.Module],
    batch: Batch,
    mods: list[Any],
    train: Callable[[nn.Module, Batch], None] = train_plainly,
) -> ClientApp:
    """A user's own ClientApp."""
    app = ClientApp(mods=mods)

    @app.train()
    def _(msg: Message, ctx: Context) -> Message:
        model = build()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        train(model, batch)
        return reply(msg, model.state_dict(), len(batch))

    @app.evaluate()
    def _(msg: Message, ctx: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": len(batch)})}), reply_to=msg)

    return app


def reply(msg: Message, state: Params, examples: float = 1) -> Message:
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": examples})}
    return Message(RecordDict(content), reply_to=msg)


def weights(msg: Message) -> Params:
    found: Params = msg.content["arrays"].to_torch_state_dict()
    return found


def gradient(model: nn.Module, batch: Batch) -> Params:
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    named = dict(model.named_parameters())
    grads: tuple[Tensor, ...] = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, grads, strict=True))


class Nodes(Grid):
    """A grid whose nodes answer at once, each by its own function; one that returns None stays silent."""

    def __init__(self, answers: dict[int, Callable[[Message], Message | None]]) -> None:
        self.answers = answers
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for n, msg in enumerate(messages):
            msg.metadata.__dict__["_message_id"] = name = f"{len(self._replies)}-{n}"
            names.append(name)
            if (answer := self.answers[msg.metadata.dst_node_id](copy.deepcopy(msg))) is not None:
                self._replies[name] = answer
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
