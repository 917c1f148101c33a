"""Time of each certificate per image, in units of one training step of 32 images on the same cores."""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from gradveil.federated.client import step_gradient
from gradveil.models import build
from gradveil.modules import representation
from gradveil.protection.defense import build as build_defense
from gradveil.representation.certify import certify
from gradveil.threats.meter import leak_meter
from gradveil.types import Batch, Observation, Update

BATCH = 32
# kind -> (images in one call, norms); the sound kinds share one Lipschitz constant over a call's images
KINDS: dict[str, tuple[int, tuple[float, ...]]] = {
    "local": (BATCH, (2, 1, float("inf"))),
    "global": (BATCH, (2, 1, float("inf"))),
    "box": (BATCH, (2, 1, float("inf"))),
    "empirical": (4, (2,)),
    "reach": (1, (2, float("inf"))),
}
NETWORKS = (
    ("lenet", (1, 28, 28)),
    ("lenet", (3, 32, 32)),
    ("lenet:activation=relu,init=default", (1, 28, 28)),
)
LOCAL_TARGET = 50  # training steps, for the whole batch at p = 2


def best(f: Callable[[], object], seconds: float = 2.0, at_least: int = 2) -> float:
    """Return the shortest of several runs, in seconds."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < at_least or (time.perf_counter() - start < seconds and len(times) < 50):
        before = time.perf_counter()
        f()
        times.append(time.perf_counter() - before)
    return min(times)


def training_step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measure(spec: str, shape: tuple[int, ...], quick: bool) -> list[dict[str, object]]:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(BATCH, *shape, generator=rng), torch.randint(0, 10, (BATCH,), generator=rng)
    step = training_step(build(spec, shape, 10), x, y)
    best(step)  # warm
    model = build(spec, shape, 10).eval()
    layer = "fc"
    defense = build_defense("representation:share=0.4")
    perturbed = defense.perturb(model, layer, x, representation(model, layer, x), rng).flatten(1)
    rows: list[dict[str, object]] = []
    for kind, (images, norms) in KINDS.items():
        if quick and kind in ("reach", "box"):
            continue
        for p in norms:
            call = partial(certify, model, layer, x[:images], perturbed[:images], p, kind)
            seconds, unit = best(call, at_least=10 if (kind, p) == ("local", 2) else 2), best(step)  # beside each other
            rows.append(row(spec, shape, f"{kind}, p = {p:g}", images, seconds, unit))
            print(json.dumps(rows[-1]), flush=True)
    truth = Batch(x[:1], y[:1])
    seen = Observation(model, Update(step_gradient(model, truth, build_defense("none"), rng)), shape, 10, truth.labels)
    settings = {"probes": 4, "steps": 10, "exact_limit": 1} if quick else {}
    seconds, unit = best(lambda: leak_meter(seen, truth, **settings), 0.0), best(step)
    rows.append(row(spec, shape, "leak meter", 1, seconds, unit))
    return rows


def row(spec: str, shape: tuple[int, ...], what: str, images: int, seconds: float, unit: float) -> dict[str, object]:
    return {
        "model": spec, "input": "x".join(map(str, shape)), "what": what, "images": images,
        "ms per image": round(1e3 * seconds / images, 3), "training step of 32 (ms)": round(1e3 * unit, 3),
        "steps per call": round(seconds / unit, 1), "steps per image": round(seconds / images / unit, 2),
    }  # fmt: skip


def target(row: dict[str, object]) -> dict[str, object]:
    """Return what was aimed at for the paper's figure, and whether it was met: one call for the whole batch."""
    got = float(str(row["steps per call"]))
    what = f"local certificate of a batch of 32, p = 2, {row['model']}, {row['input']}: training steps"
    return {"target": what, "wanted": LOCAL_TARGET, "got": got, "met": got <= LOCAL_TARGET}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/certificates.json"))
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    args = parser.parse_args(arguments)
    if args.device != "cpu":
        print("certificates run in float64 on the CPU; nothing to measure elsewhere")
        return
    rows = [r for spec, shape in NETWORKS for r in measure(spec, shape, args.quick)]
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "targets": [target(r) for r in rows if r["what"] == "local, p = 2"],
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    for t in result["targets"]:
        print(json.dumps(t))


if __name__ == "__main__":
    main()
