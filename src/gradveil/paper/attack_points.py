"""Attack points that share a scene, solved together: defences x servers x images, no problem solved twice.

Many problems at once are what the attacks are fast at. A server that drops the defended tensor sees the same
numbers at every share, and once every live entry is zeroed a higher share changes nothing: such problems are
recognised by what the server sees and solved once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.data import load
from gradveil.defenses.base import build as build_defense
from gradveil.models import build
from gradveil.paper.base import Context, Row
from gradveil.paper.points import Shared, floor_rows, measured, naive
from gradveil.types import GaussianPrior, Observation, Reconstruction

FLOORS = "floors"  # the unit that measures the blind guesses


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
    device: torch.device
    with_labels: bool = False
    solved: dict[str, Reconstruction] = field(default_factory=dict)

    @classmethod
    def of(
        cls, dataset: str, model: str, attack: str, images: int, context: Context, with_labels: bool = False,
        weights: int = 0,
    ) -> "AttackPoints":  # fmt: skip
        """Load the data, draw images and weights (``weights``: which of several draws)."""
        scene = _scene(dataset, model, images, context, weights)
        return cls(scene, attack, context.device, with_labels)

    def floors(self) -> list[Row]:
        """Measure the blind guesses."""
        return floor_rows(self.scene)

    def rows(self, points: Sequence[Point], pictures: int = 0) -> list[Row]:
        """Attack every image at every point; the rows of the first ``pictures`` images hold the reconstruction."""
        keys = self._solve(points)
        rows = []
        for point, mine in zip(points, keys, strict=True):
            name = build_attack(point.server.attack or self.attack).spec_name
            for i, key in enumerate(mine):
                found = self.solved[key]
                row = {"defense": point.defense, "server": point.server.name, "attack": name, "image": i}
                row |= measured(self.scene, i, found) | {"normalised_mse": self._normalised(i, found.inputs)}
                rows.append(row | ({"picture": encoded(found.inputs[0])} if i < pictures else {}))
        return rows

    def _solve(self, points: Sequence[Point]) -> list[list[str]]:
        """Solve what is not solved yet; return the key of each point's images."""
        jobs: dict[str, dict[str, tuple[Observation, torch.Generator]]] = {}  # attack -> key -> problem
        keys = []
        seen = {d: self.scene.observe(d, self.device) for d in dict.fromkeys(p.defense for p in points)}
        for point in points:
            attack = point.server.attack or self.attack
            mine = []
            for i, view in enumerate(self._views(point, seen[point.defense])):
                key = _key(attack, point, i, view)
                mine.append(key)
                if key not in self.solved:
                    rng = self.scene.seeds("attack", point.server.name, i)
                    jobs.setdefault(attack, {}).setdefault(key, (view, rng))
            keys.append(mine)
        for attack, todo in jobs.items():
            views, rngs = zip(*todo.values(), strict=True)
            found = build_attack(attack).reconstruct_many(list(views), list(rngs))
            self.solved.update(zip(todo, map(_kept, found), strict=True))
        return keys

    def _views(self, point: Point, seen: Sequence[Observation]) -> list[Observation]:
        views = [replace(point.server.view(s), prior=self.scene.prior) for s in seen]
        if self.with_labels:
            labels = self.scene.truth.labels.to(self.device)
            views = [replace(v, labels=labels[i : i + 1]) for i, v in enumerate(views)]
        return views

    def _normalised(self, i: int, found: Tensor) -> float:
        """Return the MSE with every channel in units of its standard deviation: the unit of the authors' GS script."""
        std = self.scene.public.inputs.transpose(0, 1).flatten(1).std(1).view(1, -1, 1, 1)  # (1, C, 1, 1)
        difference = (found.detach().cpu().float() - self.scene.truth.inputs[i : i + 1]) / std
        return float(difference.square().mean())


@lru_cache(maxsize=4)
def _scene(dataset: str, model: str, images: int, context: Context, weights: int) -> Shared:
    """Return what points share whatever the attack; kept, since the prior is slow to fit."""
    data = load(dataset, context.data)
    seed = context.seeds.number("weights", *([weights] if weights else []))
    network = build(model, data.input_shape, data.num_classes, seed=seed)
    scene = Shared.draw(network, data, images, context)
    return replace(scene, prior=_moved(scene.prior, context.device))  # one object, so that problems stack


def servers(defense: str, model: nn.Module, against_noise: str) -> list[Countermeasure]:
    """Return the servers that look at a defence: the naive one, then the knowing ones that are worth their cost.

    Left out: ``analytic`` (with one dense layer, and that one defended, it reads off only entries that were kept
    and was far behind ``drop`` and ``mask``), and ``simulate`` for pruning (behind ``mask`` at several times the
    cost). The server that knows the noise weighs what it sees by it and runs ``against_noise``.
    """
    built = build_defense(defense)
    if built.spec_name == "none":
        return [naive()]
    known = [c for c in built.adaptive(model) if c.name in ("drop", "mask", "whiten")]
    return [naive(), *(replace(c, attack=against_noise) if c.name == "whiten" else c for c in known)]


def encoded(image: Tensor) -> str:
    """Return an image (C, H, W) in [0, 1] as the text of a PNG (base64)."""
    from gradveil.report.pictures import picture

    return picture(image.detach().cpu().numpy())


def _moved(prior: GaussianPrior | None, device: torch.device) -> GaussianPrior | None:
    return None if prior is None else GaussianPrior(prior.mean.to(device), prior.factor.to(device), prior.ridge)


def _kept(found: Reconstruction) -> Reconstruction:
    raw = None if found.raw is None else found.raw.detach().cpu()
    return replace(found, inputs=found.inputs.detach().cpu(), raw=raw, labels=_cpu(found.labels))


def _cpu(labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.cpu()


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
