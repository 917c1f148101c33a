"""What the convergence item runs: MNIST dealt out to devices, and federated averaging of logistic regression on it.

All devices of a round train in one product, with the same draws and the same defence rule as the general simulation
(tested to be equal). Faster because f is the identity: what the defence removes from an image does not depend on the
weights, so it is found once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data import load
from gradveil.data.partition import Indices, partition
from gradveil.errors import DataError
from gradveil.federated.client import shuffled
from gradveil.federated.engines import draws_of
from gradveil.federated.ledger import sample_clients
from gradveil.federated.settings import Training
from gradveil.federated.simulate import round_jobs
from gradveil.seeds import Seeds
from gradveil_studies.paper.theorem2 import LogisticProblem, a_posteriori, brightest_removed, extend

DEFENDED = {"none": False, "ours": True}


@dataclass(frozen=True)
class LogisticRun:
    """One run: ``long``, with a constant step; ``schedule``, with the theorems'; else the paper's (``E=5``)."""

    kind: str
    defense: str
    epochs: int = 10
    devices: int = 10  # K, a round
    seed: int = 0


@dataclass(frozen=True)
class Devices:
    """The data of all devices, plain and defended."""

    problem: LogisticProblem
    seen: Tensor  # (n, d): each image without its brightest pixels
    clients: list[Indices]  # rows of the problem, device by device


@lru_cache(maxsize=2)
def world(data: str | None, seed: int, spec: str, count: int, decay: float) -> Devices:
    """Deal MNIST out to the devices and prepare the defence."""
    dataset = load("mnist", data)
    parts = partition(dataset.train.labels, spec, seed)
    sizes = [len(p) for p in parts]
    batches = [dataset.train.batch(p) for p in parts]
    inputs = torch.cat([b.inputs.flatten(1) for b in batches])
    labels = torch.cat([b.labels for b in batches])
    owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(sizes))
    clients = [chunk.numpy() for chunk in torch.arange(len(labels)).split(sizes)]
    return Devices(LogisticProblem(inputs, labels, owner, decay), brightest_removed(inputs, count), clients)


def local_steps(epochs: int, examples: int = 200, batch_size: int = 32) -> int:
    """Return I: the local steps of a round."""
    return epochs * -(-examples // batch_size)


def logistic_rounds(
    inputs: Tensor,  # (n, d) float32
    seen: Tensor,  # (n, d): what the weight gradient is built from
    labels: Tensor,  # (n,)
    clients: Sequence[Indices],
    training: Training,
    seeds: Seeds,
    start: Tensor,  # (C, d + 1), the last column is the bias
    pace: Callable[[int], float] | None = None,  # the step size of local step t, in place of a constant one
) -> Iterator[Tensor]:
    """Yield the global weights (C, d + 1) after every round."""
    if len({len(part) for part in clients}) != 1:
        raise DataError("Devices of different sizes cannot share one product; use the general simulation.")
    ones = torch.ones(len(inputs), 1)
    forward, backward = torch.cat([inputs, ones], 1), torch.cat([seen, ones], 1)
    onehot = F.one_hot(labels, len(start)).float()
    w, t = start.float(), 0
    for number in range(1, training.rounds + 1):
        chosen = sample_clients(seeds, number, [len(part) for part in clients], training)
        jobs = round_jobs(seeds, number, clients, chosen)
        orders = []
        for job in jobs:
            order, sizes = shuffled(len(job.indices), training, draws_of(job))
            orders.append(torch.from_numpy(job.indices)[order])
        local = w.expand(len(jobs), *w.shape).clone()  # (K, C, d + 1)
        for chosen in torch.stack(orders).split(sizes, dim=1):  # (K, B)
            residual = (forward[chosen] @ local.mT).softmax(2) - onehot[chosen]  # (K, B, C)
            gradient = residual.mT @ backward[chosen] / chosen.shape[1]
            lr = training.lr if pace is None else pace(t)
            local, t = local - lr * (gradient + training.weight_decay * local), t + 1
        w = local.mean(0)
        yield w


def curve(place: Devices, run: LogisticRun, rounds: int, lr: float, seeds: Seeds, every: int) -> list[dict[str, Any]]:
    """Run one setting; return the rows of the first rounds and of every so many."""
    problem, field, pace = place.problem, extend(place.seen), None
    if run.kind == "schedule":
        decay = problem.decay
        gamma = max(8 * problem.smoothness() / decay, local_steps(run.epochs))
        pace = lambda t: 2 / (decay * (gamma + t))  # noqa: E731
    theory = Training(sampling="with", weighting="uniform", weight_decay=problem.decay)
    training = replace(theory, rounds=rounds, epochs=run.epochs, clients=run.devices, lr=lr if pace is None else 1.0)
    seen = place.seen if DEFENDED[run.defense] else problem.inputs
    weights = logistic_rounds(
        problem.inputs, seen, problem.labels, place.clients, training, seeds, problem.start(), pace
    )
    setting = {"epochs": run.epochs, "devices": run.devices, "lr": lr, "defense": run.defense}
    rows = []
    for number, w in enumerate(weights, start=1):
        if number % every and number not in (1, 2, 5):
            continue
        size = float(problem.gradient(w).norm())
        figures = {"loss": problem.value(w), "gradient": size, "bias": problem.bias(w, field)}
        rows.append({"kind": run.kind, "seed": run.seed, "round": number, **setting, **figures})
    return rows


def constants_row(place: Devices, tolerance: float) -> dict[str, Any]:
    """Return the constants of the theorems, and what is known of the optimum."""
    problem = place.problem
    near = problem.minimum(tolerance)
    field = extend(place.seen)
    c = problem.constants(near, field)
    plain = {k: v for k, v in asdict(c).items() if not isinstance(v, Tensor)}
    return plain | {
        "kind": "constants",
        "parts": c.parts.tolist(),
        "sigmas": c.sigmas.tolist(),
        "lowest": problem.value(near),
        "start": problem.value(problem.start()),
        "uncertain": a_posteriori(float(problem.gradient(near).norm()), problem.decay),
        "bias at the optimum": problem.bias(near, field),
    }
