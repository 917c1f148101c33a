"""One attack point: images, each its own update of one step, a defence, the servers that look at it, the rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gradveil.attacks.base import Attack
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.data.base import Dataset
from gradveil.defenses.base import build as build_defense
from gradveil.defenses.guard.step import step_gradient
from gradveil.metrics import blind_guesses, measure
from gradveil.metrics.image import mse
from gradveil.paper.base import BLIND, Context, Row
from gradveil.seeds import Seeds
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update

GALLERY = 99  # other images that an original must be told from


@dataclass(frozen=True)
class Shared:
    """What every point of one figure shares: the weights the server sent, the images, the public data."""

    model: nn.Module
    truth: Batch  # one problem per image
    public: Batch  # of the same kind, none of it the client's
    num_classes: int
    seeds: Seeds
    prior: GaussianPrior | None = None

    @classmethod
    def draw(cls, model: nn.Module, dataset: Dataset, images: int, context: Context) -> "Shared":
        """Take images at random from the training split and the public ones from the test split."""
        order = torch.randperm(len(dataset.train), generator=context.seeds("images"))[:images]
        public = torch.randperm(len(dataset.test), generator=context.seeds("public"))[:2000]
        shown = dataset.test.batch(public)
        rank = 256 if shown.inputs[0].numel() <= 1024 else 512
        prior = GaussianPrior.fit(shown.inputs, rank=rank)
        return cls(model, dataset.train.batch(order), shown, dataset.num_classes, context.seeds, prior)

    def observe(self, defense: str, device: torch.device) -> list[Observation]:
        """Return what the server sees of each image under a defence, one local step each."""
        built = build_defense(defense)
        self.model.to(device)
        seen = []
        for i in range(len(self.truth)):
            one = Batch(self.truth.inputs[i : i + 1].to(device), self.truth.labels[i : i + 1].to(device))
            rng = self.seeds("defense", defense, i)
            update = Update(step_gradient(self.model, one, built, rng))
            update = built.on_update(update, rng)
            shape = tuple(self.truth.inputs.shape[1:])
            seen.append(Observation(self.model, update, shape, self.num_classes))
        return seen


def naive() -> Countermeasure:
    """The server that does not know of the defence, or does not care: the paper's."""
    return replace(plain(), name="naive", why="Matches everything that arrives.")


def attack_rows(
    scene: Shared,
    defense: str,
    attack: str | Attack,
    device: torch.device,
    servers: Iterable[Countermeasure] | None = None,
    with_labels: bool = False,
) -> list[Row]:
    """Attack every image under one defence, once per server (naive first, then the adaptive ones)."""
    seen = scene.observe(defense, device)
    known = [naive(), *build_defense(defense).adaptive(scene.model)] if servers is None else list(servers)
    if defense == "none":
        known = [naive()]
    rows: list[Row] = []
    for server in known:
        rows += _one_server(scene, defense, attack, server, seen, with_labels)
    return rows


def _one_server(
    scene: Shared,
    defense: str,
    attack: str | Attack,
    server: Countermeasure,
    seen: Sequence[Observation],
    with_labels: bool,
) -> list[Row]:
    chosen = build_attack(server.attack or attack)
    views = [server.view(s) for s in seen]
    if with_labels:
        views = [replace(v, labels=scene.truth.labels[i : i + 1].to(_device(v))) for i, v in enumerate(views)]
    if scene.prior is not None:
        prior = GaussianPrior(
            scene.prior.mean.to(_device(views[0])), scene.prior.factor.to(_device(views[0])), scene.prior.ridge
        )
        views = [replace(v, prior=prior) for v in views]
    rngs = [scene.seeds("attack", server.name, i) for i in range(len(views))]
    rows = []
    for i, found in enumerate(chosen.reconstruct_many(views, rngs)):
        row = {"defense": defense, "server": server.name, "attack": chosen.spec_name, "image": i}
        rows.append(row | measured(scene, i, found))
    return rows


def measured(scene: Shared, i: int, found: Reconstruction) -> Row:
    """Measure the reconstruction of image i; ``unclamped_mse``: as the search left it, the unit of the paper's DLG."""
    truth = Batch(scene.truth.inputs[i : i + 1], scene.truth.labels[i : i + 1])
    values, _ = measure(found.inputs, found.labels, truth, scene.public.inputs[:GALLERY])
    row: Row = {name: float(v[0]) for name, v in values.items()}
    if found.raw is not None:
        row["unclamped_mse"] = float(mse(found.raw.detach().cpu().float(), truth.inputs)[0])
    return row | {"objective": found.objective, "converged": found.converged, **found.details}


def _device(seen: Observation) -> torch.device:
    return next(seen.model.parameters()).device


def floor_rows(scene: Shared) -> list[Row]:
    """Measure the blind guesses on the same images."""
    rows = []
    for name, guess in blind_guesses(scene.truth, scene.public).items():
        for i in range(len(scene.truth)):
            truth = Batch(scene.truth.inputs[i : i + 1], scene.truth.labels[i : i + 1])
            values, _ = measure(guess[i : i + 1], None, truth, scene.public.inputs[:GALLERY])
            row = {"defense": BLIND, "server": name, "attack": "none", "image": i}
            rows.append(row | {key: float(v[0]) for key, v in values.items()})
    return rows
