"""gradveil's own Flower app: the in-process client and rounds behind Flower's messages and strategies."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from gradveil.auditing.run_folder import CHECKPOINT, MODEL, RunFolder
from gradveil.auditing.train import FIT
from gradveil.errors import BudgetError, DataError, DefenseError, GradveilError
from gradveil.federated.client import Sent, evaluate
from gradveil.federated.engines import Job, World, work
from gradveil.federated.server import Checkpoint
from gradveil.federated.simulate import NOT_RELEASED, client_seed, public_records
from gradveil.integrations.flower.checks import checked
from gradveil.integrations.flower.grids import DEVICE, SampledGrid
from gradveil.integrations.flower.mods import RULE, told_here_alone
from gradveil.integrations.flower.records import (
    LOG,
    SPENT,
    Next,
    arrays_of,
    asked,
    check_asked,
    params_of,
    record_of,
    sent_weights,
    withhold,
)
from gradveil.integrations.flower.secure_aggregation import check_sum, secure_mod, secured
from gradveil.integrations.flower.settings import (
    ENGINE,
    FlowerSettings,
    build_model,
    build_strategy,
    carry_on,
    last_checkpoint,
    load_data,
    memory_of,
)
from gradveil.integrations.flower.site import (
    MAP,
    OTHER,
    check_map,
    check_own,
    check_weights,
    is_simulation,
    noise_of,
    pay,
    read_clip,
    said_outward,
    state,
    taken,
    write_clip,
)
from gradveil.losses import build as build_loss
from gradveil.models import fit_to_public
from gradveil.models.features import keep_features
from gradveil.privacy.accountant import SIMULATED
from gradveil.protection.defense import accounted, in_round, noise_row
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
    before = sent_weights(message)
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
        check_own(build_defense(settings.require_defense), stated)
        if noise == SIMULATED and not simulation:
            raise DefenseError(f"{OTHER}: this site simulates its noise, and the run is no simulation.")
    defense, ledger = settings.ledger(shares, site)
    defense = read_clip(defense, message, model)
    if accounted(defense).min_clients:
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


def make_client_app(
    settings: FlowerSettings | None = None, mods: list[Any] | None = None, simulation: bool = False
) -> ClientApp:
    """Return the app; without settings it reads them from the run config of each message.

    In a simulation clients draw from the run's seed, unless a site says otherwise: no message and no run config can.
    """

    def who(message: Message, context: Context) -> Message:
        answer = ConfigRecord({DEVICE: int(context.node_config.get(DEVICE, -1))})
        return Message(RecordDict({"node": answer}), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        if simulation:
            context.node_config.setdefault("noise", SIMULATED)
        simulated = simulation or is_simulation()
        if settings is not None:
            return train_message(message, context, settings, simulated)
        return said_outward(lambda: train_message(checked_message(message), context, taken_of(context), simulated))

    def securely(message: Message, context: Context, call_next: Next) -> Message:
        own = settings or said_outward(lambda: taken_of(context))
        return secure_mod()(message, context, call_next) if own.secure_aggregation else call_next(message, context)

    app = ClientApp(mods=[securely, *(mods or [])])
    app.query()(who)
    app.train()(train)
    return app


def taken_of(context: Context) -> FlowerSettings:
    """Return the settings of a run that this node takes from its run config."""
    return FlowerSettings.from_config(taken(context.run_config, context.node_config))


def checked_message(message: Message) -> Message:
    """Return a training message whose map is such as can be trained with."""
    for said in message.content.config_records.values():
        if MAP in said:
            check_map(said[MAP])
    return message


@dataclass
class Outcome:
    """What a run leaves: the model, and a row for each round."""

    state: Params = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)


def make_server_app(
    settings: FlowerSettings | None = None, done: Callable[[Outcome], None] = lambda _: None, simulation: bool = False
) -> ServerApp:
    """Return the app; without settings it reads them from the run config."""

    def main(grid: Grid, context: Context) -> None:
        done(serve(grid, settings or FlowerSettings.from_config(context.run_config), simulation))

    app = ServerApp()
    app.main()(main)
    return app


def serve(grid: Grid, settings: FlowerSettings, simulation: bool = False) -> Outcome:
    """Run all rounds, or those that a run which is continued has left, and return what came of them."""
    with RunFolder(settings.out).hold() if settings.out else nullcontext() as folder:
        return _serve(grid, settings, folder, simulation or is_simulation())


def _serve(grid: Grid, settings: FlowerSettings, folder: RunFolder | None, simulation: bool) -> Outcome:
    dataset, shares = load_data(settings.dataset, settings.data, settings.partition, settings.seed)
    model = build_model(settings, dataset)
    looked_at = public_records(dataset, shares, settings.seeds, FIT)
    fit_to_public(model, dataset.train.batch(looked_at).inputs if len(looked_at) else None)
    sizes = [len(share) for share in shares]
    defense, ledger = settings.ledger(shares, noise=SIMULATED if simulation else None)
    start = None if folder is None else last_checkpoint(folder, settings.resume)
    if start is not None:
        start.restore(model)
        ledger.restore(start.notes.get("accounts"))
        LOG.info("Continuing after round %s of %s.", start.round, settings.rounds)
    first = {name: (start.state if start else model.state_dict())[name] for name in model.state_dict()}
    strategy = build_strategy(settings.strategy, settings.clients)
    behind = carry_on(strategy, start, first)
    secure = None
    if settings.secure_aggregation:
        secure = secured(grid, lost=settings.lost, max_examples=max(sizes), defense=defense)
    some = public_records(dataset, shares, settings.seeds)
    public = dataset.train.batch(some) if len(some) else None

    def tell(message: Message) -> dict[str, Any]:
        model.load_state_dict(params_of(arrays_of(message)[1]))
        acting = in_round(defense, model, public, build_loss(settings.loss).of(dataset.train.labels))
        if secure is not None:
            secure.defense = acting
        return write_clip(acting, model)

    chosen = SampledGrid(secure or grid, settings, ledger, tell, behind)
    watched = checked(
        chosen,
        max_change=settings.max_change,
        max_examples=settings.max_examples or max(sizes),
        min_replies=settings.min_replies,
        defense=settings.defense,
        require_defense="" if secure else settings.require_defense,  # in a secure sum clients see to it themselves
        simulation=simulation,
    )
    watched.kinds = {name: value.dtype for name, value in model.state_dict().items()}
    outcome = Outcome(rounds=folder.rounds if folder else [])
    started = time.perf_counter()

    def after_round(since: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal started
        if since == 0:
            return None
        number, weights = behind + since, params_of(arrays)
        model.load_state_dict(weights)
        seen = evaluate(model, dataset.test, loss=settings.loss)
        row = {"round": number, "lr": settings.lr_of(number), "clients": chosen.drawn}
        row |= tally(watched.counts[-1], chosen.absent)
        row |= {"accuracy": seen.accuracy, "loss": seen.loss, "seconds": round(time.perf_counter() - started, 4)}
        row |= {"released": secure.released} if secure else {}
        row |= {"tier": "aggregate"} if accounted(defense).min_clients else {}
        row |= {"noise": SIMULATED} if "simulated" in watched.counts[-1] and noise_row(defense) else {}
        row |= {"scored_by": seen.scored_by} if seen.scored_by != "accuracy" else {}
        started = time.perf_counter()
        outcome.rounds.append(row)
        if folder is not None:
            folder.add_round(row)  # before the checkpoint: a round that is not done again has its line
            notes = {"engine": ENGINE, "accounts": [account.to_json() for account in ledger.accounts]}
            Checkpoint(number, dict(model.state_dict()), {}, {"engine": ENGINE}).save(folder.path / MODEL)
            Checkpoint(number, weights, memory_of(strategy, first), notes).save(folder.path / CHECKPOINT)
        return MetricRecord({"accuracy": seen.accuracy, "loss": seen.loss})

    result = strategy.start(
        grid=watched,
        initial_arrays=record_of(first),
        num_rounds=max(0, settings.rounds - behind),
        timeout=settings.deadline,
        train_config=ConfigRecord(
            {"batch-size": settings.batch_size or 0} | {key: getattr(settings, name) for name, key in RULE.items()}
        ),
        evaluate_fn=after_round,
    )
    if outcome.rounds and not any(row["accepted"] for row in outcome.rounds):
        why = " ".join(watched.last_reason.split())[-300:] or "no client answered"
        raise GradveilError(f"Not one update was accepted in {settings.rounds} rounds. The last reason: {why}")
    outcome.state = params_of(result.arrays) if result.arrays else dict(model.state_dict())
    return outcome


def tally(counts: dict[str, Any], absent: int = 0) -> dict[str, Any]:
    """Return a round's count of replies as the in-process rounds have it: how many were averaged, and why not."""
    turned_away = {
        "not connected": absent,
        "dropped": counts["silent"],
        "failed": counts["failed"],
        **counts.get("reasons", {}),
        "budget spent": counts.get("spent", 0),
        NOT_RELEASED: counts.get("not released", 0),
    }
    row = {"accepted": counts["kept"], "rejected": {why: count for why, count in turned_away.items() if count}}
    return row | ({"stated": counts["stated"]} if "stated" in counts else {})
