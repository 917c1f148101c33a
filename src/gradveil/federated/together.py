"""Several runs at once: defences, levels and seeds side by side, their clients stacked into one batch of models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gradveil.data.base import Dataset
from gradveil.data.partition import Indices
from gradveil.defenses.base import Defense, build
from gradveil.defenses.compose import Compose
from gradveil.errors import GradveilError
from gradveil.federated.engines import ENGINES, Engine, Job, World
from gradveil.federated.processes import Processes
from gradveil.federated.settings import Training
from gradveil.federated.simulate import Round, Run
from gradveil.seeds import Seeds
from gradveil.tree import parameters


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
    _check(runs, chosen)
    together = Compose(tuple(run.defense for run in runs))  # says where any of them acts; each job brings its own
    with chosen.start(World(runs[0].model, dataset.train, together, shared)) as pool:
        for number in range(1, shared.rounds + 1):
            jobs = [_jobs(run, number) for run in runs]
            sent = iter(pool.train(runs[0].model, [job for some in jobs for job in some], runs[0].lr(number)))
            yield [run.finish(number, some, [next(sent) for _ in some]) for run, some in zip(runs, jobs, strict=True)]


def _jobs(run: Run, number: int) -> list[Job]:
    return [replace(job, start=run.model, defense=run.defense) for job in run.jobs(number)]


def _check(runs: Sequence[Run], engine: Engine) -> None:
    if not runs:
        raise GradveilError("There is nothing to train: give at least one setting.")
    if isinstance(engine, Processes):
        raise GradveilError("Several settings at once run on the engines vectorised and sequential. Choose one.")
    shapes = [{name: value.shape for name, value in parameters(run.model).items()} for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        raise GradveilError("Settings that train together need models of one architecture. Train the others apart.")
