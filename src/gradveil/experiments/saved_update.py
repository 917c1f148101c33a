"""Audit one update that somebody saved: no training, the same panel, the same judgement."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.base import build as build_defense
from gradveil.errors import SpecError, UpdateError
from gradveil.experiments.audit import Audit, default_folder
from gradveil.experiments.rows import NAIVE
from gradveil.experiments.run_folder import Row, RunFolder
from gradveil.experiments.scene import ATTACKS, Public, load_dataset, make_model
from gradveil.experiments.training import Progress, is_small, one_thread
from gradveil.experiments.trial import attack_all, said
from gradveil.experiments.update_files import Facts, load_weights, read_examples, read_update
from gradveil.federated.client import local_update
from gradveil.metrics import blind_guesses, measure
from gradveil.metrics.floors import grey
from gradveil.seeds import Seeds
from gradveil.types import Batch, Observation, Update

STAND_INS = 4  # public clients that the control is made from, where the truth is not known


@dataclass(frozen=True)
class UpdateAuditConfig:
    """The settings of an audit of one saved update."""

    update: str  # the safetensors file
    model: str = "lenet"
    weights: str | None = None  # safetensors: what the server sent, where the model's own initial weights are not it
    before: str | None = None  # safetensors: the weights before training, where the file holds those after it
    truth: str | None = None  # safetensors: the inputs and labels behind the update
    kind: str | None = None  # gradient, difference or weights; default: as the file says
    lr: float | None = None
    num_steps: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    defense: str = "none"  # what the client is said to have used
    attacks: tuple[str, ...] = ATTACKS
    dataset: str | None = None  # of the same kind: gives shapes, a prior, a gallery and the control
    data: str | None = None
    input_shape: tuple[int, ...] | None = None  # where there is neither a data set nor the truth
    num_classes: int = 10
    gallery: int = 100
    seed: int = 0

    @property
    def facts(self) -> Facts:
        """What the tensors do not say themselves."""
        return Facts(self.kind, self.lr, self.num_steps, self.num_examples, self.batch_size)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One update, read and checked, with what is known around it."""

    config: UpdateAuditConfig
    model: nn.Module
    update: Update
    input_shape: tuple[int, ...]
    truth: Batch | None
    public: Public | None
    seeds: Seeds

    def observation(self, update: Update) -> Observation:
        """Return what the server sees."""
        prior = None if self.public is None else self.public.prior
        return Observation(self.model, update, self.input_shape, self._num_classes(), prior=prior)

    def _num_classes(self) -> int:
        with torch.no_grad():
            return int(copy.deepcopy(self.model).eval()(torch.zeros(1, *self.input_shape)).shape[1])

    def controls(self) -> list[Batch]:
        """Return what the control is made from: the truth, else public stand-ins, else nothing."""
        if self.truth is not None:
            return [self.truth]
        if self.public is None:
            return []
        n, known = self.update.num_examples, self.public.batch
        count = min(STAND_INS, len(known) // n)
        parts = [slice(i * n, (i + 1) * n) for i in range(count)]
        return [Batch(known.inputs[part], known.labels[part]) for part in parts]

    def gallery(self) -> Tensor | None:
        """Return the images beside which an original has to be told; stand-ins are left out of it."""
        if self.public is None:
            return None
        used = 0 if self.truth is not None else STAND_INS * self.update.num_examples
        rest = self.public.batch.inputs[used : used + self.config.gallery - 1]
        return rest if len(rest) else None


def audit_update(
    config: UpdateAuditConfig, out: str | Path | None = None, resume: bool = False, progress: Progress | None = None
) -> Audit:
    """Attack a saved update, naively and as a server that knows the stated defence, beside a control.

    The control is an undefended update at the same weights: of the truth where it is given, else of public
    stand-ins, else there is none and the report says so.
    """
    case = build_case(config)
    with RunFolder.start(out or default_folder(), config, resume) as store:
        _run(case, store, progress or (lambda stage, done, total: None))
    return Audit(store)


def build_case(config: UpdateAuditConfig) -> Case:
    """Read and check everything, before anything is written."""
    seeds = Seeds(config.seed)
    dataset = load_dataset(config.dataset, config.data) if config.dataset else None
    truth = read_examples(config.truth) if config.truth else None
    shape = config.input_shape
    if truth is not None:
        shape = tuple(truth.inputs.shape[1:])
    elif dataset is not None:
        shape = dataset.input_shape
    if shape is None:
        raise SpecError(
            "The shape of the inputs is not known. Give --dataset, --truth, or --input-shape, e.g. 1x28x28."
        )
    if dataset is not None and dataset.input_shape != shape:
        raise SpecError(f"The truth has inputs of shape {shape} and {dataset.name} has {dataset.input_shape}.")
    classes = dataset.num_classes if dataset is not None else config.num_classes
    model = copy.deepcopy(make_model(config.model, shape, classes, config.seed)).train()
    sent = config.weights or config.before
    before = load_weights(model, sent) if sent else None
    update = read_update(config.update, model, config.facts, before if config.before else None)
    if truth is not None and len(truth) != update.num_examples:
        raise UpdateError(
            f"The truth has {len(truth)} examples and the update was made from {update.num_examples}. Give --examples."
        )
    public = Public.draw(dataset, config.gallery, seeds) if dataset is not None else None
    build_defense(config.defense).adaptive(model)
    for attack in config.attacks:
        build_attack(attack)
    return Case(config, model, update, shape, truth, public, seeds)


def _run(case: Case, store: RunFolder, progress: Progress) -> None:
    if not store.done("truth"):
        store.add("truth", *_floors(case))
    defense = build_defense(case.config.defense)
    servers = [replace(plain(), name=NAIVE)]
    if case.config.defense != "none":
        servers += defense.adaptive(case.model)
    wanted: dict[str, list[Countermeasure]] = {attack: [] for attack in case.config.attacks}
    for server in servers:
        for attack in [server.attack] if server.attack else case.config.attacks:
            wanted.setdefault(attack, []).append(server)
    for done, (attack, by) in enumerate(wanted.items()):
        progress("attacks", done, len(wanted))
        if not store.done(f"attack/{attack}"):
            with one_thread(is_small(case.model, case.input_shape)):
                rows, arrays = _attack(case, attack, by)
            store.add(f"attack/{attack}", rows, arrays)
    progress("attacks", len(wanted), len(wanted))


def _floors(case: Case) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = [
        {"kind": "defense", "defense": case.config.defense, "server": s.name, "why": s.why}
        for s in (build_defense(case.config.defense).adaptive(case.model) if case.config.defense != "none" else ())
    ]
    batches = case.controls()
    if not batches:
        return rows, {}
    known = Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches]))
    guesses = {"grey": grey(known)} if case.public is None else blind_guesses(known, case.public.batch)
    arrays: dict[str, Any] = {"truth" if case.truth is not None else "stand-in": known.inputs.numpy()}
    for guess, answer in guesses.items():
        arrays[guess] = answer.numpy()
        for i in range(len(known)):
            one = Batch(known.inputs[i : i + 1], known.labels[i : i + 1])
            values, _ = measure(answer[i : i + 1], None, one, case.gallery())
            rows.append({"kind": "floor", "guess": guess, "example": i} | {k: float(v[0]) for k, v in values.items()})
    return rows, arrays


def _control_update(case: Case, batch: Batch, i: int) -> Update:
    """Return the undefended update of a batch, with as many local steps as the update has."""
    update = case.update
    size = update.batch_size or len(batch)
    epochs = max(1, round(update.num_steps * size / len(batch)))
    return local_update(case.model, batch, "none", update.lr, case.seeds("control", i), epochs, update.batch_size)


def _attack(case: Case, attack: str, servers: Sequence[Countermeasure]) -> tuple[list[Row], dict[str, Any]]:
    views: dict[int, Observation] = {}
    heads: list[tuple[Row, Batch | None, int]] = []
    for i, batch in enumerate(case.controls()):
        views[len(heads)] = case.observation(_control_update(case, batch, i))
        heads.append(({"defense": "none", "server": NAIVE}, batch, i * len(batch)))
    for server in servers:
        if case.truth is None or (case.config.defense, server.name) != ("none", NAIVE):
            views[len(heads)] = server.view(case.observation(case.update))
            heads.append(({"defense": _stated(case), "server": server.name}, case.truth, 0))
        else:  # the update is itself undefended: it is the control
            views[0] = case.observation(case.update)
    failed: dict[int, str] = {}
    rngs = {i: case.seeds("attack", attack, 0 if i >= len(case.controls()) else i) for i in views}
    results = attack_all(build_attack(attack), views, rngs, failed)
    common = {"round": "update", "round_number": 0, "weights": "start", "attack": attack}
    rows: list[Row] = []
    images: list[Any] = []
    for i, (head, truth, first) in enumerate(heads):
        if i in failed:
            rows.append({"kind": "skip", **common, **head, "why": failed[i]})
            continue
        values, shown = _measured(case, results[i].inputs, results[i].labels, truth)
        for n in range(len(shown)):
            numbers = {name: float(value[n]) for name, value in values.items()}
            place = {"example": first + n, "index": len(images), "gallery": _size(case)}
            rows.append({"kind": "attack", **common, **head, **place, **numbers, **said(results[i])})
            images.append(shown[n].numpy())
    return rows, {"found": np.stack(images)} if images else {}


def _stated(case: Case) -> str:
    return case.config.defense if case.config.defense != "none" else "the update"


def _measured(
    case: Case, found: Tensor, labels: Tensor | None, truth: Batch | None
) -> tuple[dict[str, Tensor], Tensor]:
    if truth is not None:
        return measure(found, labels, truth, case.gallery())
    unknown = torch.full((len(found),), torch.nan)
    return dict.fromkeys(("mse", "psnr", "ssim", "fft", "label", "identified"), unknown), found.detach()


def _size(case: Case) -> int:
    gallery = case.gallery()
    return 1 if gallery is None else len(gallery) + 1
