"""What veil costs: a veiled local step as a multiple of a plain one, in turns in one process.

``times``: the least time of a veiled step over the least of a plain one, by processor time on a CPU; ``way``: how the
records' gradients came about (Captured: by what the layers saw; Held: ``torch.func``).
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from kept import keep, machine

from gradveil.federated.client import step_gradient
from gradveil.losses import CROSS_ENTROPY
from gradveil.models import build as build_model
from gradveil.protection.capture import records_of
from gradveil.protection.defense import build, in_round
from gradveil.types import Batch

CASES = (
    ("lenet:activation=relu,init=kaiming", (1, 28, 28), 32),
    ("lenet:activation=relu,init=kaiming", (1, 28, 28), 200),
    ("convnet", (3, 32, 32), 16),
    ("resnet18:norm=group", (3, 32, 32), 16),
    ("vit_tiny", (3, 32, 32), 16),
)
LARGE = (  # what a GPU is for
    ("lenet:activation=relu,init=kaiming", (1, 28, 28), 2000),
    ("convnet", (3, 32, 32), 256),
    ("resnet18:norm=group", (3, 32, 32), 256),
    ("vit_tiny", (3, 32, 32), 256),
)
SPECS = ("none", "veil:z=0.5", "veil:z=0.5,shape=public,quantile=0.9")
AT_MOST = 2.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/veil.json"))
    parser.add_argument("--models", default="", help="the beginnings of those to measure, by comma; none: all")
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    cases = CASES if device.type == "cpu" else (*CASES, *LARGE)
    chosen = [c for c in cases if not args.models or c[0].startswith(tuple(args.models.split(",")))]
    rows = [row for case in chosen for row in measure(*case, device, args.turns)]
    found = {"machine": machine(device.type), "at_most": AT_MOST, "rows": rows}
    keep(args.out, found)


def measure(name: str, shape: tuple[int, ...], count: int, device: torch.device, turns: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = build_model(name, shape, 10).to(device)
    batch, public = (
        Batch(torch.rand(n, *shape, device=device), torch.arange(n, device=device) % 10) for n in (count, 128)
    )
    size = sum(p.numel() for p in model.parameters())
    specs = [spec for spec in SPECS if size < 10**6 or "public" not in spec]
    defenses = [in_round(build(spec), model, public) for spec in specs]
    rng = torch.Generator(device).manual_seed(0)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken: list[list[float]] = [[] for _ in specs]
    for _ in range(turns + 1):
        for times, defense in zip(taken, defenses, strict=True):
            start = clock()
            step_gradient(model, batch, defense, rng)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(clock() - start)
    way = type(records_of(model, batch, CROSS_ENTROPY)).__name__
    least = [min(times[1:]) for times in taken]
    return [
        {"model": name, "parameters": size, "records": count, "defense": spec, "way": way,
         "ms": round(1e3 * t, 2), "times": round(t / least[0], 2)}
        for spec, t in zip(specs, least, strict=True)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
