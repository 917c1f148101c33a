"""A training run from its settings to its folder: what ``gradveil train`` does."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.auditing.run_folder import CHANGED, CHECKPOINT, MODEL, ROUNDS, FolderError, Row, RunFolder
from gradveil.data import load
from gradveil.data.base import Dataset, Split
from gradveil.data.partition import Indices, deal
from gradveil.errors import MissingExtraError, SpecError
from gradveil.federated.client import evaluate
from gradveil.federated.engines import ENGINES, World
from gradveil.federated.server import SERVERS, Checkpoint, planned_run
from gradveil.federated.settings import Training
from gradveil.federated.simulate import FederatedRun, Round, choose, public_records, simulate
from gradveil.files import wrap_parse_errors
from gradveil.modalities import IMAGE
from gradveil.models import fit_to_public
from gradveil.models.features import keep_features
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import CLIPS, RATES, HeadRun, PlannedRun, Rehearsal, rehearse
from gradveil.protection.defense import Defense, accounted, noise_row
from gradveil.protection.defense import build as build_defense
from gradveil.ranges import Count, Positive, Seed
from gradveil.registry import Spec, parse, split_specs
from gradveil.seeds import Seeds
from gradveil.threats.setup import find_device, fitting_model
from gradveil.threats.trial import check_fits
from gradveil.tree import Params
from gradveil.types import Batch

FIT = 2000  # public examples that fixed layers learn from, at most

OF_IMAGES = "lenet:activation=relu,init=kaiming"  # the model of images, which trains quickly
SIMULATED = "aggregate, simulated"  # in process nobody is kept from seeing single updates; Flower's SecAgg+ does that


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Training):
    """All settings of a run, as config.toml holds them."""

    dataset: str = "digits"
    data: str | None = None
    model: str = ""  # empty: what suits the data set
    partition: str = "iid:devices=10"
    defense: str = "none"
    rounds: Count = 20
    batch_size: Count | None = 8
    lr: Positive = 0.2
    engine: str = "auto"
    device: str = "auto"
    early_stop: Count | None = None
    evaluate_every: Count = 1
    save_every: Count = 1
    seed: Seed = 0

    # may differ when a run is continued: they change where and how long, not what
    FREE: ClassVar[frozenset[str]] = frozenset({"rounds", "data", "engine", "device", "early_stop", "save_every"})

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that may differ when a run is continued."""
        return self.FREE - {"rounds"} if self.schedule.startswith("cosine") else self.FREE


def with_model(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """Return the settings with the model that suits the data set, where none is named."""

    suits = OF_IMAGES if dataset.modality == IMAGE else dataset.default_model
    return config if config.model else replace(config, model=suits)


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    progress: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Run the rounds and return a summary; the folder holds settings, versions, rounds and weights.

    ``progress`` gets ``{"round": n}`` where the run begins, and then the row of each round.
    """

    defense_text, wanted = without_auto(config.defense)
    config = replace(config, defense=defense_text)
    defense = build_defense(config.defense)
    config.lr_of(1)  # what cannot be leaves no folder behind
    if config.engine != "auto":
        ENGINES.build(config.engine)
    check_fits(config.defense, defense, dataset := load(config.dataset, config.data))
    config = replace(with_model(config, dataset), loss=dataset.fitting_loss(config.loss))
    seeds = Seeds(config.seed)
    clients = deal(dataset, config.partition, seeds("partition"))
    public, device = public_records(dataset, clients, seeds, FIT), find_device(config.device)
    model = fitting_model(config.model, dataset, config.loss, config.seed, config.trains).to(device)
    fit_to_public(model, dataset.train.batch(public).inputs if len(public) else None)
    rehearsed = None
    if wanted:
        config, rehearsed = rehearse_run(config, wanted, model, dataset, clients, public, seeds)
        defense = build_defense(config.defense)
    if not resume:  # a round that cannot begin is refused before there is a folder
        trial = FederatedRun(model, dataset, clients, config, defense, seeds)
        jobs = trial.sample(1)
        trial.charge(1, jobs)
        trial.defended(jobs)
    with RunFolder.start(out, config, resume, config.may_change) as folder:
        start = _standing(folder, config) if resume else None
        first = start.round if start else 0
        progress({"round": first})  # where it begins
        fixed, model = frozen_part(model)
        dataset = through(fixed, dataset, [public, *clients])
        engine = config.engine
        if engine == "auto":
            engine = choose(World(model, dataset.train, defense, config), (config.rounds - first) * config.clients)
        rounds = simulate(model, dataset, clients, config, defense, seeds, engine=engine, resume=start)
        watch = board(out) if tensorboard else lambda row: None
        for row in _drive(rounds, dataset.test, folder, config, dict(fixed.state_dict()), defense, dataset.class_names):
            watch(row)
            progress(row)
        said = {"rehearsed": asdict(rehearsed)} if rehearsed else {}
        return _summary(folder, config, engine) | _bought(folder, defense) | said


def without_auto(defense: str) -> tuple[str, frozenset[str]]:
    """Return a defence's spec without ``clip=auto`` and ``lr=auto``, and which of the two it asked for."""

    wanted, parts = set(), []
    for part in map(parse, split_specs(defense)):
        if part.name == "veil":
            wanted |= {key for key in ("clip", "lr") if part.settings.get(key) == "auto"}
            part = Spec(
                "veil", {key: value for key, value in part.settings.items() if value != "auto" or key not in wanted}
            )
        parts.append(str(part))
    return ("+".join(parts), frozenset(wanted)) if wanted else (defense, frozenset())


def rehearse_run(
    config: TrainConfig,
    wanted: frozenset[str],
    model: nn.Module,
    dataset: Dataset,
    clients: Sequence[Indices],
    public: Indices,
    seeds: Seeds,
) -> tuple[TrainConfig, Rehearsal]:
    """Return the settings with the rate and clip that a rehearsal on public records chose; no client is asked."""

    run = planned_run(seeds, clients, config, build_defense(config.defense))
    acting: Any = accounted(build_defense(config.defense)).for_run(run)
    if not hasattr(acting, "client_multiplier"):
        raise SpecError("clip=auto and lr=auto are for veil alone. Give numbers where defences are joined.")
    found = rehearse_head(
        model, dataset.train.batch(public), dataset.num_classes, run, acting.client_multiplier,
        momentum=getattr(SERVERS.build(config.aggregator), "momentum", 0.0), seed=config.seed,
        rates=() if "lr" in wanted else (config.lr_of(1),), clips=() if "clip" in wanted else (acting.measured.clip,),
    )  # fmt: skip
    text = f"{config.defense}{',' if ':' in config.defense else ':'}clip={found.clip:g}"
    return replace(config, lr=found.lr, defense=text if "clip" in wanted else config.defense), found


def rehearse_head(
    model: nn.Module,
    public: Batch,
    kinds: int,
    run: PlannedRun,
    multiplier: float,
    *,
    momentum: float = 0.0,
    seed: int = 0,
    rates: Sequence[float] = (),
    clips: Sequence[float] = (),
) -> Rehearsal:
    """Rehearse a run of a model whose trained part is one linear layer; ``multiplier``: of a client's noise."""

    fixed, head = frozen_part(model)
    layers = list(head.children())
    if not len(fixed) or len(layers) != 1 or not isinstance(layers[0], nn.Linear) or layers[0].bias is not None:
        raise SpecError(
            "A rehearsal is for models that train one linear layer without bias on fixed features (features, "
            "scatter:patches=N). Give lr and clip yourself."
        )
    if not len(public):
        raise SpecError(
            "A rehearsal needs public records, training records that no device holds, and there are none: deal out "
            "fewer (per_device=), or give lr and clip yourself."
        )
    with torch.no_grad():
        keep_features(fixed, public.inputs)
        at = next(layers[0].parameters())
        features = torch.cat([fixed(some.to(at)).cpu() for some in public.inputs.split(200)])
    noise = multiplier / (run.slots * math.sqrt(run.cohort))
    people = run.rounds * run.cohort // run.participations  # as many as take turns
    alike = HeadRun(run.rounds, run.cohort * run.slots, noise, people * run.records, run.steps, momentum)
    return rehearse(features, public.labels, kinds, alike, seed, rates or RATES, clips or CLIPS)


def _standing(folder: RunFolder, config: TrainConfig) -> Checkpoint | None:
    """Return where the run stands, and drop the lines of rounds that are to be done again."""

    path = folder.path / CHECKPOINT
    if not path.exists():
        (folder.path / ROUNDS).unlink(missing_ok=True)
        return None
    checkpoint = Checkpoint.read(path)
    if checkpoint.notes.get("engine") == "flower":
        raise FolderError(f"{path} is of a run on Flower. Continue it with --engine flower.")
    folder.keep_rounds(checkpoint.round)
    with wrap_parse_errors(folder.path / ROUNDS, FolderError, CHANGED):  # now, not after hours
        _best(folder.rounds)
        _summary(folder, config, "")
    if checkpoint.round and [row["round"] for row in folder.rounds][-1:] != [checkpoint.round]:
        raise FolderError(
            f"{path} is of round {checkpoint.round}, and {ROUNDS} has no such round: one of them was changed by hand, "
            "or damaged. Choose another --out."
        )
    return checkpoint


def frozen_part(model: nn.Module) -> tuple[nn.Sequential, nn.Module]:
    """Return the first layers of a chain, up to the first that is trained, and the rest: the names stay."""

    first, rest = nn.Sequential(), nn.Sequential()
    if not isinstance(model, nn.Sequential):
        return first, model
    for name, part in model.named_children():
        moving = any(isinstance(m, (_BatchNorm, _DropoutNd)) for m in part.modules())
        learns = any(p.requires_grad for p in part.parameters())
        (rest if len(rest) or moving or learns else first).add_module(name, part)
    heavy = any(True for _ in first.buffers()) or any(True for _ in first.parameters())
    return (first, rest) if heavy else (nn.Sequential(), model)


def through(fixed: nn.Sequential, dataset: Dataset, used: Sequence[Indices]) -> Dataset:
    """Return the data set as the fixed first layers put it out, so that they run once; ``used``: training records."""

    if not len(fixed):
        return dataset
    at = next(iter([*fixed.parameters(), *fixed.buffers()])).device

    def passed(split: Split, chosen: Indices) -> Split:
        parts = np.array_split(chosen, max(1, len(chosen) // 200))

        def run(some: Tensor) -> Tensor:
            keep_features(fixed, some)
            out: Tensor = fixed(some)
            return out.cpu()

        with torch.no_grad():
            rows = np.concatenate([run(split.batch(part).inputs.to(at)).numpy() for part in parts])
        images = np.zeros((len(split), *rows.shape[1:]), np.float32)
        images[chosen] = rows
        return replace(split, images=images, scale=1.0)

    train = passed(dataset.train, np.unique(np.concatenate(used)))
    return replace(dataset, train=train, test=passed(dataset.test, np.arange(len(dataset.test))))


def _drive(
    rounds: Iterable[Round],
    test: Split,
    folder: RunFolder,
    config: TrainConfig,
    fixed: Params,
    defense: Defense,
    class_names: Sequence[str],
) -> Iterator[Row]:
    """Measure, write and yield a row for each round; end early where the accuracy has not risen for long enough."""

    best, since = _best(folder.rounds)
    patience = math.inf if config.early_stop is None else config.early_stop
    if since >= patience:  # it had stopped before
        return
    started = time.perf_counter()
    for final in rounds:
        is_last = final.number == config.rounds
        row: Row = {"round": final.number, "lr": final.lr, "clients": list(final.clients)}
        row |= {"accepted": final.accepted, "rejected": final.rejected} | noise_row(defense)
        row |= {"tier": SIMULATED} if accounted(defense).min_clients else {}
        if final.accounts:
            row["spent"] = max(account.spent for account in final.accounts)  # μ² of the client that took part most
        if final.number % config.evaluate_every == 0 or is_last:
            seen = evaluate(final.model, test, loss=config.loss)
            row |= {"accuracy": seen.accuracy, "loss": seen.loss}
            row |= {"scored_by": seen.scored_by} if seen.scored_by != "accuracy" else {}
            best, since = (seen.accuracy, 0) if seen.accuracy > best else (best, since + 1)
            if seen.outcome and (is_last or since >= patience):
                logging.getLogger("gradveil").info("On held-out examples: %s.", seen.outcome.line(class_names))
        row["seconds"] = round(time.perf_counter() - started, 4)
        started = time.perf_counter()
        folder.add_round(row)  # before the checkpoint: a round that is not done again has its line
        is_last = is_last or since >= patience
        if final.number % config.save_every == 0 or is_last:
            done = final.checkpoint()
            if is_last:  # the weights before the checkpoint, for the same reason
                replace(done, state=fixed | done.state).save(folder.path / MODEL)
            done.save(folder.path / CHECKPOINT)
        yield row
        if since >= patience:
            break


def _best(rows: Iterable[Row]) -> tuple[float, int]:
    """Return the best accuracy so far and how many measurements ago it was."""
    best, since = -math.inf, 0
    for accuracy in (row["accuracy"] for row in rows if row.get("accuracy") is not None):
        best, since = (accuracy, 0) if accuracy > best else (best, since + 1)
    return best, since


def _summary(folder: RunFolder, config: TrainConfig, engine: str) -> dict[str, Any]:
    rows = folder.rounds
    measured = [row for row in rows if row.get("accuracy") is not None]
    best = max(measured, key=lambda row: row["accuracy"], default={})
    last = measured[-1] if measured else {}
    return {
        "folder": str(folder.path),
        "rounds": rows[-1]["round"] if rows else 0,
        "stopped_early": bool(rows) and rows[-1]["round"] < config.rounds,
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        "scored_by": best.get("scored_by", "accuracy"),
        "rejected": turned_away(rows),
        "engine": engine,
        "defense": config.defense,
        "seconds": round(sum(row["seconds"] for row in rows), 3),
    }


def turned_away(rows: Iterable[Row]) -> dict[str, int]:
    """Return how many updates of these rounds were turned away, by reason."""
    counts = Counter[str]()
    for row in rows:
        counts.update(row["rejected"])
    return dict(counts)


def listed(counts: dict[str, int]) -> str:
    """Return counts in words: ``2 too far, 1 malformed``."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


DELTA, GUESS = 1e-5, 0.01  # at which what was bought is shown


def _bought(folder: RunFolder, defense: Defense) -> dict[str, Any]:
    """Return what the client that took part most has bought and spent, where the defence promises something."""

    spent = [row["spent"] for row in folder.rounds if "spent" in row]
    if not spent:
        return {}
    tier = "aggregate" if accounted(defense).min_clients else "local"
    bought = {"tier": tier, "simulated": True, "limit": accounted(defense).allowance}
    return {"bought": bought | Account("most", spent=spent[-1]).figures(DELTA, GUESS)}


SCALARS = ("accuracy", "loss", "lr", "leak-psnr", "leak-floor", "mu", "epsilon")  # of a round's row, for TensorBoard


def board(out: Path) -> Callable[[Row], None]:
    """Return what writes the numbers of a round's row as event files for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("TensorBoard", "tensorboard") from error
    writer = SummaryWriter(str(out / "tensorboard"))

    def write(row: Row) -> None:
        for name in SCALARS:
            if row.get(name) is not None:
                writer.add_scalar(name, row[name], row["round"])
        writer.flush()

    return write
