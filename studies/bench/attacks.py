"""Time per image and iteration of gradient matching: one problem after the other, against many at once.

Synthetic images; the evaluation is the DLG objective and its gradient (a double backward pass), the step a whole
L-BFGS iteration with a full history of 100 pairs. The sequential rows run the network itself and
``torch.optim.LBFGS``, in the same process. Needs torch only.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kept import keep, machine, show
from torch import Tensor, nn

from gradveil.attacks.search.matching import Matching, MatchingObjective, Unknowns, squared_distance
from gradveil.attacks.search.minimise import LBFGS, Stepper
from gradveil.gradients.functional import Form
from gradveil.models import build
from gradveil.types import Observation, Update

SHAPE, CLASSES, HISTORY = (3, 32, 32), 10, 100
PROBLEMS = {
    ("cpu", "lenet"): (1, 8, 64),
    ("cpu", "convnet"): (1, 4),
    ("cuda", "lenet"): (1, 8, 64, 512, 2048),
    ("cuda", "convnet"): (1, 8, 64, 128),
}
TARGETS = {  # microseconds per image and iteration, or the factor over the sequential loop
    "cpu": {"lenet evaluation, 64 problems, speedup": 7.5, "lenet L-BFGS, 64 problems, speedup": 4.8},
    "cuda": {
        "lenet evaluation, fp32, us": 13, "lenet L-BFGS, fp32, us": 17,
        "convnet evaluation, fp32, us": 850, "convnet evaluation, TF32, us": 500,
    },
}  # fmt: skip
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # processor time, for a machine that others use too
clock = CLOCKS["wall"]
Row = dict[str, Any]


def observe(model: nn.Module, count: int) -> list[Observation]:
    rng = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    seen = []
    for _ in range(count):
        x = torch.rand(1, *SHAPE, generator=rng).to(device)
        y = torch.randint(CLASSES, (1,), generator=rng).to(device)
        found = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        gradient = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
        seen.append(Observation(model, Update(gradient), SHAPE, CLASSES))
    return seen


def objective(model: nn.Module, problems: int, form: Form) -> tuple[MatchingObjective, Tensor]:
    """Return the stacked objective and where to evaluate it."""
    seen = observe(model, min(problems, 16))
    rows = torch.arange(problems, device=next(model.parameters()).device) % len(seen)
    unknowns = Unknowns.of(seen[0])
    stacked = MatchingObjective(Matching.of(seen, form).take(rows), unknowns, None, squared_distance)
    start = torch.rand(problems, unknowns.size, generator=torch.Generator().manual_seed(1))
    return stacked, start.to(rows.device)


def sequential(model: nn.Module) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return one evaluation as it is usually written, for one image, and what it differentiates by."""
    (seen,) = observe(model, 1)
    target = list(seen.update.gradient.values())
    rng, device = torch.Generator().manual_seed(1), target[0].device
    x = torch.rand(1, *SHAPE, generator=rng).to(device).requires_grad_()
    y = torch.randn(1, CLASSES, generator=rng).to(device).requires_grad_()
    weights = list(model.parameters())

    def evaluate() -> Tensor:
        x.grad = y.grad = None
        loss = nn.functional.cross_entropy(model(x), y.softmax(-1))
        found = torch.autograd.grad(loss, weights, create_graph=True)
        distance = torch.stack([(a - b).square().sum() for a, b in zip(found, target, strict=True)]).sum()
        x.grad, y.grad = torch.autograd.grad(distance, [x, y])
        return distance.detach()

    return evaluate, [x, y]


def seconds(call: Callable[[], object], repeats: int, device: str, inner: int = 1) -> dict[str, float]:
    """Return minimum and median seconds of a call, each timed over ``inner`` calls."""
    call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        for _ in range(inner):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((clock() - start) / inner)
    return {"min": min(times), "median": statistics.median(times)}


def graphed(call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """Return the call as a CUDA graph, where it can be captured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"   not captured: {str(error).splitlines()[0]}", flush=True)
        return call, False
    return graph.replay, True


def per_problem(times: dict[str, float], problems: int, reference: float | None) -> Row:
    row: Row = {"us": 1e6 * times["min"] / problems, "median_us": 1e6 * times["median"] / problems}
    return row | ({"speedup": reference / row["us"]} if reference else {})


def evaluations(name: str, device: str, repeats: int, sizes: tuple[int, ...], precision: str) -> list[Row]:
    """Time one evaluation, one image at a time and stacked, in each form."""
    model = build(name, SHAPE, CLASSES).to(device)
    fixed = {"what": "evaluation", "model": name, "precision": precision}
    call, _ = sequential(model)
    row = show(fixed | {"form": "sequential", "problems": 1} | per_problem(seconds(call, 3 * repeats, device), 1, None))
    rows, reference = [row], row["us"]
    for problems in sizes:
        for form in ("manual", "vmap"):
            stacked, point = objective(model, problems, form)  # type: ignore[arg-type]
            call, captured = (lambda s=stacked, p=point: s(p)), False  # type: ignore[misc]
            if device == "cuda":
                call, captured = graphed(call)  # type: ignore[assignment]
            label = {"form": form, "problems": problems, "graph": captured}
            times = seconds(call, repeats, device, 10 if device == "cuda" else 1)
            rows.append(show(fixed | label | per_problem(times, problems, reference)))
            del stacked, point, call
    return rows


def steps(name: str, device: str, repeats: int, sizes: tuple[int, ...], precision: str) -> list[Row]:
    """Time one L-BFGS iteration with a full history: torch's, and ours in the form that the attacks use."""
    model = build(name, SHAPE, CLASSES).to(device)
    fixed = {"what": "L-BFGS", "model": name, "precision": precision}
    evaluate, free = sequential(model)
    block = 40
    theirs = torch.optim.LBFGS(
        free, max_iter=block, max_eval=2 * block, history_size=HISTORY, tolerance_grad=0, tolerance_change=0
    )
    for _ in range(HISTORY // block + 1):
        theirs.step(evaluate)
    before = theirs.state[free[0]]["func_evals"]
    times = seconds(lambda: theirs.step(evaluate), repeats, device)
    each = (theirs.state[free[0]]["func_evals"] - before) / (repeats + 1)
    row = per_problem({k: v / each for k, v in times.items()}, 1, None)
    rows = [show(fixed | {"form": "torch.optim.LBFGS", "problems": 1, "evaluations": each} | row)]
    reference = rows[0]["us"]
    for problems in sizes:
        for search in (True, False):
            stacked, point = objective(model, problems, "auto")
            optimiser = LBFGS(HISTORY, search=search)
            stepper = Stepper(stacked, optimiser, optimiser.start(point))
            for k in range(HISTORY + 5):
                stepper.step(k)
            call = lambda s=stepper: s.step(HISTORY)  # type: ignore[misc]  # noqa: E731
            times = seconds(call, repeats, device, 20 if device == "cuda" else 2)
            label = {"form": "batched", "search": search, "problems": problems, "graph": stepper.graph is not None}
            rows.append(show(fixed | label | per_problem(times, problems, reference)))
            del stacked, point, stepper, call
    return rows


def against_targets(rows: list[Row], device: str) -> list[Row]:
    """Set the best rows beside the targets."""

    def best(model: str, what: str, precision: str, least: int, key: str) -> float:
        found = [
            r[key] for r in rows
            if (r["model"], r["what"], r["precision"]) == (model, what, precision) and r["problems"] >= least
            and key in r and r["form"] not in ("sequential", "torch.optim.LBFGS")
        ]  # fmt: skip
        return (max if key == "speedup" else min)(found, default=float("nan"))

    out = []
    for name, target in TARGETS[device].items():
        model, what = name.split(",")[0].split()
        precision = "TF32" if "TF32" in name else "fp32"
        key = "speedup" if "speedup" in name else "us"
        got = best(model, what, precision, 64, key)
        out.append(
            {"target": name, "wanted": target, "got": got, "met": got >= target if key == "speedup" else got <= target}
        )
        show(out[-1])
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", default="lenet,convnet")
    parser.add_argument("--largest", type=int, default=10_000, help="leave out larger stacks")
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS))
    args = parser.parse_args(argv)
    global clock
    clock = CLOCKS[args.clock]
    precisions = ("fp32", "TF32") if args.device == "cuda" else ("fp32",)
    rows: list[Row] = []
    for precision in precisions:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "TF32"
        for name in args.models.split(","):
            sizes = tuple(n for n in PROBLEMS[args.device, name] if n <= args.largest)
            print(f"== {name} {precision}", flush=True)
            repeats = args.repeats if args.device == "cuda" or name == "lenet" else max(1, args.repeats // 3)
            rows += evaluations(name, args.device, repeats, sizes, precision)
            if name == "lenet":
                rows += steps(name, args.device, repeats, sizes, precision)
    result = machine(args.device) | {
        "clock": args.clock,
        "rows": rows,
        "targets": against_targets(rows, args.device),
    }
    keep(args.out, result)


if __name__ == "__main__":
    main()
