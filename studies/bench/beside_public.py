"""Reconstructions beside public code: the same updates, the same number of gradient evaluations, one process.

``--inversefed`` and ``--breaching`` are checkouts of github.com/JonasGeiping/invertinggradients and .../breaching; one
that is not given is left out, and the output says so. Both run their own Adam on signed gradients in normalised pixels,
as their scripts do: the network under attack is the same one, behind a layer that undoes the normalisation. They are
given the label, as ours are. Every foreign run gets ``--evaluations`` gradients of the trial's loss; ours, its grid of
settings included, as many as all foreign runs together ("gs"), and as one of them ("gs, one run's evaluations");
``analytic``, for the fully connected network (``--models mlp --attacks gs analytic``), needs none. ``ratio`` is our
error over the least of the foreign ones, which is chosen by looking at the truth; ours is not, but for "panel": the
least of ours, as an audit grades by its strongest attack. Errors are mean squares in [0, 1] after clamping.

Step, start and grid of ``gs`` were chosen on two training images of CIFAR-10 (fresh and trained networks), after test
images of seed 0 had shown that the older ones lose; test images of other seeds are for the comparison alone.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from defense_scores import machine
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
MEAN, STD = {1: (0.1307,), 3: (0.4915, 0.4823, 0.4468)}, {1: (0.3081,), 3: (0.2470, 0.2435, 0.2616)}
SETTING = ("model", "steps", "examples", "noise")
Row = dict[str, Any]
Way = Callable[[Observation, int, int], Tensor]  # update, evaluations, seed -> inputs in [0, 1]


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


class _Normalised(nn.Module):
    """A network that takes normalised pixels; its parameters are those of the network in it, in their order."""

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(MEAN[channels])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD[channels])[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * self.std + self.mean)  # type: ignore[no-any-return]


def _enter(checkout: Path, *packages: str) -> None:
    """Make packages of a checkout importable without running their ``__init__``, which ask for data sets and hydra."""
    for name in packages:
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(checkout / name.replace(".", "/"))]


def inversefed(checkout: Path, tv: float) -> Way:
    """Return its ``GradientReconstructor`` with the settings of its scripts: signed, boxed, cosine, step decay."""
    sys.modules.setdefault("torchvision", ModuleType("torchvision"))  # for the Inception score, which is not used
    _enter(checkout, "inversefed", "inversefed.nn")
    sys.modules["inversefed.nn"].MetaMonkey = None  # type: ignore[attr-defined]
    theirs = importlib.import_module("inversefed.reconstruction_algorithms")

    def run(seen: Observation, evaluations: int, seed: int) -> Tensor:
        channels = seen.input_shape[0]
        model = _Normalised(copy.deepcopy(seen.model), channels)
        settings = dict(
            signed=True, boxed=True, cost_fn="sim", indices="def", weights="equal", lr=0.1, optim="adam", restarts=1,
            max_iterations=evaluations, total_variation=tv, init="randn", filter="none", lr_decay=True,
            scoring_choice="loss",
        )  # fmt: skip
        torch.manual_seed(seed)
        attack = theirs.GradientReconstructor(model, (model.mean, model.std), settings, seen.num_examples)
        with contextlib.redirect_stdout(io.StringIO()):
            found, _ = attack.reconstruct(list(seen.update.gradient.values()), seen.labels, seen.input_shape)
        return found * model.std + model.mean  # type: ignore[no-any-return]

    return run


class _Settings(dict[str, Any]):
    """A dictionary with attributes, in the place of the configuration files' objects."""

    __getattr__ = dict.__getitem__


def breaching(checkout: Path, tv: float) -> Way:
    """Return its ``invertinggradients`` attack as configured there; batch norm in evaluation mode."""
    _enter(checkout, "breaching", "breaching.attacks", "breaching.cases", "breaching.cases.models")
    theirs = importlib.import_module("breaching.attacks.optimization_based_attack")

    def run(seen: Observation, evaluations: int, seed: int) -> Tensor:
        optim = _Settings(
            optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=evaluations,
            step_size_decay="step-lr", langevin_noise=0.0, warmup=0, grad_clip=None, callback=10**6,
        )  # fmt: skip
        settings = _Settings(
            type="invertinggradients", attack_type="optimization", init="randn", normalize_gradients=False,
            label_strategy="bias-corrected", text_strategy="run-embedding", token_recovery="from-labels",
            differentiable_augmentations=False, augmentations=_Settings(), optim=optim,
            objective=_Settings(type="cosine-similarity", scale=1.0, task_regularization=0.0),
            restarts=_Settings(num_trials=1, scoring="cosine-similarity"),
            regularization=_Settings(total_variation=_Settings(scale=tv, inner_exp=1, outer_exp=1)),
            impl=_Settings(dtype="float", mixed_precision=False, JIT=None),
        )  # fmt: skip
        channels = seen.input_shape[0]
        model = _Normalised(copy.deepcopy(seen.model), channels)
        about = SimpleNamespace(shape=seen.input_shape, modality="vision", mean=MEAN[channels], std=STD[channels])
        parameters, buffers = [p.detach() for p in model.parameters()], list(model.buffers())
        payload = [{"parameters": parameters, "buffers": buffers, "metadata": about}]
        metadata = {"num_data_points": seen.num_examples, "labels": seen.labels, "local_hyperparams": None}
        shared = [{"gradients": list(seen.update.gradient.values()), "buffers": None, "metadata": metadata}]
        torch.manual_seed(seed)
        attack = theirs.OptimizationBasedAttacker(
            model, nn.CrossEntropyLoss(), settings, {"device": torch.device("cpu"), "dtype": torch.float}
        )
        found, _ = attack.reconstruct(payload, shared, server_secrets={})
        return found["data"] * model.std + model.mean  # type: ignore[no-any-return]

    return run


def ways(args: argparse.Namespace) -> tuple[dict[str, Way], dict[str, Way], list[str]]:
    """Return our attacks, the foreign ones, and why some of those are missing."""
    foreign: dict[str, Way] = {}
    missing = []
    for name, checkout, make, tvs in (
        ("inversefed", args.inversefed, inversefed, args.inversefed_tv),
        ("breaching", args.breaching, breaching, args.breaching_tv),
    ):
        if checkout is None:
            missing.append(f"{name}: no checkout was given (--{name})")
            continue
        try:
            foreign |= {f"{name} tv={tv:g}": make(checkout, tv) for tv in tvs}
        except ImportError as error:
            missing.append(f"{name}: {error}")
    mine = {spec: ours(spec, max(1, len(foreign))) for spec in args.attacks}
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
    seen: Observation, truth: Tensor, row: Row, mine: dict[str, Way], foreign: dict[str, Way], evaluations: int
) -> Row:
    """Return the row with the error and the processor time of each way, and our errors over the least foreign one."""
    mse, seconds = {}, {}
    for way, run in (foreign | mine).items():
        start = time.process_time()
        try:
            found = run(seen, evaluations, row["seed"])
        except Exception as failed:
            print(f"{way}: {' '.join(str(failed).split())[:200]}", flush=True)
            found = torch.full_like(truth, torch.nan)
        mse[way], seconds[way] = error(found, truth), round(time.process_time() - start, 2)
    least = min((mse[way] for way in foreign), default=math.nan)
    best = {"panel": min(mse[way] for way in mine)}
    ratio = {way: error / least if foreign else None for way, error in ({way: mse[way] for way in mine} | best).items()}
    mse |= best
    return row | {"evaluations": evaluations, "mse": mse, "cpu_seconds": seconds, "foreign": least, "ratio": ratio}


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
    parser.add_argument("--inversefed", type=Path, help="checkout of invertinggradients")
    parser.add_argument("--breaching", type=Path, help="checkout of breaching")
    parser.add_argument("--inversefed-tv", type=float, nargs="*", default=[1e-1, 1e-2, 1e-4])
    parser.add_argument("--breaching-tv", type=float, nargs="*", default=[0.2])
    parser.add_argument("--attacks", nargs="*", default=["gs"])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 300], help="of training; 0: fresh weights")
    parser.add_argument("--examples", type=int, nargs="*", default=[1])
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0], help="as a share of each tensor's rms")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--evaluations", type=int, default=300)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    mine, foreign, missing = ways(args)
    for why in missing:
        print(f"left out: {why}", flush=True)
    rows: list[Row] = []
    for seen, truth, row in updates(args):
        rows.append(compared(seen, truth, row, mine, foreign, args.evaluations))
        shown = "  ".join(f"{way} {mse:.2e}" for way, mse in rows[-1]["mse"].items())
        print(" ".join(f"{key}={row[key]}" for key in SETTING), f"seed={row['seed']}: {shown}", flush=True)
        if args.out:
            found: Row = {"machine": machine(torch.device("cpu"), 1), "load": list(os.getloadavg())}
            found |= {
                "dataset": args.dataset,
                "left_out": missing,
                "summary": summary(rows, [*mine, "panel"]),
                "rows": rows,
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    for line in summary(rows, [*mine, "panel"]):
        print(json.dumps({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()}))


if __name__ == "__main__":
    main()
