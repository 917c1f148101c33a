"""Leak scores: what each method costs, against a plain training step and the plain loop.

Times are the minimum of several calls, wall clock, in one process; the unit is one eager training step (forward,
backward, SGD) of the same batch. Where a method was timed on part of its rows, ``scaled_from_rows`` says on how many.
Needs torch and numpy only; with ``GRADVEIL_DATA`` images are CIFAR-10, else made.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kept import keep, machine
from torch import Tensor, nn

from gradveil.models import build
from gradveil.modules import prefix
from gradveil.representation import cpu_kernel
from gradveil.representation.scores import leak_scores

SHAPE, CLASSES = (3, 32, 32), 10
METHODS: dict[str, dict[str, Any]] = {
    "moment": {},
    "sketch 16": {"probes": 16},
    "sketch 64": {"probes": 64},
}
# what was promised, in training steps: (device, method, model, batch) -> at most
TARGETS: dict[tuple[str, str, str, int], float] = {
    ("cpu", "exact", "lenet", 1): 12,
    ("cpu", "exact", "lenet", 8): 60,
    ("cpu", "exact", "lenet", 32): 125,
    ("cpu", "exact compiled", "lenet", 1): 4,
    ("cpu", "exact compiled", "lenet", 8): 18,
    ("cpu", "exact compiled", "lenet", 32): 35,
    ("cpu", "sketch 16", "lenet", 32): 2.5,
    **{("cpu", "moment", "lenet", b): 0.6 for b in (1, 8, 32)},
    **{("cpu", "moment", "convnet", b): 0.8 for b in (1, 8, 32)},
    ("cuda", "exact tf32", "lenet", 1): 0.25,
    ("cuda", "exact tf32", "lenet", 32): 2.2,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/defense.json"))
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--models", default="lenet,convnet")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small batches, few repeats")
    args = parser.parse_args(argv)
    if args.quick:
        args.batches, args.repeats = "1,2", 2
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    images, labels, source = examples(device)
    found: dict[str, Any] = {"machine": machine(device.type), "images": source, "time": []}
    for name in args.models.split(","):
        for batch in map(int, args.batches.split(",")):
            found["time"] += times(name, images[:batch], labels[:batch], args.repeats)
    found["targets"] = [
        {"row": list(key), "at_most": limit, "measured": row["steps"], "met": row["steps"] <= limit}
        for row in found["time"]
        for key, limit in TARGETS.items()
        if key == (device.type, row["method"], row["model"], row["batch"])
    ]
    keep(args.out, found)


def examples(device: torch.device) -> tuple[Tensor, Tensor, str]:
    """Return images in [0, 1] and labels, CIFAR-10 where it can be read, and what they are."""
    rng = torch.Generator().manual_seed(0)
    if os.environ.get("GRADVEIL_DATA"):
        from gradveil.data import load

        split = load("cifar10").train
        batch = split.batch(torch.randperm(len(split), generator=rng)[:4000].numpy())
        return batch.inputs.to(device), batch.labels.to(device), "cifar10"
    labels = torch.randint(0, CLASSES, (4000,), generator=rng)
    coarse = torch.rand(CLASSES, 3, 4, 4, generator=rng)[labels] + 0.5 * torch.rand(4000, 3, 4, 4, generator=rng)
    smooth = F.interpolate(coarse, size=SHAPE[1:], mode="bilinear") / 1.5
    noisy = (smooth + 0.05 * torch.randn(4000, *SHAPE, generator=rng)).clamp(0, 1)
    return noisy.to(device), labels.to(device), "made: smooth random templates"


def shortest(call: Callable[[], object], repeats: int, device: torch.device, patience: float = 10.0) -> float:
    """Return the least time of a call in ms; stop repeating once it has taken ``patience`` seconds in all."""
    times, total = [], 0.0
    for attempt in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        total += taken
        if attempt >= 2 or total > patience:  # the first calls warm up
            times.append(taken)
        if total > patience:
            break
    return min(times) * 1e3


def times(name: str, x: Tensor, y: Tensor, repeats: int) -> list[dict[str, Any]]:
    model = build(name, SHAPE, CLASSES).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    unit = shortest(step, max(repeats, 10) * 2, x.device)
    loops = {kind: loop_time(model, x, kind, repeats) for kind in ("loop", "loop authors")}
    rows = [{"method": kind, "ms": ms, "scaled_from_rows": part} for kind, (ms, part) in loops.items()]
    for method, call, settings in timed_methods(x):
        if method.startswith("exact") and name == "convnet" and x.device.type == "cpu" and len(x) > 8:
            continue  # minutes
        rows.append({"method": method, "ms": shortest(lambda c=call, s=settings: c(model, x, s), repeats, x.device)})
    unit = min(unit, shortest(step, max(repeats, 10) * 2, x.device))  # the machine may have been busy before
    for row in rows:
        row |= {"model": name, "batch": len(x), "step_ms": unit, "steps": row["ms"] / unit}
        row["times_faster_than_loop"] = loops["loop"][0] / row["ms"]
        print(f"{name} {len(x):3d} {row['method']:16s} {row['ms']:10.2f} ms {row['steps']:9.2f} steps", flush=True)
    return rows


Call = Callable[[nn.Module, Tensor, dict[str, Any]], object]


def timed_methods(x: Tensor) -> list[tuple[str, Call, dict[str, Any]]]:
    def plain(method: str) -> Call:
        return lambda model, x, settings: leak_scores(model, "fc", x, method, **settings)

    def by_torch(model: nn.Module, x: Tensor, settings: dict[str, Any]) -> Tensor:
        compiled, cpu_kernel.library = cpu_kernel.library, lambda: None
        try:
            return leak_scores(model, "fc", x, "exact", **settings)
        finally:
            cpu_kernel.library = compiled

    def rounded(model: nn.Module, x: Tensor, settings: dict[str, Any]) -> Tensor:
        torch.set_float32_matmul_precision("high")
        try:
            return leak_scores(model, "fc", x, "exact", **settings)
        finally:
            torch.set_float32_matmul_precision("highest")

    found = [(name, plain(name.split()[0]), settings) for name, settings in METHODS.items()]
    found.append(("exact", by_torch, {}))
    if x.is_cuda:
        found.append(("exact tf32", rounded, {}))
    elif cpu_kernel.library() is not None:
        found.append(("exact compiled", plain("exact"), {}))
    return found


def loop_time(model: nn.Module, x: Tensor, kind: str, repeats: int) -> tuple[float, int]:
    """Return the time of one backward pass per entry, from a part of the entries, and how many that were."""
    inputs = x.clone().requires_grad_()
    # the authors' loop has gradients of the weights as well
    r = prefix(model, "fc")(inputs).flatten(1) if kind == "loop" else model[:-1](inputs)  # type: ignore[index]
    part = 16 if r.shape[1] > 1000 else 64

    def rows() -> None:
        for i in range(part):
            if kind == "loop":
                torch.autograd.grad(r[:, i].sum(), inputs, retain_graph=True)
            else:
                r[:, i].sum().backward(retain_graph=True)

    ms = shortest(rows, min(repeats, 5), x.device)
    model.zero_grad()
    return ms * r.shape[1] / part, part


if __name__ == "__main__":
    main()
