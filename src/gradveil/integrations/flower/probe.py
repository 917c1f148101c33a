"""Attack an update as a server would, and say what came of it."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.base import build as build_attack
from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import GradveilError
from gradveil.gradients.functional import quiet
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.protection.defense import Defense
from gradveil.protection.defense import build as build_defense
from gradveil.registry import describe
from gradveil.threats.trial import Public, Trial, attempt, floors, measured
from gradveil.tree import Params
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update

View = Callable[[Observation], Observation]


@dataclass(frozen=True)
class Probe:
    """How updates are attacked. Nothing here sees the client's data; the truth only serves to measure."""

    attack: str | Attack
    input_shape: tuple[int, ...]
    num_classes: int
    defense: str | Defense = "none"  # what the server knows to be in force: each countermeasure is tried as well
    bounds: tuple[float, float] = (0.0, 1.0)
    public: Tensor | None = None  # (M, *shape): data of the same kind that anybody may have
    loss: Loss = CROSS_ENTROPY  # that the clients minimise

    @cached_property
    def known(self) -> Public | None:
        """What the public data tell; their labels are not known."""
        if self.public is None:
            return None
        return Public(Batch(self.public, torch.full((len(self.public),), -1)), GaussianPrior.fit(self.public))

    def run(
        self,
        model: nn.Module,
        weights: Params,
        update: Update,
        rng: Generator,
        truth: Batch | None = None,
        known: View = lambda seen: seen,
    ) -> list[Row]:
        """Return a row for each way of attacking: what the objective says and, where the truth is known, the leak.

        ``known`` takes off a view what the server knows of the examples beforehand.
        """
        at = copy.deepcopy(model)
        try:
            at.load_state_dict(weights)
        except RuntimeError as error:
            raise GradveilError(f"The weights sent are not those of {type(model).__name__}: {error}") from error
        at.train()  # as the client's was; attacks see to batch norm and dropout
        prior = None if self.known is None else self.known.prior
        seen = Observation(
            at, update, self.input_shape, self.num_classes, bounds=self.bounds, prior=prior, loss=self.loss
        )  # fmt: skip
        servers = [plain(), *(s for s in build_defense(self.defense).adaptive(at) if s.name != "plain")]
        return [
            self._row(known(seen), Trial(seen, _knowing(s, known), build_attack(s.attack or self.attack), rng, truth))
            for s in servers
        ]

    def _row(self, seen: Observation, trial: Trial) -> Row:
        started = time.perf_counter()
        row: Row = {"attack": describe(trial.attack), "server": trial.server.name, "examples": seen.num_examples}
        (result,) = attempt([trial])
        if isinstance(result, GradveilError):
            return row | {"error": str(result)}
        row |= {"objective": result.objective, "converged": result.converged, "match": match(seen, result)}
        row["seconds"] = time.perf_counter() - started
        if trial.truth is not None:
            values, _ = measured(result, trial.truth, bounds=self.bounds)
            known = {name: values[name].mean() for name in ("mse", "psnr", "ssim", "label")}
            row |= {name: float(mean) for name, mean in known.items() if name != "label" or not mean.isnan()}
            row["worst-psnr"] = float(values["psnr"].max())
        return row

    def floor(self, truth: Batch) -> float:
        """Return the PSNR that a blind guess gets on the example it fits best."""
        return max(float(row["psnr"]) for row in floors(truth, self.known, self.bounds)[0])


def _knowing(server: Countermeasure, known: View) -> Countermeasure:
    return replace(server, view=lambda seen: known(server.view(seen)))


def match(seen: Observation, found: Reconstruction) -> float | None:
    """Return the cosine between the update and the gradient that the reconstruction would give; None without labels.

    Near 1 the reconstruction explains the update. It is no proof of a leak, since other inputs may explain it too,
    but it needs no truth. Of several local steps only the first one's weights are used.
    """
    if found.labels is None:
        return None
    named = {n: p for n, p in seen.model.named_parameters() if n in seen.update.gradient}
    with torch.enable_grad(), quiet(seen.model):
        loss = seen.loss(seen.model(found.inputs), found.labels)
        grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    ours = torch.cat([g.flatten() for g in grads])
    theirs = torch.cat([seen.update.gradient[n].flatten() for n in named])
    return float(F.cosine_similarity(ours, theirs, dim=0))


def worst(rows: list[Row]) -> Row:
    """Return the row of the attack that got most: the one image that came out best."""
    measured = [row for row in rows if "worst-psnr" in row]
    if not measured:
        raise GradveilError(f"No attack could be run: {'; '.join(str(row.get('error')) for row in rows)}")
    return max(measured, key=lambda row: float(row["worst-psnr"]))
