"""What a guard's checks of gradients and weights cost: a protected step with them against one without, in turns.

Both guards sit on equal models in one process and step by turns, so that a busy machine is as busy for both.
``percent`` is the part of a protected step, after the first, that the checks take: the median over pairs of steps.
"""

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from defense_scores import CLASSES, SHAPE, examples, machine
from torch import Tensor, nn

from gradveil.defenses.guard import attachment
from gradveil.defenses.guard.hooks import PartRan
from gradveil.defenses.guard.optimizers import unwatch_optimizers, watch_optimizers
from gradveil.defenses.guard.protect import Guard, protect
from gradveil.models import build

DEFENSES = (
    "representation:share=0.4",
    "representation:share=0.4,method=moment",
    "random_mask:share=0.4",
    "pruning:share=0.8",
    "gaussian:scale=0.01",
    "decoy",
)
AT_MOST = 5.0  # per cent of a protected step


class Block(nn.Module):
    """Two convolutions around which the input goes by, as in ResNet-18."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        stride = 1 if inside == out else 2
        self.conv1, self.bn1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.by = nn.Identity() if inside == out else nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.by(x))


def resnet() -> nn.Module:
    """ResNet-18 for 32 x 32 images: 11 million weights."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return resnet() if name == "resnet18" else build(name, SHAPE, CLASSES)


class NoTraces:
    """Stands in for what a guard knows, and knows nothing."""

    parts: tuple[Any, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    has_passes = False

    def carrier(self, name: str, weight: Tensor) -> Tensor:
        return weight

    def named(self, held: set[int]) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if id(p) in held}

    def nothing(self, *_: Any, **__: Any) -> list[str]:
        return []

    tie = untie = begin = touched = moved_past = held_by = foreign = take = mark = within_defended = nothing


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench/results/guard.json"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="lenet,resnet18")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--defenses", nargs="*", default=DEFENSES)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each row")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    images, labels, source = examples(device)
    rows = [
        row(name, spec, images[:batch], labels[:batch], args.seconds)
        for name in args.models.split(",")
        for batch in map(int, args.batches.split(","))
        for spec in args.defenses
    ]
    found = {"machine": machine(device, args.threads), "images": source, "rows": rows}
    found["targets"] = [target(spec, [r for r in rows if r["defense"] == spec]) for spec in args.defenses]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def target(spec: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max(rows, key=lambda r: r["percent"])
    what = f"checks of a guard, {spec}, at most (on {worst['model']}, batch {worst['batch']}): % of a protected step"
    return {"target": what, "wanted": AT_MOST, "got": worst["percent"], "met": worst["percent"] <= AT_MOST}


def row(name: str, spec: str, x: Tensor, y: Tensor, seconds: float) -> dict[str, Any]:
    ways = {kind: one(name, spec, x, y) for kind in ("checked", "unchecked")}
    plain = attachment._stamp, attachment.is_same
    for guard, _ in ways.values():
        unwatch_optimizers(guard._attachment)
    bare = ways["unchecked"][0]._attachment
    bare.traces.untie()
    bare._traces = NoTraces(bare.model)  # type: ignore[assignment]
    for part in bare.model.modules():
        for key in [key for key, hook in part._forward_hooks.items() if isinstance(hook, PartRan)]:
            del part._forward_hooks[key]
    times: dict[str, list[float]] = {"checked": [], "unchecked": []}
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds or len(times["checked"]) < 5:
        for kind, (guard, optimizer) in ways.items():
            if kind == "unchecked":
                attachment._stamp, attachment.is_same = lambda *_: ([], 0), lambda *_: False
            watch_optimizers(guard._attachment)
            times[kind].append(step(guard, optimizer, x, y))
            unwatch_optimizers(guard._attachment)
            attachment._stamp, attachment.is_same = plain
    pairs = list(zip(times["checked"], times["unchecked"], strict=True))[2:]  # the first warm up
    found: dict[str, Any] = {"model": name, "batch": len(x), "defense": spec, "pairs": len(pairs)}
    found["ms"] = statistics.median(a for a, _ in pairs) * 1e3
    found["percent"] = statistics.median(100 * (a - b) / a for a, b in pairs)
    for guard, _ in ways.values():
        guard.remove()
    print(f"{name} {len(x):3d} {spec:40s} {found['ms']:9.2f} ms {found['percent']:6.1f} %", flush=True)
    return found


def one(name: str, spec: str, x: Tensor, y: Tensor) -> tuple[Guard, torch.optim.Optimizer]:
    model = model_of(name).to(x.device)
    return protect(model, spec), torch.optim.SGD(model.parameters(), lr=1e-4)


def step(guard: Guard, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    # with one thread, others on the machine do not count; several threads also count while they wait
    clock = time.process_time if torch.get_num_threads() == 1 and not x.is_cuda else time.perf_counter
    start = clock()
    optimizer.zero_grad()
    F.cross_entropy(guard(x), y).backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
