"""Federated averaging in one process: sample clients, train them with the defence inside, aggregate, account."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gradveil.data.base import Dataset
from gradveil.data.partition import Indices, undealt
from gradveil.errors import DataError
from gradveil.federated.client import Sent
from gradveil.federated.engines import ENGINES, Engine, Job, World
from gradveil.federated.processes import available_cores
from gradveil.federated.server import SERVERS, Checkpoint, Ledger, Memory, Merged, merge, planned_run
from gradveil.federated.settings import Training
from gradveil.federated.vectorised import why_not
from gradveil.losses import build as build_loss
from gradveil.privacy.accountant import Account
from gradveil.protection.defense import PUBLIC, Defense, PerRound, accounted, build
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
    run = FederatedRun(model, dataset, clients, training or Training(), build(defense), seeds, watch, resume)
    with ENGINES.build(engine).start(World(run.model, dataset.train, run.defense, run.training)) as pool:
        for number in range(run.first, run.training.rounds + 1):
            jobs = run.sample(number)  # the round's clients
            run.charge(number, jobs)  # before anything is sent; where too few can pay, the run ends here
            before = run.watched(number, jobs)
            sent = pool.train(
                run.model, run.defended(jobs), run.training.lr_of(number)
            )  # local steps, the defence inside
            if number < run.training.rounds:
                pool.expect(run.sample(number + 1))  # may be prepared while a device is at work
            average = run.aggregate(jobs, sent)
            run.move(average)
            yield run.round(number, jobs, sent, average, before)


class FederatedRun:
    """The server's side of one training run: each act of a round, in the order of ``simulate``."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        clients: Sequence[Indices],
        training: Training,
        defense: Defense,
        seeds: Seeds | int = 0,
        watch: Watch = 0,
        resume: Checkpoint | None = None,
    ) -> None:
        _check(dataset, clients, training)
        self.dataset, self.clients, self.training = dataset, clients, training
        self.seeds = seeds if isinstance(seeds, Seeds) else Seeds(seeds)
        self.defense = accounted(defense).for_run(planned_run(self.seeds, clients, training, defense, False))
        self.ledger = Ledger(clients, training, self.defense)
        self.watch = watch
        self.model = copy.deepcopy(model).train()
        self.memory: Memory = {}
        self.first = 1
        if resume is not None:
            resume.restore(self.model)
            at = next(self.model.parameters()).device
            self.memory = {kind: {name: v.to(at) for name, v in tree.items()} for kind, tree in resume.memory.items()}
            self.first = resume.round + 1
            self.ledger.restore(resume.notes.get("accounts"))

    def sample(self, number: int) -> list[Job]:
        """Return the work of a round: who is drawn, what each holds, and its seed."""
        return round_jobs(self.seeds, number, self.clients, self.ledger.draw(self.seeds, number))

    def charge(self, number: int, jobs: Sequence[Job]) -> None:
        """Charge the clients that were drawn; raise where the round cannot be paid for."""
        self.ledger.pay(number, [job.client for job in jobs])

    def watched(self, number: int, jobs: Sequence[Job]) -> tuple[tuple[int, ...], nn.Module | None]:
        """Return whose truth and update are asked for, and a copy of the model that they receive."""
        chosen = tuple(job.client for job in jobs)
        wanted = chosen[: self.watch] if isinstance(self.watch, int) else tuple(self.watch(number, chosen))
        return wanted, copy.deepcopy(self.model) if wanted else None

    def defended(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs with the round's defence, where it follows the weights or public data."""
        if not (isinstance(self.defense, PerRound) and self.defense.follows_rounds):
            return list(jobs)
        acting = self.defense.for_round(self.model, self.public, build_loss(self.training.loss))
        return [replace(job, defense=acting) for job in jobs]

    def aggregate(self, jobs: Sequence[Job], sent: Sequence[Sent]) -> Merged:
        """Turn away what cannot be averaged, and average the rest; a sum with too little noise is not opened."""
        arrivals = [(job.client, one) for job, one in zip(jobs, sent, strict=True)]
        merged = merge(self.model, arrivals, self.training.weighting, [len(part) for part in self.clients])
        if 0 < merged.accepted < self.ledger.min_clients:
            return Merged({}, {}, 0, merged.rejected | {NOT_RELEASED: merged.accepted})
        return merged

    def move(self, average: Merged) -> None:
        """Move the global model towards the clients' average."""
        if average.accepted:
            server = SERVERS.build(self.training.aggregator)
            weights, self.memory = server.move(parameters(self.model), average.target, self.memory)
            assign(self.model, weights | average.buffers)

    def round(
        self, number: int, jobs: Sequence[Job], sent: Sequence[Sent], average: Merged,
        before: tuple[tuple[int, ...], nn.Module | None],
    ) -> Round:  # fmt: skip
        """Return what a finished round left."""
        wanted, received = before
        return Round(
            number=number,
            model=self.model,
            sent=received,
            lr=self.training.lr_of(number),
            clients=tuple(job.client for job in jobs),
            accepted=average.accepted,
            rejected=average.rejected,
            watched=tuple(
                Watched(job.client, self.dataset.train.batch(job.indices), one.update)
                for job, one in zip(jobs, sent, strict=True)
                if job.client in wanted
            ),
            memory=self.memory,
            accounts=tuple(self.ledger.accounts),
        )

    @cached_property
    def public(self) -> Batch | None:
        """Some training records that no device holds; None where there are none."""
        some, first = public_records(self.dataset, self.clients, self.seeds), next(self.model.parameters())
        batch = self.dataset.train.batch(some)
        return Batch(batch.inputs.to(first), batch.labels.to(first.device)) if len(some) else None


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


FEW = 300  # clients' trainings in a run; below, starting workers costs more than it saves


def choose(world: World, trainings: int) -> str:
    """Return the spec of the engine for a run of that many clients' trainings in all."""
    if next(world.model.parameters()).device.type == "cuda":
        return "sequential" if why_not(world) else "vectorised"
    return "processes" if available_cores() > 1 and trainings >= FEW else "sequential"
