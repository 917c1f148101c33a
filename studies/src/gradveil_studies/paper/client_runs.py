"""Clients as they are, one by one: how they train, who attacks their updates, and in what time."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil import pace, tree
from gradveil.attacks.base import build as build_attack
from gradveil.data.base import Dataset
from gradveil.errors import UpdateError
from gradveil.federated.client import evaluate
from gradveil.federated.server import Checkpoint
from gradveil.federated.settings import Local, Training
from gradveil.federated.simulate import simulate
from gradveil.protection.defense import build as build_defense
from gradveil.registry import Spec, parse
from gradveil.threats.setup import fitting_model, load_dataset
from gradveil.threats.suited import LARGE, is_small, one_thread
from gradveil.threats.trial import Public, Result, Trial, attempt, client_row, floors, measured, oblivious, observe
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction
from gradveil_studies.paper.base import Context, Row, finite
from gradveil_studies.paper.rows import family

EXAMPLES = (1, 8, 32)
ONE_STEP, MOMENTUM, ADAM = "step", "momentum", "adam"
SCHEDULES = {  # the learning rate and the local training
    ONE_STEP: (0.01, Local(batch_size=None)),
    MOMENTUM: (0.01, Local(epochs=2, batch_size=8, momentum=0.9)),
    ADAM: (0.001, Local(epochs=2, batch_size=8, optimizer="adam")),
}
UNTRAINED, TRAINED = "untrained", "trained"
TRY, TRY_STEPS = 1.0, 3  # seconds and steps in which the speed of an attack is found out
RANK = 512  # principal directions of the server's prior


def own_mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a user's own network: one hidden layer of 128 units, ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), 128), nn.ReLU(), nn.Linear(128, num_classes)
    )  # fmt: skip


OWN = f"{__name__}:own_mlp"
FULL = {"lenet": "lenet", "resnet18": "resnet18", "vit_tiny": "vit_tiny", "mlp": OWN}
QUICK = {
    "lenet": "lenet:strides=2/1,width=4",
    "resnet18": "resnet18:width=2",
    "vit_tiny": "vit_tiny:depth=1,width=8,heads=2",
    "mlp": OWN,
}


@dataclass(frozen=True)
class ClientCell:
    """One kind of client: its network, how many examples it has, how it trains, and on which weights."""

    network: str
    examples: int
    schedule: str
    weights: str

    @property
    def name(self) -> str:
        """The unit of work."""
        return f"{self.network}/{self.examples}/{self.schedule}/{self.weights}"

    @property
    def setting(self) -> str:
        """*deployment*: trained weights and local training of several steps; all else is a *diagnostic*."""
        return "deployment" if self.weights == TRAINED and self.schedule != ONE_STEP else "diagnostic"


def all_cells(networks: tuple[str, ...] = tuple(FULL)) -> list[ClientCell]:
    """Return the whole table."""
    weights = (UNTRAINED, TRAINED)
    return [ClientCell(n, e, s, w) for w in weights for n in networks for e in EXAMPLES for s in SCHEDULES]


@dataclass(frozen=True)
class Amount:
    """How much of everything: of the data, of training, of the attacks."""

    dataset: str
    networks: tuple[tuple[str, str], ...]  # name and spec
    epochs: int  # of training, until weights count as trained
    steps: tuple[tuple[str, int], ...] = ()  # of attacks, where they are not their own
    alone: int = 2  # attacked clients that hold one example; of those that hold more there is one
    seconds: float = math.inf  # for each attack on each client; twice that on networks beyond ``LARGE``


FEW_STEPS = (("dlg", 1), ("gs", 20), ("fedavg", 5), ("surrogate", 10), ("newton", 2))


def amount(context: Context, seconds: float, epochs: int) -> Amount:
    """Return how much a scale asks for."""
    if context.full:
        return Amount("cifar10", tuple(FULL.items()), epochs, seconds=seconds)
    return Amount("digits", tuple(QUICK.items()), 1, FEW_STEPS, alone=1)


@dataclass(frozen=True)
class Stage:
    """What all clients of a run share: the data, and what the server knows of its kind."""

    dataset: Dataset
    truth: Batch  # the most examples that a client has
    public: Public


@lru_cache(maxsize=1)
def stage(dataset: str, context: Context) -> Stage:
    """Return it; kept, since the prior is slow to fit."""
    data = load_dataset(dataset, context.data)
    public = Public.draw(data, context.seeds("public"), rank=None)
    prior = GaussianPrior.fit(public.batch.inputs.to(context.device), rank=RANK)
    truth = data.train.sample(max(EXAMPLES), context.seeds("images"))
    return Stage(data, truth, replace(public, prior=prior))


@lru_cache(maxsize=8)
def network(name: str, weights: str, much: Amount, context: Context) -> tuple[nn.Module, float]:
    """Return a network in train mode, as clients run it, and its accuracy; trained once for a run."""
    data = stage(much.dataset, context).dataset
    model = fitting_model(dict(much.networks)[name], data, "cross_entropy", context.seeds.number("weights", name))
    model = model.train().to(context.device)
    if weights == TRAINED:
        kept = None if context.out is None else context.out / "clients" / f"{name}.safetensors"
        if kept is not None and kept.exists():
            Checkpoint.read(kept).restore(model)
        else:
            model = _trained(model, data, much, context)
            if kept is not None:
                Checkpoint(much.epochs, dict(model.state_dict()), {}, {}).save(kept)
    return model, evaluate(model, data.test).accuracy


def _trained(model: nn.Module, data: Dataset, much: Amount, context: Context) -> nn.Module:
    """Train on the whole training split at one place: Adam, batches of 128."""
    rule = Training(rounds=much.epochs, clients=1, batch_size=128, optimizer="adam", lr=0.001)
    everything = [np.arange(len(data.train))]
    rounds = list(simulate(model, data, everything, rule, seeds=context.seeds))
    return copy.deepcopy(rounds[-1].model).train()


def attacks_on(cell: ClientCell, model: nn.Module, much: Amount, device: torch.device) -> list[str]:
    """Return who attacks: for one step DLG and GS, for several what unrolls them, what does not, and GS.

    Beside them Gauss-Newton where one example is looked for and the network is small, and the quotient of a first
    layer that is fully connected.
    """
    several = ("fedavg", "surrogate", "gs")
    named = ["dlg:restarts=2", "gs"] if cell.schedule == ONE_STEP else list(several)
    if device.type == "cuda":
        named = ["gs:tf32=true" if spec == "gs" else spec for spec in named]
    if cell.examples == 1 and tree.size(tree.parameters(model)) <= LARGE:
        named.insert(0, "newton")
    if cell.network == "mlp":
        named.insert(0, "analytic")
    steps = dict(much.steps)
    return [with_steps(spec, steps[family(spec)]) if family(spec) in steps else spec for spec in named]


def with_steps(spec: str, steps: int) -> str:
    """Return an attack that takes so many steps."""
    parsed = parse(spec)
    return str(Spec(parsed.name, {**parsed.settings, "steps": str(steps)}))


def cell_rows(cell: ClientCell, much: Amount, context: Context) -> list[Row]:
    """Attack every client of a cell: a row for each client, and one for each attack on it."""
    model, accuracy = network(cell.network, cell.weights, much, context)
    shared = stage(much.dataset, context)
    rows: list[Row] = []
    with one_thread(context.device.type == "cpu" and is_small(model)):
        for i in range(much.alone if cell.examples == 1 else 1):
            truth = shared.truth[i * cell.examples : (i + 1) * cell.examples]
            client = AttackedClient(cell, i, model, truth, shared, context)
            rows += [row | {"client": i} for row in client.rows(accuracy, much)]
    return [{"network": cell.network, "examples": cell.examples, "schedule": cell.schedule, "weights": cell.weights}
            | row for row in rows]  # fmt: skip


@dataclass(frozen=True)
class AttackedClient:
    """One client of a cell, and what is done to its update."""

    cell: ClientCell
    number: int
    model: nn.Module
    truth: Batch
    shared: Stage
    context: Context

    def rows(self, accuracy: float, much: Amount) -> list[Row]:
        """Return what the client is and what blind guesses come to, then a row for each attack."""
        seen = self.sent(self.truth, "client")
        guesses, _ = floors(self.truth, self.shared.public)
        blind = {g: _short(r["mse"] for r in guesses if r["guess"] == g) for g in {r["guess"]: 0 for r in guesses}}
        said = client_row(seen.update)["schedule"]
        client: Row = {"kind": "client", "schedule_said": said, "accuracy": accuracy, "floors": blind}
        twice = 2 if tree.size(tree.parameters(self.model)) > LARGE else 1
        chosen = attacks_on(self.cell, self.model, much, self.context.device)
        return [client, *(self.attacked(attack, seen, twice * much.seconds) for attack in chosen)]

    def sent(self, batch: Batch, *purpose: str | int) -> Observation:
        """Return what the server sees if a client with these examples trains as this one does."""
        lr, local = SCHEDULES[self.cell.schedule]
        rng = self.context.seeds(*purpose, self.cell.examples, self.cell.schedule, self.number)
        known = self.shared
        return observe(
            self.model, batch.to(self.context.device), build_defense("none"), rng, known.dataset.num_classes,
            known.public.prior, lr, local=local,
        )  # fmt: skip

    def attacked(self, attack: str, seen: Observation, seconds: float) -> Row:
        """Return what one attack makes of the update."""
        name = family(attack)

        def trial(spec: str) -> Trial:
            rng = self.context.seeds("attack", name, self.cell.name, self.number)
            return Trial(seen, oblivious(), spec, rng, self.truth)

        began = pace.clock()
        result, spec = in_time(trial, attack, seconds)
        row: Row = {"attack": name, "spec": spec, "took": round(pace.clock() - began, 2)}
        if not isinstance(result, Reconstruction):
            return {"kind": "skip", "why": str(result)} | row
        values, _ = measured(result, self.truth, self.shared.public.gallery)
        late = "out_of_time" in result.details
        row |= {name: _short(values[name].tolist()) for name in ("mse", "identified", "label")}
        row |= {"gallery": self.shared.public.choices, "converged": result.converged, "out_of_time": late}
        return {"kind": "attack"} | row | {"objective": result.objective, "mismatch": self.mismatch(seen, result)}

    def mismatch(self, seen: Observation, found: Reconstruction) -> float | None:
        """Return how far from the update that came is the one that a client with the images found would send.

        The cosine distance: what a server can say of any attack's answer, without the truth. None: nothing to compare.
        """
        if found.labels is None:
            return None
        try:
            again = self.sent(Batch(found.inputs, found.labels), "again").update.gradient
        except UpdateError:
            return None
        came = seen.update.gradient
        return finite(1 - tree.dot(again, came) / (tree.norm(again) * tree.norm(came)))


def in_time(trial: Callable[[str], Trial], attack: str, seconds: float) -> tuple[Result, str]:
    """Run an attack in so many seconds; return what it found, and the attack as it was run.

    Where its own number of steps would take longer, by its speed in the first moment, it is given as many as fit, so
    that a schedule of step sizes comes to its end. What does not converge then is out of time.
    """
    own, fitted = getattr(build_attack(attack), "steps", 0), attack
    if seconds < math.inf and own and family(attack) != "newton":  # whose stages are not a number of steps
        with pace.Limit(min(TRY, seconds), least=TRY_STEPS) as limit:
            attempt([trial(attack)])
        if limit.whole > seconds:
            fitted = with_steps(attack, max(1, int(own * seconds / limit.whole)))
    with pace.Limit(seconds):
        (result,) = attempt([trial(fitted)])
    if isinstance(result, Reconstruction) and fitted != attack and not result.converged:
        result = replace(result, details=result.details | {"out_of_time": 1.0})
    return result, fitted


def _short(values: Any) -> list[float | None]:
    """Return numbers with four digits: what is not known is None."""
    kept = [float(v) if isinstance(v, Tensor) else v for v in values]
    return [None if math.isnan(v) else float(f"{v:.4g}") for v in kept]
