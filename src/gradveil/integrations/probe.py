"""Attack one update as a server would, with and without knowledge of the defence, and say what came of it."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.attacks import base as attacks
from gradveil.attacks.base import Attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses import base as defenses
from gradveil.defenses.base import Defense
from gradveil.errors import GradveilError
from gradveil.gradients.functional import quiet
from gradveil.metrics import measure
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update

Row = dict[str, Any]


@dataclass(frozen=True)
class Probe:
    """How updates are attacked. Nothing here sees the client's data; the truth only serves to measure."""

    attack: str | Attack
    input_shape: tuple[int, ...]
    num_classes: int
    defense: str | Defense = "none"  # what the server knows to be in force: each countermeasure is tried as well
    bounds: tuple[float, float] = (0.0, 1.0)
    public: Tensor | None = None  # (M, *shape): data of the same kind that anybody may have

    def run(
        self, model: nn.Module, weights: Params, update: Update, rng: Generator, truth: Batch | None = None
    ) -> list[Row]:
        """Return a row for each way of attacking: what the objective says and, where the truth is known, the leak."""
        at = copy.deepcopy(model)
        try:
            at.load_state_dict(weights)
        except RuntimeError as error:
            raise GradveilError(f"The weights sent are not those of {type(model).__name__}: {error}") from error
        at.train()  # as the client's was; attacks see to batch norm and dropout
        prior = None if self.public is None else GaussianPrior.fit(self.public)
        seen = Observation(at, update, self.input_shape, self.num_classes, bounds=self.bounds, prior=prior)
        return [self._row(way, seen, rng, truth) for way in self._ways(at)]

    def _ways(self, model: nn.Module) -> Iterator[Countermeasure]:
        yield plain()
        for way in defenses.build(self.defense).adaptive(model):
            if way.name != "plain":
                yield way

    def _row(self, way: Countermeasure, seen: Observation, rng: Generator, truth: Batch | None) -> Row:
        started = time.perf_counter()
        attack = attacks.build(way.attack or self.attack)
        row: Row = {"attack": describe(attack), "server": way.name, "examples": seen.num_examples}
        try:
            found = attack.reconstruct(way.view(seen), rng)
        except GradveilError as error:
            return row | {"error": str(error)}
        row |= {"objective": found.objective, "converged": found.converged, "match": match(seen, found)}
        row["seconds"] = time.perf_counter() - started
        if truth is not None:
            labels = None if bool((truth.labels < 0).any()) else found.labels  # a client's labels may be unknown
            values, _ = measure(found.inputs, labels, truth, bounds=self.bounds)
            row |= {name: float(values[name].mean()) for name in ("mse", "psnr", "ssim")}
            row |= {} if labels is None else {"label": float(values["label"].mean())}
            row["worst-psnr"] = float(values["psnr"].max())
        return row


def match(seen: Observation, found: Reconstruction) -> float | None:
    """Return the cosine between the update and the gradient that the reconstruction would give; None without labels.

    Near 1 the reconstruction explains the update. It is no proof of a leak, since other inputs may explain it too,
    but it needs no truth. Of several local steps only the first one's weights are used.
    """
    if found.labels is None:
        return None
    named = {n: p for n, p in seen.model.named_parameters() if n in seen.update.gradient}
    with torch.enable_grad(), quiet(seen.model):
        loss = F.cross_entropy(seen.model(found.inputs), found.labels)
        grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    ours = torch.cat([g.flatten() for g in grads])
    theirs = torch.cat([seen.update.gradient[n].flatten() for n in named])
    return float(F.cosine_similarity(ours, theirs, dim=0))


def floor(truth: Batch, bounds: tuple[float, float], public: Tensor | None = None) -> float:
    """Return the PSNR that a blind guess gets on the example it fits best: mid-grey, or the mean of public data."""
    guesses = [torch.full_like(truth.inputs, sum(bounds) / 2)]
    if public is not None:
        guesses.append(public.mean(dim=0).expand_as(truth.inputs))
    return max(float(measure(guess, None, truth, bounds=bounds)[0]["psnr"].max()) for guess in guesses)


def worst(rows: list[Row]) -> Row:
    """Return the row of the attack that got most: the one image that came out best."""
    measured = [row for row in rows if "worst-psnr" in row]
    if not measured:
        raise GradveilError(f"No attack could be run: {'; '.join(str(row.get('error')) for row in rows)}")
    return max(measured, key=lambda row: float(row["worst-psnr"]))
