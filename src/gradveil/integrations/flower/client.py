"""The client of gradveil's own Flower app: the in-process client behind Flower's messages."""

from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gradveil.defenses.base import build
from gradveil.errors import DataError
from gradveil.federated.client import Sent
from gradveil.federated.engines import Job, World, work
from gradveil.federated.simulate import client_seed
from gradveil.integrations.flower.records import number, params_of, record_of
from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data
from gradveil.integrations.local_training import fresh_rng
from gradveil.tree import Params

DEVICE = "partition-id"  # what Flower calls the number of a node's share of the data


def make_client_app(settings: FlowerSettings | None = None, mods: list[Any] | None = None) -> ClientApp:
    """Return the app; without settings it reads them from the run config of each message."""

    def who(message: Message, context: Context) -> Message:
        answer = ConfigRecord({DEVICE: int(context.node_config.get(DEVICE, -1))})
        return Message(RecordDict({"node": answer}), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        return train_message(message, context, settings or FlowerSettings.from_config(context.run_config))

    app = ClientApp(mods=mods or [])
    app.query()(who)
    app.train()(train)
    return app


def train_message(message: Message, context: Context, settings: FlowerSettings) -> Message:
    """Train on this node's share of the data and return the new weights."""
    folder = str(context.node_config.get("data", settings.data))
    dataset, shares = load_data(settings.dataset, folder, settings.partition, settings.seed)
    device = int(context.node_config.get(DEVICE, -1))
    if not 0 <= device < len(shares):
        raise DataError(
            f"partition-id={device}: the partition {settings.partition!r} has devices 0..{len(shares) - 1}."
        )
    round_number = int(number(message, "server-round", 1))
    before = params_of(next(iter(message.content.array_records.values())))
    model = build_model(settings, dataset)
    model.load_state_dict(before)
    local = replace(settings, proximal=number(message, "proximal-mu", settings.proximal))  # the strategy may set it
    defense = build(str(context.node_config.get("defense", settings.defense)))
    world = World(model, dataset.train, defense, local)
    seed = fresh_rng().initial_seed() if settings.secret else client_seed(settings.seeds, round_number, device)
    sent = work(model, world, Job(device, shares[device], seed), number(message, "lr", settings.lr))
    metrics = {"num-examples": sent.update.num_examples, "num-steps": sent.update.num_steps}
    return Message(
        RecordDict({"arrays": record_of(weights_after(before, sent)), "metrics": MetricRecord(metrics)}),
        reply_to=message,
    )


def weights_after(before: Params, sent: Sent) -> Params:
    """Return the state dict that carries an update: W - lr g, the client's buffers, counters as they came."""
    moved = {name: before[name] - sent.update.lr * g for name, g in sent.update.gradient.items()}
    return before | moved | sent.buffers
