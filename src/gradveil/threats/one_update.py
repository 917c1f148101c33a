"""Attacks on one client's update as a server would make them: whole, or of many examples a sample, the others known."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil import tree
from gradveil.attacks.base import Attack
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import AttackError, GradveilError
from gradveil.files import Row
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
        servers = [plain(), *(s for s in build_defense(self.defense).servers(at) if s.name != "plain")]
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


SAMPLE, SECONDS = 4, 60.0  # how many examples, and after what time no further one is begun


@dataclass
class TrainingPass:
    """One training pass of a client: what is needed to tell what each example added to the update."""

    inputs: Tensor  # (B, *shape)
    weights: Params  # of the model at that time
    slopes: Tensor | None = None  # (B, ...): the loss by the outputs; None: there was no backward pass

    @classmethod
    def of(cls, model: nn.Module, weights: Params, batch: Batch, loss: Loss = CROSS_ENTROPY) -> "TrainingPass":
        """Return the pass of a client that takes one step on the mean loss of all its examples."""
        made = cls(batch.inputs, weights)
        with quiet(model), torch.no_grad():
            outputs = torch.func.functional_call(model, weights, (batch.inputs,))
        made.slopes = torch.func.grad(loss)(outputs, batch.labels)
        return made

    def gradient(self, model: nn.Module, rows: Tensor) -> Params:
        """Return what the examples of these rows (B,) add to the gradient; the model is a copy of the client's."""
        if self.slopes is None:
            return {}
        own = {n: self.weights[n].detach().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
        with torch.enable_grad(), quiet(model):
            outputs = torch.func.functional_call(model, self.weights | own, (self.inputs,))
            slopes = self.slopes * rows.to(self.slopes).reshape(-1, *[1] * (self.slopes.ndim - 1))
            found = torch.autograd.grad(outputs, list(own.values()), slopes, materialize_grads=True)
        return dict(zip(own, found, strict=True))


@dataclass(frozen=True)
class OthersKnown:
    """A client's update and its passes, out of which one example at a time is left unknown."""

    model: nn.Module
    passes: Sequence[TrainingPass]
    update: Update
    unlike: str | None = None  # an optimiser whose update is no sum of gradients

    def check(self, probe: Probe, truth: Batch, rng: Generator, seconds: float) -> list[list[Row]]:
        """Return the rows of the attacks on each of these examples: one at least, no new one after the time."""
        started, model = time.monotonic(), copy.deepcopy(self.model).train().cpu()
        used = [p for p in self.passes if p.slopes is not None]
        if self.unlike:
            raise AttackError(
                f"The client trains with {self.unlike}, whose update is no sum of gradients; plain SGD's is."
            )
        if not all(p.weights for p in used):
            raise AttackError("The client took too many steps for its weights to be kept.")
        whole: Params = {}
        for one in used:
            whole = _plus(whole, one.gradient(model, torch.ones(len(one.inputs))))
        if not whole:
            raise AttackError("No backward pass from the model's outputs was seen, so no example can be told apart.")
        unit = _unit(self.update.gradient, whole)
        found: list[list[Row]] = []
        for i in range(len(truth)):
            if found and time.monotonic() - started > seconds:
                break
            found.append(self._one(probe, model, used, truth[i : i + 1], whole, unit, rng))
        return found

    def _one(
        self, probe: Probe, model: nn.Module, used: list[TrainingPass], one: Batch, whole: Params, unit: float,
        rng: Generator,
    ) -> list[Row]:  # fmt: skip
        rows = [(p.inputs == one.inputs).flatten(1).all(1) for p in used]
        where = [k for k, mine in enumerate(rows) if bool(mine.any())]
        own: Params = {}
        for k in where:
            own = _plus(own, used[k].gradient(model, rows[k]))
        times = sum(float(rows[k].sum()) / len(rows[k]) for k in where)  # in how many steps of this example alone
        others = {name: unit * (whole[name] - own[name]) for name in whole}
        scale = 1 / (unit * times)
        return probe.run(
            model, used[where[0]].weights, self.update, rng, one, known=lambda seen: alone(seen, others, scale)
        )


def alone(seen: Observation, others: Params, scale: float) -> Observation:
    """Return what is left to a server that knows what the others added: an update of one step on one example.

    Entries that are zero were removed by a defence, and stay so.
    """

    def left(sent: Params) -> Params:
        return {n: torch.where(g != 0, scale * (g - others[n]), 0.0) for n, g in sent.items()}

    simulate = seen.simulate
    return replace(
        seen,
        update=replace(seen.update, gradient=left(seen.update.gradient), num_examples=1, num_steps=1, batch_size=None),
        noise={name: scale * std for name, std in seen.noise.items()},
        simulate=simulate and (lambda own: left(simulate({n: g / scale + others[n] for n, g in own.items()}))),
    )


def _plus(total: Params, more: Params) -> Params:
    return tree.add(total, more) if total and more else total or more


def _unit(sent: Params, whole: Params) -> float:
    """Return how many times the plain gradients the update is, by the tensor that they explain best.

    The learning rate may not be known, and a defence may have changed some tensors and left others.
    """
    best, unit = 0.0, 1.0
    for name in [name for name in sent if name in whole]:
        there = sent[name] != 0
        mine, plain = sent[name][there].double(), whole[name][there].double()
        both, square = float(mine @ plain), float(plain @ plain)
        if square and (cosine := both / (square * float(mine @ mine)) ** 0.5) > best:
            best, unit = cosine, both / square
    return unit
