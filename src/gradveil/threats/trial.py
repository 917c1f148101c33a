"""One trial: a client's update is observed once, viewed as each server would, attacked, and measured.

The audit, the audit of a saved update, the paper's items, the leak check of an integration and the leak meter all go
this way.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.data.base import Dataset
from gradveil.errors import DefenseError, GradveilError, from_defense
from gradveil.federated.client import step_gradient, train_client, update_batch_size
from gradveil.federated.settings import Local, said_of_trained
from gradveil.files import Row
from gradveil.losses import build as build_loss
from gradveil.metrics import COMMON, blind_guesses, measure
from gradveil.modalities import IMAGE, Modality
from gradveil.protection.defense import Defense
from gradveil.threats.probing.function import aside, wire_form
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update, check_update

PUBLIC = 2000  # examples of the test split that the server may know
RANK = 256  # principal directions of its prior
GALLERY = 100  # examples that an original must be told from, itself included


@dataclass(frozen=True)
class Public:
    """What the server knows of the kind of data: examples that are no client's."""

    batch: Batch
    prior: GaussianPrior | None = None
    gallery: Tensor | None = None  # (M, *shape), beside which an original has to be told

    @classmethod
    def draw(
        cls, dataset: Dataset, rng: Generator, rank: int | None = RANK, gallery: int = GALLERY, skip: int = 0
    ) -> "Public":
        """Take examples of the test split at random; ``rank`` None: no prior; ``skip``: those not in the gallery."""
        batch = dataset.test.sample(PUBLIC, rng)
        prior = None if rank is None else GaussianPrior.fit(batch.inputs, rank=rank)
        others = batch.inputs[skip : skip + gallery - 1]
        return cls(batch, prior, others if len(others) else None)

    def to(self, device: torch.device) -> "Public":
        """Return it with the prior on a device: one object, so that problems that share it stack."""
        p = self.prior
        moved = None if p is None else GaussianPrior(p.mean.to(device), p.factor.to(device), p.ridge)
        return replace(self, prior=moved)

    @property
    def choices(self) -> int:
        """How many examples an original stands among."""
        return 1 if self.gallery is None else len(self.gallery) + 1


def check_fits(name: str, defense: Defense, dataset: Dataset) -> None:
    """Raise where a defence changes the numbers of examples and these are ids, with nothing between two of them."""
    if dataset.modality.last and "batch" in defense.acts_on:
        what_to_do = "Use one on gradients or records: gaussian, pruning, veil or dp_sgd."
        raise DefenseError(f"{name} changes the numbers of examples, and ids of tokens are names. {what_to_do}")


def observe(
    model: nn.Module,
    batch: Batch,
    defense: Defense,
    rng: Generator,
    num_classes: int,
    prior: GaussianPrior | None = None,
    lr: float | None = None,
    with_labels: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
    local: Local | None = None,
    modality: Modality = IMAGE,
) -> Observation:
    """Return all that the server sees of a client's update on these examples, and what is public.

    With ``lr`` the client trains as in a round, by ``local`` (default: one step on all examples), which shuffles the
    examples first (and so draws from ``rng``); without it the update is the gradient at the examples as they are.
    """
    local = local or Local(batch_size=None)
    minimised = build_loss(local.loss).of(batch.labels)
    if lr is None:
        gradient = step_gradient(model, batch, defense, rng, loss=minimised)
        agreed = Update({}, len(batch))
        update = defense.on_update(replace(agreed, gradient=gradient), rng)
    else:
        count = len(batch)
        agreed = Update({}, count, local.steps(count), lr, update_batch_size(local, count), local.rule)
        update = aside(train_client, copy.deepcopy(model), batch, defense, lr, rng, local).whole
    update = wire_form(update, agreed, model)
    check_update(update, model)
    labels = batch.labels if with_labels else None
    shape = tuple(batch.inputs.shape[1:])
    return Observation(model, update, shape, num_classes, labels, bounds, prior, loss=minimised, modality=modality)


def client_row(update: Update, norms: int = 0, model: nn.Module | None = None) -> Row:
    """Return what the report says of the local training that was attacked; ``norms``: that send their statistics.

    Of a ``model`` that is not trained as a whole it says what is.
    """
    known = {"examples": update.num_examples, "steps": update.num_steps, "batch_size": update.batch_size}
    said = update.schedule + ("" if model is None else said_of_trained(model))
    if norms:
        layers = "a batch norm layer" if norms == 1 else f"{norms} batch norm layers"
        said += f", in train mode, and sent the running statistics of {layers}: they show the means and variances of"
        said += " its own batch"
    return {"kind": "client", **known, "lr": update.lr, **asdict(update.rule), "batch_norms": norms, "schedule": said}


@dataclass(frozen=True)
class Trial:
    """One attack by one server on one update."""

    seen: Observation | GradveilError  # what arrived, or why nothing did
    server: Countermeasure
    attack: str | Attack
    rng: Generator
    truth: Batch | None = None  # for measuring only
    about: Row = field(default_factory=dict)  # what its rows say of it
    first: int = 0  # number of its first example

    @cached_property
    def view(self) -> Observation:
        """What the attack is given: each round as the server views it. They are of the same examples, so of the labels
        that it finds in the first."""
        if isinstance(self.seen, GradveilError):
            raise self.seen
        try:
            if self.server.over_rounds:
                return self.server.view(self.seen)
            first = self.server.view(replace(self.seen, rounds=()))
            rest = (one if first.labels is None else replace(one, labels=first.labels) for one in self.seen.rounds)
            return replace(first, rounds=tuple(map(self.server.view, rest)))
        except Exception as error:
            raise from_defense(error, "What the server does about the defence") from error


Result = Reconstruction | GradveilError


def attempt(trials: Sequence[Trial]) -> list[Result]:
    """Run the trials of each attack together; where it refuses one, each alone. What failed is its error."""
    results: dict[int, Result] = {}
    ready: dict[str | int, list[int]] = {}  # by attack
    for i, trial in enumerate(trials):
        try:
            _ = trial.view
            ready.setdefault(trial.attack if isinstance(trial.attack, str) else id(trial.attack), []).append(i)
        except GradveilError as error:
            results[i] = error
    for members in ready.values():
        views, rngs = [trials[i].view for i in members], [trials[i].rng for i in members]
        attack = build_attack(trials[members[0]].attack)
        try:
            results |= dict(zip(members, attack.reconstruct_many(views, rngs), strict=True))
        except GradveilError as refused:
            results |= {i: refused if len(members) == 1 else attempt([trials[i]])[0] for i in members}
    return [results[i] for i in range(len(trials))]


def solved(trials: Sequence[Trial]) -> list[Reconstruction]:
    """Run the trials where none may fail: the first error is raised."""
    results = []
    for result in attempt(trials):
        if isinstance(result, GradveilError):
            raise result
        results.append(result)
    return results


def measured(
    result: Reconstruction,
    truth: Batch | None,
    gallery: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    modality: Modality = IMAGE,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every metric by name, each (N,), and the reconstruction as it was measured; NaN where it is not known.

    A truth may lack its labels (they are below zero then).
    """
    if truth is None:
        unknown = torch.full((len(result.inputs),), torch.nan)
        return dict.fromkeys([*modality.metrics, *COMMON], unknown), result.inputs.detach().cpu()
    labels = result.labels if truth.labelled else None
    return measure(result.inputs, labels, truth, gallery, bounds, modality)


def numbers(values: dict[str, Tensor], n: int = 0) -> dict[str, float]:
    """Return the metrics of one example."""
    return {name: float(value[n]) for name, value in values.items()}


def attack_rows(
    trials: Sequence[Trial], results: Sequence[Result], public: Public | None
) -> tuple[list[Row], list[NDArray[Any]]]:
    """Return a row per example, or why there is none, and the reconstructions by ``row["index"]``."""
    rows: list[Row] = []
    images: list[NDArray[Any]] = []
    choices, gallery = (1, None) if public is None else (public.choices, public.gallery)
    for trial, result in zip(trials, results, strict=True):
        if isinstance(result, GradveilError):
            rows.append({"kind": "skip", **trial.about, "example": trial.first, "why": str(result)})
            continue
        values, shown = measured(result, trial.truth, gallery, modality=trial.view.modality)
        said = {"objective": result.objective, "converged": result.converged, "details": result.details}
        sure = _confidence(result, trial)
        among = max(1, choices // len(shown))  # each original is paired with the best of the answers: so many tries
        for n, image in enumerate(shown):
            place: Row = {"example": trial.first + n, "index": len(images), "gallery": among}
            place |= {} if sure is None else {"confidence": sure[n].tolist()}
            rows.append({"kind": "attack", **trial.about, **place, **numbers(values, n), **said})
            images.append(image.numpy())
    return rows, images


def run(trials: Sequence[Trial], public: Public | None) -> tuple[list[Row], list[NDArray[Any]]]:
    """Attack, measure and write down: the rows of these trials, and the reconstructions."""
    return attack_rows(trials, attempt(trials), public)


def _confidence(result: Reconstruction, trial: Trial) -> Tensor | None:
    """Return how sure the attack is of each cell, of the examples in the order of their originals."""
    if result.confidence is None or trial.truth is None:
        return result.confidence
    kind, bounds = trial.view.modality, trial.view.bounds
    return result.confidence[kind.order(kind.unit(result.inputs, bounds), kind.unit(trial.truth.inputs, bounds))]


def floors(
    truth: Batch, public: Public | None, bounds: tuple[float, float] = (0.0, 1.0), modality: Modality = IMAGE
) -> tuple[list[Row], dict[str, Tensor]]:
    """Measure the blind guesses, each example by itself; return the rows, and every guess's answers by name."""
    rows: list[Row] = []
    answers = blind_guesses(truth, None if public is None else public.batch, bounds, modality)
    for guess, answer in answers.items():
        for i in range(len(truth)):
            gallery = None if public is None else public.gallery
            values, _ = measure(answer[i : i + 1], None, truth[i : i + 1], gallery, bounds, modality)
            rows.append({"kind": "floor", "guess": guess, "example": i, **numbers(values)})
    return rows, answers
