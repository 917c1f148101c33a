"""Federated averaging in one process: a generator of rounds, of one run or of several at once."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gradveil.data.base import Dataset
from gradveil.data.partition import Indices, undealt
from gradveil.defenses.compose import Compose
from gradveil.errors import DataError, GradveilError
from gradveil.federated.checkpoint import Checkpoint
from gradveil.federated.client import Sent
from gradveil.federated.engines import ENGINES, Engine, Job, World
from gradveil.federated.ledger import Ledger, planned_run
from gradveil.federated.processes import Processes, available_cores
from gradveil.federated.server import SERVERS, Arrival, Faults, Memory, Merged, merge
from gradveil.federated.settings import Training
from gradveil.federated.vectorised import why_not
from gradveil.losses import build as build_loss
from gradveil.privacy.accountant import Account
from gradveil.protection.defense import Defense, build
from gradveil.protection.records.coordinates import PUBLIC
from gradveil.seeds import Seeds
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Update


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
    accounts: tuple[Account, ...] = field(repr=False, default=())  # by client, where the defence promises something

    def checkpoint(self, **notes: Any) -> Checkpoint:
        """Return all that is needed to go on after this round."""
        if self.accounts:
            notes["accounts"] = [account.to_json() for account in self.accounts]
        return Checkpoint(self.number, dict(self.model.state_dict()), self.memory, notes)


NOT_RELEASED = "too little noise"  # the sum of a round in which too few clients arrived

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
    run = Run(model, dataset, clients, training or Training(), build(defense), seeds, faults, watch, resume)
    world = World(run.model, dataset.train, run.defense, run.training)
    with ENGINES.build(engine).start(world) as pool:
        upcoming = run.jobs(run.first) if run.first <= run.training.rounds else []
        for number in range(run.first, run.training.rounds + 1):
            lr = run.training.lr_of(number)
            jobs = run.begin(number, upcoming)
            sent = pool.train(run.model, jobs, lr)
            upcoming = run.jobs(number + 1) if number < run.training.rounds else []
            pool.expect(upcoming)
            yield run.finish(number, jobs, sent)


class Run:
    """The server's side of one training run, between the rounds' work."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        clients: Sequence[Indices],
        training: Training,
        defense: Defense,
        seeds: Seeds | int = 0,
        faults: Faults | None = None,
        watch: Watch = 0,
        resume: Checkpoint | None = None,
    ) -> None:
        _check(dataset, clients, training)
        self.dataset, self.clients, self.training = dataset, clients, training
        self.seeds = seeds if isinstance(seeds, Seeds) else Seeds(seeds)
        self.defense = defense.for_run(planned_run(self.seeds, clients, training, defense))
        self.ledger = Ledger(clients, training, self.defense)
        self.faults, self.watch = faults, watch
        self.model = copy.deepcopy(model).train()
        self.memory: Memory = {}
        self.first = 1
        self.wanted: tuple[int, ...] = ()
        self.received: nn.Module | None = None
        if resume is not None:
            resume.restore(self.model)
            at = next(self.model.parameters()).device
            self.memory = {kind: {name: v.to(at) for name, v in tree.items()} for kind, tree in resume.memory.items()}
            self.first = resume.round + 1
            self.ledger.restore(resume.notes.get("accounts"))

    def jobs(self, number: int) -> list[Job]:
        """Return the work of a round."""
        return round_jobs(self.seeds, number, self.clients, self.ledger.draw(self.seeds, number))

    @cached_property
    def public(self) -> Batch | None:
        """Some training records that no device holds; None where there are none."""
        some, first = public_records(self.dataset, self.clients, self.seeds), next(self.model.parameters())
        batch = self.dataset.train.batch(some)
        return Batch(batch.inputs.to(first), batch.labels.to(first.device)) if len(some) else None

    def begin(self, number: int, jobs: Sequence[Job]) -> list[Job]:
        """Note who is watched, and what they receive; charge the clients; return the jobs with the round's defence."""
        self.ledger.pay(number, [job.client for job in jobs])
        chosen = tuple(job.client for job in jobs)
        self.wanted = chosen[: self.watch] if isinstance(self.watch, int) else tuple(self.watch(number, chosen))
        self.received = copy.deepcopy(self.model) if self.wanted else None
        if not self.defense.follows_rounds:
            return list(jobs)
        acting = self.defense.for_round(self.model, self.public, build_loss(self.training.loss))
        return [replace(job, defense=acting) for job in jobs]

    def finish(self, number: int, jobs: Sequence[Job], sent: Sequence[Sent]) -> Round:
        """Average what arrives and move the model."""
        arrivals = [Arrival(job.client, one) for job, one in zip(jobs, sent, strict=True)]
        watched = self._watched(jobs, sent)
        if self.faults is not None:
            arrivals = [self.faults.strike(a, self.seeds("fault", number, slot)) for slot, a in enumerate(arrivals)]
        merged = merge(self.model, arrivals, self.training.weighting, [len(part) for part in self.clients])
        if 0 < merged.accepted < self.ledger.min_clients:  # too little noise: the sum is not opened
            merged = Merged({}, {}, 0, merged.rejected | {NOT_RELEASED: merged.accepted})
        if merged.accepted:
            server = SERVERS.build(self.training.aggregator)
            weights, self.memory = server.move(parameters(self.model), merged.target, self.memory)
            assign(self.model, weights | merged.buffers)
        chosen = tuple(job.client for job in jobs)
        return Round(
            number=number,
            model=self.model,
            sent=self.received,
            lr=self.training.lr_of(number),
            clients=chosen,
            accepted=merged.accepted,
            rejected=merged.rejected,
            watched=watched,
            memory=self.memory,
            accounts=tuple(self.ledger.accounts),
        )

    def _watched(self, jobs: Sequence[Job], sent: Sequence[Sent]) -> tuple[Watched, ...]:
        return tuple(
            Watched(job.client, self.dataset.train.batch(job.indices), one.update)
            for job, one in zip(jobs, sent, strict=True)
            if job.client in self.wanted
        )


def public_records(dataset: Dataset, clients: Sequence[Indices], seeds: Seeds, most: int = PUBLIC) -> Indices:
    """Return some training records that no device holds."""
    left = undealt(len(dataset.train), clients)
    some: Indices = left[torch.randperm(len(left), generator=seeds("public records"))[:most].numpy()]
    return some


def client_seed(seeds: Seeds, number: int, client: int, repeat: int = 0) -> int:
    """Return the seed of a client's shuffling and defence in a round; ``repeat`` counts if drawn again in it."""
    return seeds.number("client", number, client, repeat) if repeat else seeds.number("client", number, client)


def round_jobs(seeds: Seeds, number: int, clients: Sequence[Indices], chosen: Sequence[int]) -> list[Job]:
    """Return the work of a round: who was drawn, what each holds, and its seed."""
    seen: dict[int, int] = {}
    jobs = []
    for client in chosen:
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


def _check(dataset: Dataset, clients: Sequence[Indices], training: Training) -> None:
    if training.sampling == "without" and training.clients > len(clients):
        raise DataError(
            f"{training.clients} clients a round were asked for and there are {len(clients)}. Ask for fewer, or draw "
            "with replacement (sampling='with')."
        )
    if not clients or min(len(part) for part in clients) == 0:
        empty = [i for i, part in enumerate(clients) if len(part) == 0]
        raise DataError(f"Devices without examples cannot train: {empty[:5] or 'there is no device'}.")
    highest = max(int(part.max()) for part in clients)
    if highest >= len(dataset.train):
        raise DataError(f"A device holds example {highest}; the training split has {len(dataset.train)}.")


@dataclass(frozen=True)
class Variant:
    """What makes one run differ from the others."""

    model: nn.Module  # of one architecture for all
    clients: Sequence[Indices]
    defense: str | Defense = "none"
    seeds: Seeds | int = 0


def simulate_together(
    settings: Sequence[Variant],
    dataset: Dataset,
    training: Training | None = None,
    *,
    engine: str | Engine = "vectorised",
) -> Iterator[list[Round]]:
    """Train several settings in step; each round yields a ``Round`` for each of them, in their order.

    The results are those of ``simulate`` run once for each setting. On CUDA the clients of all settings train as
    one batch, so ten settings cost far less than ten runs.
    """
    shared = training or Training()
    runs = [Run(s.model, dataset, s.clients, shared, build(s.defense), s.seeds) for s in settings]
    chosen = ENGINES.build(engine)
    _check_together(runs, chosen)
    together = Compose(tuple(run.defense for run in runs))  # says where any of them acts; each job brings its own
    with chosen.start(World(runs[0].model, dataset.train, together, shared)) as pool:
        for number in range(1, shared.rounds + 1):
            jobs = [[_of(run, job) for job in run.begin(number, run.jobs(number))] for run in runs]
            sent = iter(
                pool.train(runs[0].model, [job for some in jobs for job in some], runs[0].training.lr_of(number))
            )
            yield [run.finish(number, some, [next(sent) for _ in some]) for run, some in zip(runs, jobs, strict=True)]


def _of(run: Run, job: Job) -> Job:
    return replace(job, start=run.model, defense=job.defense or run.defense)


def _check_together(runs: Sequence[Run], engine: Engine) -> None:
    if not runs:
        raise GradveilError("There is nothing to train: give at least one setting.")
    if isinstance(engine, Processes):
        raise GradveilError("Several settings at once run on the engines vectorised and sequential. Choose one.")
    shapes = [{name: value.shape for name, value in parameters(run.model).items()} for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        raise GradveilError("Settings that train together need models of one architecture. Train the others apart.")


FEW = 300  # clients' trainings in a run; below, starting workers costs more than it saves


def choose(world: World, trainings: int) -> str:
    """Return the spec of the engine for a run of that many clients' trainings in all."""
    if next(world.model.parameters()).device.type == "cuda":
        return "sequential" if why_not(world) else "vectorised"
    return "processes" if available_cores() > 1 and trainings >= FEW else "sequential"
