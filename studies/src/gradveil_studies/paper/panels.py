"""Panels of the figures on attacks: a scene, an attack on it, and points (a defence and a server) solved together.

Many problems at once are what the attacks are fast at. A server that drops the defended tensor sees the same
numbers at every share, and once every live entry is zeroed a higher share changes nothing: such problems are
recognised by what the server sees and solved once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from torch import Generator, Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.modalities.image import mse
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.panel import oblivious
from gradveil.threats.trial import Public, Trial, floors, measured, numbers, observe, solved
from gradveil.types import Batch, Observation, Reconstruction
from gradveil_studies.paper.base import BLIND, CIFAR10, Context, Row, papers_defense

FLOORS = "floors"  # the unit that measures the blind guesses
SCALES = (0.0001, 0.001, 0.01, 0.1)
NORMALISED = f"convnet:{CIFAR10}"
GS_STEPS = 500
MASK_NEWTON = "mask newton"  # the server that reads the mask off and solves for the image by Gauss-Newton
CONTRAST = 0.05  # of neighbouring pixels: what sets the smoothness of the GS server that knows of noise


@dataclass(frozen=True)
class Shared:
    """What every point of one figure shares: the weights the server sent, the images, the public data."""

    model: nn.Module
    truth: Batch  # one problem per image
    public: Public
    num_classes: int
    seeds: Seeds

    @classmethod
    def draw(
        cls, model: nn.Module, dataset: Dataset, images: int, context: Context, with_prior: bool = True
    ) -> "Shared":
        """Take images at random from the training split and the public ones from the test split."""
        rank = 256 if prod(dataset.input_shape) <= 1024 else 512
        public = Public.draw(dataset, context.seeds("public"), rank if with_prior else None).to(context.device)
        truth = dataset.train.sample(images, context.seeds("images"))
        return cls(model.to(context.device), truth, public, dataset.num_classes, context.seeds)

    def observe(self, defense: str, with_labels: bool = False) -> list[Observation]:
        """Return what the server sees of each image under a defence, one local step each."""
        return [
            self.observe_one(i, defense, self.seeds("defense", defense, i), with_labels) for i in range(len(self.truth))
        ]

    def observe_one(self, i: int, defense: str, rng: Generator, with_labels: bool = False) -> Observation:
        built, one = papers_defense(defense), self.truth[i : i + 1].to(next(self.model.parameters()).device)
        return observe(self.model, one, built, rng, self.num_classes, self.public.prior, with_labels=with_labels)

    def row(self, i: int, found: Reconstruction) -> Row:
        """Measure image i; ``unclamped_mse``: as the search left it, the unit of the paper's DLG."""
        truth = self.truth[i : i + 1]
        row: Row = numbers(measured(found, truth, self.public.gallery)[0])
        if found.raw is not None:
            row["unclamped_mse"] = float(mse(found.raw.detach().cpu().float(), truth.inputs)[0])
        return row | {"objective": found.objective, "converged": found.converged, **found.details}

    def floors(self) -> list[Row]:
        rows = []
        for row in floors(self.truth, self.public)[0]:
            place = {"defense": BLIND, "server": row.pop("guess"), "attack": "none", "image": row.pop("example")}
            rows.append(place | {name: value for name, value in row.items() if name != "kind"})
        return rows


@dataclass(frozen=True)
class Point:
    """One defence, looked at by one server."""

    defense: str
    server: Countermeasure


@dataclass(frozen=True)
class AttackPoints:
    """A scene, the attack on it, and what was solved so far."""

    scene: Shared
    attack: str
    with_labels: bool = False
    solved: dict[str, Reconstruction] = field(default_factory=dict)

    @classmethod
    def of(
        cls, dataset: str, model: str, attack: str, images: int, context: Context, with_labels: bool = False,
        weights: int = 0,
    ) -> "AttackPoints":  # fmt: skip
        """Load the data, draw images and weights (``weights``: which of several draws)."""
        return cls(shared(dataset, model, images, context, weights), attack, with_labels)

    def floors(self) -> list[Row]:
        return self.scene.floors()

    def rows(self, points: Sequence[Point], pictures: int = 0, normalised: bool = True) -> list[Row]:
        """Attack every image at every point; the rows of the first ``pictures`` images hold the reconstruction."""
        keys = self._solve(points)
        rows = []
        for point, mine in zip(points, keys, strict=True):
            name = build_attack(point.server.attack or self.attack).spec_name
            for i, key in enumerate(mine):
                found = self.solved[key]
                row = {"defense": point.defense, "server": point.server.name, "attack": name, "image": i}
                row |= self.scene.row(i, found)
                row |= {"normalised_mse": self._normalised(i, found.inputs)} if normalised else {}
                rows.append(row | ({"picture": encoded(found.inputs[0])} if i < pictures else {}))
        return rows

    def _solve(self, points: Sequence[Point]) -> list[list[str]]:
        """Solve what is not solved yet; return the key of each point's images."""
        todo: dict[str, Trial] = {}
        keys = []
        defenses = dict.fromkeys(point.defense for point in points)
        seen = {defense: self.scene.observe(defense, self.with_labels) for defense in defenses}
        for point in points:
            attack, server = point.server.attack or self.attack, point.server
            rngs = [self.scene.seeds("attack", server.name, i) for i in range(len(self.scene.truth))]
            trials = [Trial(s, server, attack, rng) for s, rng in zip(seen[point.defense], rngs, strict=True)]
            mine = [_key(attack, point, i, trial.view) for i, trial in enumerate(trials)]
            for key, trial in zip(mine, trials, strict=True):
                if key not in self.solved:
                    todo.setdefault(key, trial)
            keys.append(mine)
        self.solved.update(zip(todo, map(_kept, solved(list(todo.values()))), strict=True))
        return keys

    def _normalised(self, i: int, found: Tensor) -> float:
        """Return the MSE with every channel in units of its standard deviation: the unit of the authors' GS script."""
        std = self.scene.public.batch.inputs.transpose(0, 1).flatten(1).std(1).view(1, -1, 1, 1)  # (1, C, 1, 1)
        difference = (found.detach().cpu().float() - self.scene.truth.inputs[i : i + 1]) / std
        return float(difference.square().mean())


@lru_cache(maxsize=4)
def shared(
    dataset: str, model: str, images: int, context: Context, weights: int = 0, with_prior: bool = True
) -> Shared:
    """Return what points share whatever the attack; kept, since the prior is slow to fit."""
    data = load(dataset, context.data)
    seed = context.seeds.number("weights", *([weights] if weights else []))
    network = build(model, data.input_shape, data.num_classes, seed=seed)
    return Shared.draw(network, data, images, context, with_prior)


def servers(
    defense: str, model: nn.Module, against_noise: str, against_pruning: str | None = None
) -> list[Countermeasure]:
    """Return the servers that look at a defence: the oblivious one, then the knowing ones that are worth their cost.

    Left out: ``analytic`` (with one dense layer, and that one defended, it reads off only entries that were kept
    and was far behind ``drop`` and ``mask``), and ``simulate`` for pruning (behind ``mask`` at several times the
    cost). The server that knows the noise weighs what it sees by it and runs ``against_noise``; of those that read
    the mask of pruning off, one runs the attack itself and one, where it is given, ``against_pruning``.
    """
    built = build_defense(defense)
    if built.spec_name == "none":
        return [oblivious()]
    known = [c for c in built.servers(model) if c.name in ("drop", "mask", "whiten")]
    found = [oblivious(), *(replace(c, attack=against_noise) if c.name == "whiten" else c for c in known)]
    if built.spec_name == "pruning" and against_pruning is not None:
        found += [replace(c, name=MASK_NEWTON, attack=against_pruning) for c in known]
    return found


def encoded(image: Tensor) -> str:
    """Return an image (C, H, W) in [0, 1] as the text of a PNG (base64)."""
    from gradveil.report.pictures import picture

    return picture(image.detach().cpu().numpy())


def _kept(found: Reconstruction) -> Reconstruction:
    raw = None if found.raw is None else found.raw.detach().cpu()
    labels = None if found.labels is None else found.labels.cpu()
    return replace(found, inputs=found.inputs.detach().cpu(), raw=raw, labels=labels)


def _key(attack: str, point: Point, image: int, view: Observation) -> str:
    """Return what tells this problem from others of the scene: who looks, and all the numbers that are looked at."""
    text = f"{attack}/{point.server.name}/{image}/{sorted(view.noise.items())}"
    if view.simulate is not None:
        text += f"/{point.defense}"
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in (*view.update.gradient.items(), *view.weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class AttackPanel:
    """One panel: what is attacked, how, and under which defences."""

    name: str
    dataset: str
    model: str
    attack: str
    images: int
    defenses: tuple[str, ...]
    against_noise: str = "newton"  # the attack of a server that knows of noise
    is_gs: bool = False  # GS: the server knows the label
    weights: int = 0  # which draw of the initial weights
    against_pruning: str | None = None  # another attack of a server that reads the mask off; None: its own only

    def points(self, context: Context) -> AttackPoints:
        """Return the scene; kept, so that the units of a run share it and what was solved in it."""
        return _points(self.dataset, self.model, self.attack, self.images, context, self.is_gs, self.weights)

    def rows(
        self, wanted: Sequence[str], context: Context, pictures: int = 0, without: Sequence[str] = ()
    ) -> dict[str, list[Row]]:
        """Attack the images under some defences (``FLOORS``: guess them blindly), by every server but ``without``.

        All are solved together; the rows come by defence.
        """
        points = self.points(context)
        others = (self.against_noise, self.against_pruning)
        known = [(d, s) for d in wanted if d != FLOORS for s in servers(d, points.scene.model, *others)]
        asked = [Point(d, s) for d, s in known if s.name not in without]
        rows = (points.floors() if FLOORS in wanted else []) + (points.rows(asked, pictures) if asked else [])
        place: Row = {"panel": self.name, "dataset": self.dataset, "model": self.model}
        return {
            what: [place | row for row in rows if row["defense"] == (BLIND if what == FLOORS else what)]
            for what in wanted
        }


def gs_attack(steps: int, context: Context) -> str:
    """Return the GS attack of the figures, of one small smoothness; products are rounded where that is faster."""
    return f"gs:steps={steps},lr=0.1,tv=0.0001" + (",tf32=true" if context.device.type == "cuda" else "")


_points = lru_cache(maxsize=4)(AttackPoints.of)  # by what is attacked and how: items that agree on it share the work


def grid(ours: Sequence[float], pruning: Sequence[float], scales: Sequence[float] = SCALES) -> tuple[str, ...]:
    """Return the defences: none, ours over its shares, the random control, pruning, and both kinds of noise."""
    return (
        "none",
        *(f"representation:share={s}" for s in ours),
        "random_mask:share=0.4",
        *(f"pruning:share={s}" for s in pruning),
        *(f"{noise}:scale={s}" for noise in ("gaussian", "laplace") for s in scales),
    )


FULL = {"dlg": grid((0.01, 0.05, 0.1, 0.2, 0.4), (0.1, 0.4, 0.8)),
        "gs": grid((0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8), (0.1, 0.4, 0.8, 0.9))}  # fmt: skip
QUICK = {"dlg": grid((0.01, 0.4), (0.8,), (0.01,)), "gs": grid((0.4, 0.8), (0.8,), (0.01,))}
