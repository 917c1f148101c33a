"""Audit one update that somebody saved: no training, the same panel, the same judgement."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradveil import pace
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.base import default_panel
from gradveil.attacks.search.matching import sending_norms
from gradveil.auditing import update_files
from gradveil.auditing.audit import Audit, check_rows, default_folder
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.auditing.update_files import Facts, fitting_loss, load_weights, read_examples, read_loss, read_update
from gradveil.auditing.work import NOT_TRIED, Progress, Written, cut_short, probe_rows, steps_told
from gradveil.countermeasures import Countermeasure
from gradveil.errors import SpecError, UpdateError
from gradveil.federated.client import check_loss, local_update
from gradveil.federated.settings import Local
from gradveil.losses import CROSS_ENTROPY, CrossEntropy, Loss
from gradveil.modalities import IMAGE, Modality
from gradveil.models import build_working
from gradveil.pace import as_clock
from gradveil.protection.defense import Defense
from gradveil.protection.defense import build as build_defense
from gradveil.ranges import ClassCount, Count, Positive, Seed, check
from gradveil.seeds import Seeds
from gradveil.threats.panel import attacks_of, oblivious, servers_of
from gradveil.threats.probes import Probed, probe
from gradveil.threats.rows import modality_rows
from gradveil.threats.setup import find_device, is_busy, is_small, load_dataset, one_thread, with_found
from gradveil.threats.trial import Public, Trial, client_row, floors, run
from gradveil.threats.verdict import NOT_HERE
from gradveil.types import Batch, Observation, Update

LOG = logging.getLogger("gradveil")
STAND_INS = 4  # public clients that the control is made from, where the truth is not known


@dataclass(frozen=True)
class UpdateAuditConfig(Facts):
    """The settings of an audit of one saved update."""

    update: str  # the safetensors file
    model: str = "lenet"
    weights: str | None = None  # safetensors: what the server sent, where the model's own initial weights are not it
    before: str | None = None  # safetensors: the weights before training, where the file holds those after it
    truth: str | None = None  # safetensors: the inputs and labels behind the update
    loss: str | None = None  # that the client minimised; default: as the file says
    defense: str = "none"  # what the client is said to have used
    attacks: tuple[str, ...] = ()  # none: those that suit the model (see ``default_panel``)
    dataset: str | None = None  # of the same kind: gives shapes, a prior, a gallery and the control
    data: str | None = None
    input_shape: tuple[int, ...] | None = None  # where there is neither a data set nor the truth
    num_classes: ClassCount = 10
    gallery: Count = 100
    minutes: Positive | None = None  # at most, for all of it
    device: str = "cpu"  # cpu, cuda or auto
    seed: Seed = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SavedUpdate:
    """One update, read and checked, with what is known around it."""

    config: UpdateAuditConfig
    model: nn.Module
    update: Update
    input_shape: tuple[int, ...]
    truth: Batch | None
    public: Public | None
    seeds: Seeds
    spec: str = "cross_entropy"  # of the loss
    loss: Loss = CROSS_ENTROPY  # for targets as the truth or the data set has them
    modality: Modality = IMAGE

    @property
    def device(self) -> torch.device:
        """Where the attacks compute."""
        return next(self.model.parameters()).device

    def observation(self, update: Update) -> Observation:
        """Return what the server sees."""
        prior = None if self.public is None else self.public.prior
        seen = Observation(self.model, update, self.input_shape, self._num_classes, prior=prior, loss=self.loss)
        return replace(seen, modality=self.modality)

    @cached_property
    def _num_classes(self) -> int:
        with torch.no_grad():
            output = copy.deepcopy(self.model).eval()(torch.zeros(1, *self.input_shape, device=self.device))
        # a user's loss of two classes may need one output only
        return max(int(output[0].numel()), 2 if self.loss.targets == "classes" else 1)

    @cached_property
    def knowing(self) -> tuple[Countermeasure, ...]:
        """The servers that know the stated defence."""
        return () if self.config.defense == "none" else with_found(self._defense.servers(self.model), self.probed)

    @cached_property
    def _defense(self) -> Defense:
        return build_defense(self.config.defense)

    @cached_property
    def probed(self) -> Probed:
        """What running the stated defence says about it."""
        rng, update = self.seeds("probed"), self.update
        count = 2 * update.num_examples
        few = Batch(torch.rand(count, *self.input_shape, generator=rng), torch.zeros(count, dtype=torch.long))
        if self.public is not None:
            few = self.public.batch
        elif self.controls and self.controls[0].labelled:
            few = self.controls[0]
        local = Local(batch_size=update.batch_size, loss=self.spec, **asdict(update.rule))
        examples = few, update.num_examples
        return probe(self._defense, self.model, *examples, local, update.lr, self.seeds, self._num_classes)

    @cached_property
    def controls(self) -> list[Batch]:
        """What the control is made from: the truth, else public stand-ins, else nothing."""
        if self.truth is not None:
            return [self.truth]
        if self.public is None:
            return []
        n, public = self.update.num_examples, self.public.batch
        return [public[i * n : (i + 1) * n] for i in range(min(STAND_INS, len(public) // n))]

    @cached_property
    def control_updates(self) -> list[Update]:
        """The undefended update of each control, by the same local training."""
        lr, size, rule = self.update.lr, self.update.batch_size, asdict(self.update.rule)
        made = []
        for i, batch in enumerate(self.controls):
            epochs = max(1, round(self.update.num_steps * (size or len(batch)) / len(batch)))
            rng, own = self.seeds("control", i), batch.to(self.device)
            made.append(local_update(self.model, own, "none", lr, rng, epochs, size, loss=self.spec, **rule))
        return made


def audit_update(
    config: UpdateAuditConfig,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    written: Written | None = None,
) -> Audit:
    """Attack a saved update, naively and as a server that knows the stated defence, beside a control.

    The control is an undefended update at the same weights: of the truth where it is given, else of public
    stand-ins, else there is none and the report says so.
    """
    with pace.Limit(pace.seconds_of(config.minutes)), one_thread(is_busy()):
        case = build_case(config)
        with RunFolder.start(out or default_folder(), case.config, resume, {"device", "minutes"}) as store:
            check_rows(store)
            _run(case, store, progress or (lambda stage, done, total: None), written or (lambda store: None))
    return Audit(store)


def build_case(config: UpdateAuditConfig) -> SavedUpdate:
    """Read and check everything, before anything is written."""
    update_files.check_files(config.update, config.weights, config.before, config.truth)
    seeds, device = Seeds(config.seed), find_device(config.device)
    dataset = load_dataset(config.dataset, config.data) if config.dataset else None
    truth = read_examples(config.truth) if config.truth else None
    shape = config.input_shape if dataset is None else dataset.input_shape
    if truth is not None:
        shape = tuple(truth.inputs.shape[1:])
    if shape is None:
        raise SpecError(
            "The shape of the inputs is not known. Give --dataset, --truth, or --input-shape, e.g. 1x28x28."
        )
    if dataset is not None and dataset.input_shape != shape:
        raise SpecError(f"The truth has inputs of shape {shape} and {dataset.name} has {dataset.input_shape}.")
    spec = config.loss or read_loss(config.update)
    loss, outputs = fitting_loss(spec, config.num_classes, dataset, truth)
    sure = dataset is not None and isinstance(loss, CrossEntropy)
    kind = IMAGE if dataset is None else dataset.modality
    model = copy.deepcopy(build_working(config.model, shape, outputs, config.seed, kind, sure_of_classes=sure)).train()
    sent = config.weights or config.before
    before = load_weights(model, sent) if sent else None
    update = read_update(config.update, model, config, before if config.before else None)
    if truth is not None and len(truth) != update.num_examples:
        raise UpdateError(
            f"The truth has {len(truth)} examples and the update was made from {update.num_examples}. Give --examples."
        )
    stand_ins = 0 if truth is not None else STAND_INS * update.num_examples
    public = None
    if dataset is not None:
        public = Public.draw(dataset, seeds("public"), gallery=config.gallery, skip=stand_ins).to(device)
    build_defense(config.defense).servers(model)
    if not config.attacks:
        config = replace(config, attacks=default_panel(model, update, kind))
    for attack in config.attacks:
        build_attack(attack)
    case = SavedUpdate(config, model.to(device), update.to(device), shape, truth, public, seeds, spec, loss, kind)
    if case.controls and case.controls[0].labelled:
        check_loss(case.model, case.controls[0], spec)
    return case


def _run(case: SavedUpdate, store: RunFolder, progress: Progress, written: Written) -> None:
    store.drop([NOT_TRIED, *(row["unit"] for row in store.rows if cut_short(row))])
    if not store.done("truth"):
        store.add("truth", *_floors(case))
    wanted: dict[str, list[Countermeasure]] = {attack: [] for attack in case.config.attacks}
    for server in servers_of(("oblivious", "adaptive"), case.knowing):
        for attack in attacks_of(server, case.config.attacks, case.modality):
            wanted.setdefault(attack, []).append(server)
    left = {attack: its for attack, its in wanted.items() if not store.done(f"attack/{attack}")}
    LOG.info("plan: %s on one update, and its controls", ", ".join(left))
    if minutes := case.config.minutes:
        LOG.info("plan: no more than %s in all, in equal parts", as_clock(60 * minutes))
    late: list[Row] = []
    for done, (attack, servers) in enumerate(left.items()):
        progress("attacks", len(wanted) - len(left) + done, len(wanted))
        with one_thread(is_small(case.model, case.input_shape)):
            trials = _trials(case, attack, servers)
            if pace.left() <= 0:
                late += [{"kind": "skip", **t.about, "why": "out of time", "out_of_time": True} for t in trials]
                continue
            with pace.Limit(pace.left() / (len(left) - done), steps_told(progress, attack)):
                rows, images = run(trials, case.public)
        store.add(f"attack/{attack}", rows, {"found": np.stack(images)} if images else {})
        written(store)
    if late:
        store.add(NOT_TRIED, late)
    progress("attacks", len(wanted), len(wanted))


def _floors(case: SavedUpdate) -> tuple[list[Row], dict[str, Any]]:
    norms = sending_norms(case.model) if case.update.buffers else 0
    rows: list[Row] = [client_row(case.update, norms), *modality_rows(case.modality)]
    rows += [{"kind": "tier", "tier": tier, "why": why} for tier, why in NOT_HERE.items()]
    if case.config.defense != "none":
        rows += probe_rows(case.config.defense, case.probed, case.knowing)
    batches = case.controls
    if not batches:
        return rows, {}
    known = Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches]))
    blind, answers = floors(known, case.public, modality=case.modality)
    pictures = {"truth" if case.truth is not None else "stand-in": known.inputs, **answers}
    return rows + blind, {name: x.numpy() for name, x in pictures.items()}


def _trials(case: SavedUpdate, attack: str, servers: Sequence[Countermeasure]) -> list[Trial]:
    """Return the controls, then the update as each server looks at it."""
    common = {"round": "update", "round_number": 0, "weights": "start"}

    def trial(update: Update, server: Countermeasure, defense: str, truth: Batch | None, i: int, first: int) -> Trial:
        about = {**common, "attack": attack, "defense": defense, "server": server.name}
        return Trial(case.observation(update), server, attack, case.seeds("attack", attack, i), truth, about, first)

    stated = case.config.defense if case.config.defense != "none" else "the update"
    itself = case.truth is not None and case.config.defense == "none"  # the update is undefended: it is the control
    trials = []
    for i, batch in enumerate(case.controls):
        update = case.update if itself else case.control_updates[i]
        trials.append(trial(update, oblivious(), "none", batch, i, i * len(batch)))
    if not itself:
        trials += [trial(case.update, server, stated, case.truth, 0, 0) for server in servers]
    return trials
