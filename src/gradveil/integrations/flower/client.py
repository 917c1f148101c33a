"""The client of gradveil's own Flower app: a site's share of the data, trained as a run asks and the site allows."""

import math
from contextlib import nullcontext
from dataclasses import replace

from flwr.app import Context, Message, MetricRecord, RecordDict

from gradveil.errors import BudgetError, DataError, DefenseError
from gradveil.federated.client import Sent
from gradveil.federated.engines import Job, World, work
from gradveil.federated.simulate import client_seed
from gradveil.integrations.allowed import check_weights
from gradveil.integrations.flower.chosen_grid import DEVICE
from gradveil.integrations.flower.demand import OTHER, Demand
from gradveil.integrations.flower.outgoing import told_here_alone
from gradveil.integrations.flower.public_map import hear
from gradveil.integrations.flower.records import SPENT, arrays_of, params_of, record_of, withhold
from gradveil.integrations.flower.secure_client import check_sum
from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data
from gradveil.integrations.flower.site import noise_of, pay
from gradveil.integrations.flower.statements import state
from gradveil.integrations.flower.values import asked, check_asked
from gradveil.models.features import keep_features
from gradveil.privacy.accountant import SIMULATED
from gradveil.protection.defense import build as build_defense
from gradveil.tree import Params


def train_message(message: Message, context: Context, settings: FlowerSettings, simulation: bool = False) -> Message:
    """Train on this node's share of the data and return the new weights."""
    folder = str(context.node_config.get("data", settings.data))
    dataset, shares = load_data(settings.dataset, folder, settings.partition, settings.seed)
    device = int(context.node_config.get(DEVICE, -1))
    if not 0 <= device < len(shares):
        raise DataError(
            f"partition-id={device}: the partition {settings.partition!r} has devices 0..{len(shares) - 1}."
        )
    check_asked(message)
    round_number, noise = int(asked(message, "server-round", 1)), noise_of(context)
    before = params_of(arrays_of(message)[1])
    model = build_model(settings, dataset)
    own = model.state_dict()
    if not simulation and before.keys() == own.keys():
        check_weights(before, own)
    model.load_state_dict(before)
    local = replace(settings, proximal=asked(message, "proximal-mu", settings.proximal))  # the strategy may set it
    lr = asked(message, "lr", settings.lr)
    site = str(context.node_config.get("defense", ""))
    stated = build_defense(site or settings.defense)
    if settings.require_defense and settings.secure_aggregation:
        Demand(build_defense(settings.require_defense)).check(stated)
        if noise == SIMULATED and not simulation:
            raise DefenseError(f"{OTHER}: this site simulates its noise, and the run is no simulation.")
    defense, ledger = settings.ledger(shares, site)
    defense = hear(defense, message, model)
    if defense.min_clients:
        check_sum(defense, context, lr)
    account = None
    if ledger.cost is not None:
        try:
            account = pay(message, context, ledger.cost, ledger.limit or math.inf)
        except BudgetError as error:
            return withhold(message, f"{SPENT}{error}")
    keep_features(model, dataset.train.batch(shares[device]).inputs)
    world = World(model, dataset.train, defense, local)
    seed = client_seed(settings.seeds, round_number, device) if noise == SIMULATED else None
    with told_here_alone(context) if account is not None else nullcontext():
        sent = work(model, world, Job(device, shares[device], seed), lr)
    if settings.secure_aggregation:  # float32 would round a small step of a large weight before the sum does
        before = {name: value.double() if value.is_floating_point() else value for name, value in before.items()}
    steps, examples = sent.update.num_steps, sent.update.num_examples
    metrics = MetricRecord({"num-examples": examples, "num-steps": steps})
    reply = Message(
        RecordDict({"arrays": record_of(weights_after(before, sent)), "metrics": metrics}), reply_to=message
    )
    state(reply, stated, context, steps=steps, examples=examples, account=account)
    return reply


def weights_after(before: Params, sent: Sent) -> Params:
    """Return the state dict that carries an update: W - lr g, the client's buffers, counters as they came."""
    moved = {name: before[name] - sent.update.lr * g for name, g in sent.update.gradient.items()}
    return before | moved | sent.buffers
