"""Several settings trained in step: on CUDA the clients of all of them are one batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gradveil.data.base import Dataset
from gradveil.data.partition import Indices
from gradveil.defenses.compose import Compose
from gradveil.errors import GradveilError
from gradveil.federated.engines import ENGINES, Engine, Job, World
from gradveil.federated.processes import Processes
from gradveil.federated.settings import Training
from gradveil.federated.simulate import FederatedRun, Round
from gradveil.protection.defense import Defense, build
from gradveil.seeds import Seeds
from gradveil.tree import parameters


@dataclass(frozen=True)
class Variant:
    """What makes one run differ from the others."""

    model: nn.Module  # of one architecture for all
    clients: Sequence[Indices]
    defense: str | Defense = "none"
    seeds: Seeds | int = 0


class _SideBySide(Compose):
    """Says where the defence of any run acts; nobody uses all of them, since each job brings its own."""

    def __post_init__(self) -> None:
        pass


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
    runs = [FederatedRun(s.model, dataset, s.clients, shared, build(s.defense), s.seeds) for s in settings]
    chosen = ENGINES.build(engine)
    _check_together(runs, chosen)
    together = _SideBySide(tuple(run.defense for run in runs))
    with chosen.start(World(runs[0].model, dataset.train, together, shared)) as pool:
        for number in range(1, shared.rounds + 1):
            jobs = [run.sample(number) for run in runs]
            for run, some in zip(runs, jobs, strict=True):
                run.charge(number, some)
            before = [run.watched(number, some) for run, some in zip(runs, jobs, strict=True)]
            work = [_of(run, job) for run, some in zip(runs, jobs, strict=True) for job in run.defended(some)]
            done = iter(pool.train(runs[0].model, work, shared.lr_of(number)))
            rounds = []
            for run, some, seen in zip(runs, jobs, before, strict=True):
                sent = [next(done) for _ in some]
                average = run.aggregate(some, sent)
                run.move(average)
                rounds.append(run.round(number, some, sent, average, seen))
            yield rounds


def _of(run: FederatedRun, job: Job) -> Job:
    return replace(job, start=run.model, defense=job.defense or run.defense)


def _check_together(runs: Sequence[FederatedRun], engine: Engine) -> None:
    if not runs:
        raise GradveilError("There is nothing to train: give at least one setting.")
    if isinstance(engine, Processes):
        raise GradveilError("Several settings at once run on the engines vectorised and sequential. Choose one.")
    shapes = [{name: value.shape for name, value in parameters(run.model).items()} for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        raise GradveilError("Settings that train together need models of one architecture. Train the others apart.")
