"""Reconstructions beside public code: the same updates, and the same number of gradient evaluations or of seconds.

A checkout that is not given is left out, and the output says so (``foreign.py`` has the attacks). All are given the
label. Every foreign run gets ``--evaluations`` gradients of the trial's loss; ours, its grid of settings included, as
many as all foreign runs together ("gs"), and as one of them ("gs, one run's evaluations"). With ``--seconds`` each way,
ours with its grid, gets that time of one core.
``analytic``, for the fully connected network (``--models mlp --attacks gs analytic``), needs none. ``ratio`` is our
error over the least of the foreign ones, which is chosen by looking at the truth; ours is not, but for "panel": the
least of ours, as an audit grades by its strongest attack. Errors are mean squares in [0, 1] after clamping.

Step, start and grid of ``gs`` were chosen on two training images of CIFAR-10 (fresh and trained networks), after test
images of seed 0 had shown that the older ones lose; test images of other seeds are for the comparison alone.
"""

import argparse
import copy
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from foreign import Way, breaching, inversefed, leakpro
from kept import keep, machine
from torch import Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.models import build
from gradveil.types import Batch, GaussianPrior, Observation, Update

MODELS = {
    "lenet relu": "lenet:activation=relu,init=kaiming",
    "lenet tanh": "lenet:activation=tanh,init=kaiming",
    "lenet sigmoid": "lenet",
    "resnet": "resnet18:width=8",
    "mlp": "mlp",
}
FEW = 30  # evaluations
FOREIGN = {
    "inversefed": (inversefed, [1e-1, 1e-2, 1e-4]),
    "breaching": (breaching, [0.2]),
    "leakpro": (leakpro, [1e-6]),
}
SETTING = ("model", "steps", "examples", "noise")
Row = dict[str, Any]


def trained(spec: str, data: Dataset, steps: int, seed: int) -> nn.Module:
    """Return the network after so many steps of SGD on batches of 64; batch norm in evaluation mode."""
    model = build(spec, data.input_shape, data.num_classes, seed)
    rng = torch.Generator().manual_seed(seed)
    best = copy.deepcopy(model.state_dict())
    for lr in (0.05, 0.01, 0.002):  # the first with which the loss falls
        model.load_state_dict(best)
        optimiser, losses = torch.optim.SGD(model.parameters(), lr, momentum=0.9), []
        for _ in range(steps):
            batch = data.train.sample(64, rng)
            loss = nn.functional.cross_entropy(model.train()(batch.inputs), batch.labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        if not losses or statistics.fmean(losses[-20:]) < statistics.fmean(losses[:20]):
            break
    return model.eval()


def observe(model: nn.Module, batch: Batch, prior: GaussianPrior | None, noise: float, seed: int) -> Observation:
    """Return the update of one step on these examples, with noise in shares of each tensor's root mean square."""
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    rng = torch.Generator().manual_seed(seed)
    gradient = {}
    for (name, _), g in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        gradient[name] = g + noise * g.square().mean().sqrt() * torch.randn(g.shape, generator=rng)
    update = Update(gradient, num_examples=len(batch))
    return Observation(model, update, tuple(batch.inputs.shape[1:]), 10, labels=batch.labels, prior=prior)


def ours(spec: str, times: int = 1) -> Way:
    """Return an attack of the library; a search gets so many times the evaluations, others what they take."""
    attack = build_attack(spec)

    def run(seen: Observation, evaluations: int, seed: int) -> Tensor:
        chosen: Any = attack
        evaluations *= times
        if chosen.spec_name == "dlg":
            chosen = replace(chosen, steps=max(1, evaluations // (chosen.inner * chosen.restarts)))
        elif chosen.spec_name != "newton" and hasattr(chosen, "steps"):
            chosen = replace(chosen, steps=max(1, evaluations // getattr(chosen, "restarts", 1)))
        found = chosen.reconstruct(seen, torch.Generator().manual_seed(seed))
        return found.inputs

    return run


def ways(args: argparse.Namespace) -> tuple[dict[str, Way], dict[str, Way], list[str]]:
    """Return our attacks, the foreign ones, and why some of those are missing."""
    foreign: dict[str, Way] = {}
    missing = []
    for name, (make, _) in FOREIGN.items():
        checkout, tvs = getattr(args, name), getattr(args, f"{name}_tv")
        if checkout is None:
            missing.append(f"{name}: no checkout was given (--{name})")
            continue
        try:
            foreign |= {f"{name} tv={tv:g}": make(checkout, tv) for tv in tvs}
        except ImportError as error:
            missing.append(f"{name}: {error}")
    mine = {spec: ours(spec, 1 if args.seconds else max(1, len(foreign))) for spec in args.attacks}
    if args.seconds:
        return mine, foreign, missing
    alone = {
        f"{spec}, one run's evaluations": ours(spec) for spec in args.attacks if build_attack(spec).kind == "search"
    }
    return mine | alone, foreign, missing


def updates(args: argparse.Namespace) -> Iterator[tuple[Observation, Tensor, Row]]:
    """Yield each update, the images behind it, and what it is."""
    data = load(args.dataset)
    prior = GaussianPrior.fit(data.train.sample(500, torch.Generator().manual_seed(99)).inputs)
    for name, steps, seed in product(args.models, args.steps, args.seeds):
        model = trained(MODELS[name], data, steps, seed)
        for examples, noise in product(args.examples, args.noise):
            batch = data.test.sample(examples, torch.Generator().manual_seed(1000 + seed))
            about = dict(zip((*SETTING, "seed"), (name, steps, examples, noise, seed), strict=True))
            yield observe(model, batch, prior, noise, seed), batch.inputs, about


def compared(
    seen: Observation, truth: Tensor, row: Row, mine: dict[str, Way], foreign: dict[str, Way], evaluations: int,
    most: float | None = None,
) -> Row:  # fmt: skip
    """Return the row with the error and the processor time of each way, and our errors over the least foreign one."""
    mse, seconds = {}, {}
    for way, run in (foreign | mine).items():
        try:
            wanted = fitting(run, seen, most) if most else evaluations
            start = time.process_time()
            found = run(seen, wanted, row["seed"])
        except Exception as failed:
            print(f"{way}: {' '.join(str(failed).split())[:200]}", flush=True)
            found = torch.full_like(truth, torch.nan)
        mse[way], seconds[way] = error(found, truth), round(time.process_time() - start, 2)
    least = min((mse[way] for way in foreign), default=math.nan)
    best = {"panel": min(mse[way] for way in mine)}
    ratio = {way: error / least if foreign else None for way, error in ({way: mse[way] for way in mine} | best).items()}
    mse |= best
    each = {"seconds": most} if most else {"evaluations": evaluations}
    return row | each | {"mse": mse, "cpu_seconds": seconds, "foreign": least, "ratio": ratio}


def fitting(run: Way, seen: Observation, seconds: float) -> int:
    """Return how many evaluations fit into so many seconds of one core, from the time of a few and of more."""
    times = []
    for few in (FEW, 3 * FEW):
        start = time.process_time()
        run(seen, few, 0)
        times.append(time.process_time() - start)
    each = max((times[1] - times[0]) / (2 * FEW), 1e-9)
    return max(FEW, int((seconds - times[0]) / each) + FEW)


def error(found: Tensor, truth: Tensor) -> float:
    """Return the mean square after clamping, of a batch in the best order; what is not finite counts as grey."""
    from scipy.optimize import linear_sum_assignment

    held = found.detach().nan_to_num(0.5).clamp(0, 1).flatten(1)
    each = (held[:, None] - truth.flatten(1)[None]).square().mean(2)
    return float(each[linear_sum_assignment(each.numpy())].mean())


def summary(rows: list[Row], columns: list[str]) -> list[Row]:
    """Return a line for each network, fresh and trained, and column: geometric mean and worst of the ratios."""
    lines = []
    for setting in dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows):
        held = [row for row in rows if tuple(row[key] for key in SETTING) == setting]
        for column in columns:
            line: Row = dict(zip(SETTING, setting, strict=True)) | {"attack": column, "updates": len(held)}
            line["median_mse"] = statistics.median(row["mse"][column] for row in held)
            if ratios := [row["ratio"][column] for row in held if row["ratio"][column] is not None]:
                line["median_foreign"] = statistics.median(row["foreign"] for row in held)
                line["ratio"] = math.exp(statistics.fmean(math.log(max(r, 1e-12)) for r in ratios))
                line["worst"], line["within_1.1"] = max(ratios), sum(r <= 1.1 for r in ratios)
            lines.append(line)
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, tvs) in FOREIGN.items():
        parser.add_argument(f"--{name}", type=Path, help="a checkout of it")
        parser.add_argument(f"--{name}-tv", type=float, nargs="*", default=tvs)
    parser.add_argument("--attacks", nargs="*", default=["gs"])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 300], help="of training; 0: fresh weights")
    parser.add_argument("--examples", type=int, nargs="*", default=[1])
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0], help="as a share of each tensor's rms")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--evaluations", type=int, default=300)
    parser.add_argument("--seconds", type=float, help="of one core for each way, in place of evaluations")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    mine, foreign, missing = ways(args)
    for why in missing:
        print(f"left out: {why}", flush=True)
    rows: list[Row] = []
    for seen, truth, row in updates(args):
        rows.append(compared(seen, truth, row, mine, foreign, args.evaluations, args.seconds))
        shown = "  ".join(f"{way} {mse:.2e}" for way, mse in rows[-1]["mse"].items())
        print(" ".join(f"{key}={row[key]}" for key in SETTING), f"seed={row['seed']}: {shown}", flush=True)
        if args.out:
            found: Row = {"machine": machine("cpu"), "load": list(os.getloadavg())}
            found |= {
                "dataset": args.dataset,
                "left_out": missing,
                "summary": summary(rows, [*mine, "panel"]),
                "rows": rows,
            }
            keep(args.out, found)
    for line in summary(rows, [*mine, "panel"]):
        print(json.dumps({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()}))


if __name__ == "__main__":
    main()
