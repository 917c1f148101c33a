"""The paper's figure on convergence, its bound beside it, and a run long enough to see what the bound leaves out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data import load
from gradveil.data.partition import Indices, partition
from gradveil.errors import DataError
from gradveil.federated.client import shuffled
from gradveil.federated.engines import draws_of
from gradveil.federated.server import sample_clients
from gradveil.federated.settings import Training
from gradveil.federated.simulate import round_jobs
from gradveil.ranges import Positive, Weight, Whole
from gradveil.seeds import Seeds
from gradveil.threats.rows import group
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, judge, published
from gradveil_studies.paper.figures import figure
from gradveil_studies.paper.rows import Record
from gradveil_studies.paper.theorem2 import (
    Bound,
    Constants,
    LogisticProblem,
    a_posteriori,
    brightest_removed,
    extend,
    printed_bound,
    theorem_a,
)

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


WIDTH = 5  # stored rounds that a smoothed loss is the mean of
SETTINGS = [(e, k) for e in (5, 10) for k in (5, 10)]  # of the paper's runs
SETTING = ("epochs", "devices", "lr", "defense")
PER_ROUND = "at every stored point of every run"


@dataclass(frozen=True)
class StoredRound(Record):
    """A stored round of a run."""

    kind: str
    defense: str
    seed: int
    round: int
    epochs: int
    devices: int
    lr: float
    loss: float
    gradient: float
    bias: float


@dataclass(frozen=True)
class Optimum(Record):
    """The constants of the theorems, and what is known of the optimum: its loss, up to ``uncertain``."""

    constants: Constants
    lowest: float
    start: float  # the loss that every run starts with
    uncertain: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        stored = {f.name: row[f.name] for f in fields(Constants) if f.name != "known"}
        stored |= {name: torch.tensor(stored[name], dtype=torch.float64) for name in ("parts", "sigmas")}
        return super().of({**row, "constants": Constants(**stored)})


@dataclass(frozen=True)
class BoundedGap:
    """Where the runs of one setting ended, above the optimum, and what each bound says of it."""

    gap: float
    a_posteriori: float
    printed: float
    corrected: Bound

    @property
    def theorem_a(self) -> str:
        """The corrected bound in words: what vanishes, and the floor."""
        return f"{self.corrected.vanishing:.3g} + {self.corrected.floor:.3g}"


def read(rows: Iterable[Row], item: str | None = None) -> tuple[list[StoredRound], Optimum | None]:
    """Return the stored rounds and what is known of the optimum."""
    mine = [row for row in rows if row.get("item") == item]
    known = next((Optimum.of(row) for row in mine if row["kind"] == "constants"), None)
    return [StoredRound.of(row) for row in mine if row["kind"] != "constants"], known


@ITEMS.register("convergence")
@dataclass(frozen=True)
class Convergence(Item):
    """Loss against rounds for E and K in {5, 10}, with and without the defence; bounds; two runs more.

    ``long`` keeps a constant step for so long that the defended loss turns up again; ``schedule`` has the step sizes
    2 / (mu (gamma + t)) of the theorems (stored as lr 0), so that it is the run which the bounds speak of.
    """

    title = "Convergence of LR + FedAvg (MNIST, 100 devices of 2 digits, ε = 50)"
    notes: ClassVar[tuple[str, ...]] = (
        "For logistic regression f is the identity: the defence removes the 50 brightest pixels of every image.",
        "Learning rate, weight decay and rounds are not given: 0.01, 1e-4, 200; a long run at 0.1 shows what a short "
        "one cannot, and a run with lr 2/(μ(γ+t)) has the theorems' step sizes.",
        "Devices are equal in size, drawn with replacement and averaged with weight 1/K. Each local epoch shuffles the "
        "examples; the theorems draw every batch afresh.",
        "The printed bound, with ε as a count, is set beside an a-posteriori gap and theorem A, here an estimate: with "
        "the largest bias of the stored rounds, where it needs that of every iterate (docs/theory/convergence.md).",
    )

    count: Whole = 50  # ε: pixels removed from every image
    decay: Weight = 1e-4
    lr: Positive = 0.01
    long_lr: Positive = 0.1
    devices: str = "classes:devices=100,classes=2,per_class=100"

    def work(self, context: Context) -> dict[str, LogisticRun | None]:
        """Return the constants (``None``) and every run: setting, defence, seed."""
        seeds = range(3 if context.full else 1)
        runs = {f"{kind} {d}": LogisticRun(kind, d) for kind in ("long", "schedule") for d in DEFENDED}
        for e, k in SETTINGS:
            runs |= {f"E={e} K={k} {d} seed={s}": LogisticRun(f"E={e}", d, e, k, s) for d in DEFENDED for s in seeds}
        return {"constants": None, **runs}

    def run(self, unit: str, context: Context) -> list[Row]:
        place = world(context.data, context.seeds.number("partition") % 2**32, self.devices, self.count, self.decay)
        run = self.work(context)[unit]
        if run is None:
            return [constants_row(place, 1e-6 if context.full else 1e-5)]
        rounds, every = (1000 if context.full else 200, 20) if run.kind == "long" else (200, 10)
        lr = {"long": self.long_lr, "schedule": 0.0}.get(run.kind, self.lr)
        return curve(place, run, rounds, lr, Seeds(context.seeds.number("run", run.seed) % 2**31), every)

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line per setting: the loss reached, the gap to F*, and what each bound says of it."""
        stored, known = read(rows)
        table = []
        for setting, mine in by_setting(stored).items():
            ends, lowest = _ends(mine), min(mine, key=lambda r: r.loss)
            line: Row = {
                "setting": setting,
                "rounds": ends[0].round,
                "runs": len(ends),
                "loss": f"{fmean(r.loss for r in ends):.4f}",
                "lowest loss (round)": f"{lowest.loss:.4f} ({lowest.round})",
            }
            if known is not None:
                bounded = self.bounded(mine, known)
                line |= {
                    "F - F*": f"{bounded.gap:.4f}",
                    "a-posteriori": f"{bounded.a_posteriori:.3g}",
                    "printed bound": f"{bounded.printed:.3g}",
                    "theorem A (estimate)": bounded.theorem_a,
                }
            table.append(line)
        return table

    def bounded(self, mine: Sequence[StoredRound], known: Optimum) -> BoundedGap:
        """Return where the runs of one setting ended, and the bounds there."""
        ends, c = _ends(mine), known.constants
        steps, devices = local_steps(ends[0].epochs), ends[0].devices
        bias = max(r.bias for r in mine) if DEFENDED[ends[0].defense] else 0.0
        return BoundedGap(
            max(r.loss for r in ends) - known.lowest,
            max(a_posteriori(r.gradient, c.convexity) for r in ends),
            printed_bound(c, self.count, steps, devices, ends[0].round * steps),
            theorem_a(c, steps, devices, ends[0].round * steps, bias),
        )

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge the paper's claim on its own runs and on the long run, its price, and the gap that people read."""
        stored, known = read(rows)
        claim = published()["convergence"]["claim"].rstrip(".")
        verdicts = []
        long = [r for r in stored if r.kind == "long"]
        for name, runs in (("", short_runs(stored)), (" (long run, constant step)", long)):
            if any(r.defense == "ours" for r in runs):
                verdicts += [_converges(claim + name, runs, width) for width in (1, WIDTH)]
        return verdicts + _price(stored) + (_gap(stored, known) if stored and known else [])

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the curves, the long run, and the gaps under the bounds."""
        stored, known = read(rows)
        with figure(path, 11, 6.4) as empty:
            axes = empty.subplots(2, 3)
            places = [axes[0, 0], axes[0, 1], axes[1, 0], axes[1, 1]]
            for place, (e, k) in zip(places, SETTINGS, strict=True):
                _curves(place, [r for r in short_runs(stored) if (r.epochs, r.devices) == (e, k)])
                place.set_title(f"E = {e}, K = {k}, lr 0.01")
            _curves(axes[0, 2], [r for r in stored if r.kind == "long"])
            axes[0, 2].set_title("E = 10, K = 10, lr 0.1, constant")
            _gaps(axes[1, 2], [r for r in stored if r.kind == "schedule"], known, self.count)
            drawn = next((a for a in places if a.get_legend_handles_labels()[0]), None)
            if drawn is not None:
                drawn.legend(frameon=False)
        return True


def by_setting(stored: Iterable[StoredRound]) -> dict[str, list[StoredRound]]:
    """Return the rounds of each setting, by its name: those of all its seeds."""
    return {
        f"E={epochs} K={devices} {f'lr={lr:g}' if lr else 'lr=2/(μ(γ+t))'} {defense}": mine
        for (epochs, devices, lr, defense), mine in group(stored, *SETTING).items()
    }


def short_runs(stored: Iterable[StoredRound]) -> list[StoredRound]:
    """Return the rounds of the paper's own runs: E and K in {5, 10}, 200 rounds, a small step."""
    return [r for r in stored if r.kind.startswith("E=")]


def _ends(mine: Sequence[StoredRound]) -> list[StoredRound]:
    last = max(r.round for r in mine)
    return [r for r in mine if r.round == last]


def _converges(claim: str, runs: Sequence[StoredRound], width: int) -> Judgement:
    """Judge whether the loss stays down, with the undefended runs of the same kind as the control."""
    rises, plain = (_rises([r for r in runs if r.defense == d], width) for d in ("ours", "none"))
    ours = f"last / lowest loss {max(rises):.3f}, above 1.02 in {_above(rises)} of {len(rises)} runs"
    if plain:
        ours += f"; undefended {max(plain):.3f}, {_above(plain)} of {len(plain)}"
    rule = "the last loss is at most 2 % above the lowest of the run, in every run"
    if width > 1:
        claim += ", losses smoothed"
        rule += f"; means of {width} stored rounds. This rule was added after the runs: single rounds are noisy, see "
        rule += "the undefended control above"
    return judge(claim, not _above(rises), rule, "converges well", ours)


def _above(rises: Sequence[float]) -> int:
    return sum(rise > 1.02 for rise in rises)


def smoothed(losses: Sequence[float], width: int = WIDTH) -> list[float]:
    """Return the means of neighbours (fewer where there are few): one round's draw of devices moves the loss."""
    width = min(width, max(1, len(losses) // 2))
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]


def _rises(stored: Sequence[StoredRound], width: int) -> list[float]:
    """Return last loss over lowest loss of every run, both means of so many stored rounds."""
    curves = [smoothed([r.loss for r in run], width) for run in group(stored, *SETTING, "seed").values()]
    return [curve[-1] / min(curve) for curve in curves]


def _price(stored: Sequence[StoredRound]) -> list[Judgement]:
    ends = {key: run[-1].loss for key, run in group(short_runs(stored), *SETTING[:3], "seed", "defense").items()}
    pairs = [(key, (*key[:-1], "none")) for key in ends if key[-1] == "ours"]
    ratios = [ends[ours] / ends[none] for ours, none in pairs if none in ends]
    if not ratios:
        return []
    claim, rule = "The defence costs no loss at the end of these runs", "defended / undefended final loss at most 1.02"
    ours = f"up to {max(ratios):.2f} x the undefended loss"
    return [judge(claim, max(ratios) <= 1.02, rule, "not compared", ours)]


def _gap(stored: Sequence[StoredRound], known: Optimum) -> list[Judgement]:
    """Judge ||∇F||²/(2μ) on every stored point: F* is known to ``uncertain``."""
    pairs = [(r.loss - known.lowest, a_posteriori(r.gradient, known.constants.convexity)) for r in stored]
    held, start = sum(gap <= bound + known.uncertain for gap, bound in pairs), known.start - known.lowest
    told = sum(bound < start for _, bound in pairs)
    ours = f"held at {held} of {len(pairs)} points; smaller than F(W_0) − F* = {start:.3g} at {told} of them"
    ours += f" (smallest {min(bound for _, bound in pairs):.3g})"
    claim = "F(W) − F* is at most the a-posteriori gap ‖∇F‖²/(2μ)"
    bias, most = max(r.bias for r in stored), known.constants.output * known.constants.displacement
    size = f"at most {bias:.3g}, bound {most:.3g}"
    biased = "The bias of the defended gradient is at most Λ_s ρ"
    return [
        judge(claim, held == len(pairs), PER_ROUND, "not in the paper", ours),
        judge(biased, bias <= most, PER_ROUND, "not in the paper", size),
    ]


LOOK: dict[str, dict[str, Any]] = {
    "none": {"color": "#0072B2", "linestyle": "-", "label": "no defence"},
    "ours": {"color": "#D55E00", "linestyle": "--", "label": "representation perturbation"},
}


def _curves(axis: Any, stored: Sequence[StoredRound]) -> None:
    for defense, look in LOOK.items():
        for seed in sorted({r.seed for r in stored}):
            mine = [r for r in stored if r.defense == defense and r.seed == seed]
            shown = look if seed == 0 else {k: v for k, v in look.items() if k != "label"}
            axis.plot([r.round for r in mine], [r.loss for r in mine], linewidth=1.2, **shown)
    axis.set_xlabel("round")
    axis.set_ylabel("F(W), training loss")


def _gaps(axis: Any, stored: Sequence[StoredRound], known: Optimum | None, count: int) -> None:
    if known is None or not stored:
        axis.set_axis_off()
        return
    c, steps = known.constants, local_steps(10)
    rounds, bias = sorted({r.round for r in stored}), max(r.bias for r in stored)
    for defense, look in LOOK.items():
        mine = [r for r in stored if r.defense == defense]
        axis.plot([r.round for r in mine], [r.loss - known.lowest for r in mine], linewidth=1.2, **look)
    printed = [printed_bound(c, count, steps, 10, t * steps) for t in rounds]
    corrected = [theorem_a(c, steps, 10, t * steps, bias).value for t in rounds]
    axis.plot(rounds, printed, color="black", linestyle=":", label="theorem 2, printed (false)")
    axis.plot(rounds, corrected, color="black", linestyle="-.", label="theorem A, estimate")
    axis.set_yscale("log")
    axis.set_xlabel("round")
    axis.set_ylabel("F(W) − F*")
    axis.set_title("the theorems' steps: gap and bounds")
    axis.legend(frameon=False, fontsize=7)
