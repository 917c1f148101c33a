"""Federated averaging in one process: a generator of rounds."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from gradveil.data.base import Dataset
from gradveil.data.partition import Indices
from gradveil.defenses.base import Defense, build
from gradveil.errors import DataError, GradveilError
from gradveil.federated.checkpoint import Checkpoint
from gradveil.federated.client import Local
from gradveil.federated.engines import ENGINES, Engine, Job, World
from gradveil.federated.faults import Faults
from gradveil.federated.schedules import SCHEDULES
from gradveil.federated.server import SERVERS, Arrival, Memory, Weighting, merge
from gradveil.seeds import Seeds
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Update


@dataclass(frozen=True)
class Training:
    """The settings of federated averaging; the defaults are those of Sun et al. 2020.

    ``sampling``: ``without`` draws K different devices, each as likely (the experiments); ``with`` draws K times by
    p_k, the device's part of all examples, and puts it back (the theory).
    """

    rounds: int = 10
    devices: int = 10  # K, per round
    epochs: int = 1  # E
    batch_size: int | None = 32  # B; None: all of a client's examples at once
    lr: float = 0.01
    schedule: str = "constant"
    sampling: Literal["without", "with"] = "without"
    weighting: Weighting = "samples"
    server: str = "fedavg"
    weight_decay: float = 0.0
    proximal: float = 0.0  # FedProx

    @property
    def local(self) -> Local:
        """The clients' part of the settings."""
        return Local(self.epochs, self.batch_size, self.weight_decay, self.proximal)


@dataclass(frozen=True)
class Watched:
    """One client's private examples and what it sent: for audits."""

    client: int
    truth: Batch
    update: Update


@dataclass(frozen=True)
class Round:
    """A finished round."""

    number: int  # from 1
    model: nn.Module  # the global model after it; the same object in every round
    sent: nn.Module | None  # the model that the clients received; None where nobody was watched
    lr: float
    clients: tuple[int, ...]
    accepted: int  # how many updates were averaged
    rejected: dict[str, int]  # how many were not, by reason
    watched: tuple[Watched, ...]
    memory: Memory = field(repr=False, default_factory=dict)

    def checkpoint(self, **notes: Any) -> Checkpoint:
        """Return all that is needed to go on after this round."""
        return Checkpoint(self.number, dict(self.model.state_dict()), self.memory, notes)


Watch = int | Callable[[int, tuple[int, ...]], Sequence[int]]


def simulate(
    model: nn.Module,
    dataset: Dataset,
    clients: Sequence[Indices],
    training: Training | None = None,
    defense: str | Defense = "none",
    seeds: Seeds | int = 0,
    *,
    engine: str | Engine = "sequential",
    faults: Faults | None = None,
    watch: Watch = 0,
    resume: Checkpoint | None = None,
) -> Iterator[Round]:
    """Train by federated averaging; each round is yielded when it is done.

    ``clients`` holds the indices into ``dataset.train`` of each device (see ``gradveil.partition``). The model given
    is left as it was; ``Round.model`` is trained, on the device of the model given. All randomness comes from
    ``seeds``, by round and client, so a run that is resumed ends where the unbroken run does.

    ``watch`` asks for truth and update of some clients: the first n of each round, or those that
    ``watch(round_number, clients)`` returns.
    """
    settings = training or Training()
    draw = seeds if isinstance(seeds, Seeds) else Seeds(seeds)
    _check(dataset, clients, settings)
    model = copy.deepcopy(model).train()
    memory: Memory = {}
    first = 1
    if resume is not None:
        resume.restore(model)
        device = next(model.parameters()).device
        memory = {kind: {name: v.to(device) for name, v in tree.items()} for kind, tree in resume.memory.items()}
        first = resume.round + 1
    schedule, server = SCHEDULES.build(settings.schedule), SERVERS.build(settings.server)
    sizes = [len(part) for part in clients]
    world = World(model, dataset.train, build(defense), settings.local)
    with ENGINES.build(engine).hire(world) as crew:
        upcoming = round_jobs(draw, first, clients, settings)
        for number in range(first, settings.rounds + 1):
            lr = schedule.lr(settings.lr, number, settings.rounds)
            jobs = upcoming
            chosen = tuple(job.client for job in jobs)
            wanted = chosen[:watch] if isinstance(watch, int) else tuple(watch(number, chosen))
            received = copy.deepcopy(model) if wanted else None
            arrivals = [Arrival(job.client, sent) for job, sent in zip(jobs, crew.train(model, jobs, lr), strict=True)]
            upcoming = round_jobs(draw, number + 1, clients, settings)
            crew.expect(upcoming if number < settings.rounds else [])
            watched = _watched(dataset, jobs, arrivals, wanted)
            if faults is not None:
                arrivals = [faults.strike(a, draw("fault", number, slot)) for slot, a in enumerate(arrivals)]
            merged = merge(model, arrivals, settings.weighting, sizes)
            if merged.accepted:
                weights, memory = server.move(parameters(model), merged.target, memory)
                assign(model, weights | merged.buffers)
            yield Round(number, model, received, lr, chosen, merged.accepted, merged.rejected, watched, memory)


def sample_clients(seeds: Seeds, number: int, sizes: Sequence[int], training: Training) -> list[int]:
    """Return the devices of a round, in the order in which they are served."""
    rng = seeds("sample", number)
    if training.sampling == "with":
        return torch.multinomial(torch.tensor(sizes).double(), training.devices, True, generator=rng).tolist()
    return torch.randperm(len(sizes), generator=rng)[: training.devices].tolist()


def client_seed(seeds: Seeds, number: int, client: int, repeat: int = 0) -> int:
    """Return the seed of a client's shuffling and defence in a round; ``repeat`` counts if drawn again in it."""
    return seeds.number("client", number, client, repeat) if repeat else seeds.number("client", number, client)


def round_jobs(seeds: Seeds, number: int, clients: Sequence[Indices], training: Training) -> list[Job]:
    """Return the work of a round: who was drawn, what each holds, and its seed."""
    seen: dict[int, int] = {}
    jobs = []
    for client in sample_clients(seeds, number, [len(part) for part in clients], training):
        repeat = seen.get(client, 0)
        seen[client] = repeat + 1
        jobs.append(Job(client, clients[client], client_seed(seeds, number, client, repeat)))
    return jobs


def assign(model: nn.Module, values: Params) -> None:
    """Write weights and buffers into a model by name."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _watched(
    dataset: Dataset, jobs: Sequence[Job], arrivals: Sequence[Arrival], wanted: Sequence[int]
) -> tuple[Watched, ...]:
    found = []
    for job, arrival in zip(jobs, arrivals, strict=True):
        if job.client in wanted and arrival.sent:
            found.append(Watched(job.client, dataset.train.batch(job.indices), arrival.sent.update))
    return tuple(found)


def _check(dataset: Dataset, clients: Sequence[Indices], training: Training) -> None:
    if training.rounds < 0 or training.devices < 1:
        raise GradveilError(f"rounds={training.rounds}, devices={training.devices}: a run needs at least one device.")
    if training.sampling == "without" and training.devices > len(clients):
        raise DataError(
            f"{training.devices} devices a round were asked for and there are {len(clients)}. Ask for fewer, or draw "
            "with replacement (sampling='with')."
        )
    if not clients or min(len(part) for part in clients) == 0:
        empty = [i for i, part in enumerate(clients) if len(part) == 0]
        raise DataError(f"Devices without examples cannot train: {empty[:5] or 'there is no device'}.")
    highest = max(int(part.max()) for part in clients)
    if highest >= len(dataset.train):
        raise DataError(f"A device holds example {highest}; the training split has {len(dataset.train)}.")
