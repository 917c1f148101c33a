"""What a guard costs: a protected training step against a plain one, in turns, and what its checks take of it.

All ways of a row sit on equal models in one process and step by turns, so that a busy machine is as busy for each.

- ``steps``: the time of a protected step as a multiple of a plain one, by the lower quartiles of both (``times``), and
  the median over turns (``median``). The first steps, in which passes are recorded, are left out.
- ``overlap``: of the entries that exact scores choose, the share that the default of ``representation`` chooses too,
  for shares of the live entries, averaged over images; and the method that the default stood for.
- ``records``: the same as ``steps`` for a defence of records, on networks that keep records apart.
- ``rows``: the part of a protected step that the checks of gradients and weights take: the median over pairs of steps
  with them and without. ``percent`` is of a protected step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from defense_scores import CLASSES, SHAPE, examples
from kept import keep, machine
from torch import Tensor, nn

from gradveil.models import build
from gradveil.modules import find_layer
from gradveil.protection import attachment
from gradveil.protection.attachment import Hook, unwatch, watch
from gradveil.protection.protect import Guard, protect
from gradveil.representation.scores import choose, linearise, row_norms

SHARES = (0.01, 0.1, 0.4, 0.8)
DEFENSES = (
    "representation:share=0.4",
    "representation:share=0.4,method=exact",
    "random_mask:share=0.4",
    "pruning:share=0.8",
    "gaussian:scale=0.01",
    "decoy",
)
STEPS = ("representation:share=0.4", "random_mask:share=0.4", "pruning:share=0.8", "gaussian:scale=0.01",
         "laplace:scale=0.01")  # fmt: skip
RECORDS = "veil:z=1"
AT_MOST = 5.0  # per cent of a protected step
PLAIN_STEPS = {"representation": 2.0, "pruning": 1.2, "gaussian": 1.2, "laplace": 1.2, "veil": 2.0}
# network -> steps of Adam on batches of 32 before overlaps are measured a second time, learning rate, images
NETWORKS = {
    "lenet": (600, 0.01, 32),
    "lenet:activation=relu,init=kaiming": (600, 0.001, 32),
    "convnet:init=kaiming": (30, 0.001, 4),
    "resnet18:width=16": (300, 0.002, 32),
    "vit_tiny": (600, 0.001, 32),
    "mlp": (600, 0.001, 32),
    "lora": (400, 0.001, 32),
}


class Adapted(nn.Module):
    """A frozen linear layer and a trained update of rank 8 beside it, as in LoRA."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inside, out).requires_grad_(False)
        self.down, self.up = nn.Linear(inside, 8, bias=False), nn.Linear(8, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def chain(kind: Callable[[int, int], nn.Module], *widths: int) -> nn.Module:
    layers = [part for a, b in pairwise(widths) for part in (kind(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], CLASSES))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    own = {"mlp": lambda: chain(nn.Linear, 3072, 256, 128), "lora": lambda: chain(Adapted, 3072, 512, 512, 512)}
    return own[name]() if name in own else build(name, SHAPE, CLASSES)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/guard.json"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", choices=["steps", "records", "overlap", "checks"], help="the rest is kept as it was written"
    )
    parser.add_argument("--models", default="lenet,convnet,resnet18:width=16,resnet18,vit_tiny,mlp,lora")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way of a row")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    images, labels, source = examples(device)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.only and args.out.exists() else {}
    found |= {"machine": machine(device.type), "images": source}
    batches = [(images[:n], labels[:n]) for n in map(int, args.batches.split(","))]
    if args.only in (None, "steps"):
        found["steps"] = [r for m in args.models.split(",") for x, y in batches for r in steps(m, x, y, args.seconds)]
    if args.only in (None, "records"):
        apart = [m for m in args.models.split(",") if not m.startswith("resnet")]  # batch norm mixes them
        found["records"] = [r for m in apart for b in batches for r in steps(m, *b, args.seconds, (RECORDS,))]
    if args.only in (None, "overlap"):
        families = {model.partition(":")[0] for model in args.models.split(",")}
        asked = [name for name in NETWORKS if name.partition(":")[0] in families]
        found["overlap"] = [row for name in asked for row in overlaps(name, images, labels)]
    if args.only in (None, "checks"):
        found["rows"] = [
            checks(name, spec, x, y, 3 * args.seconds)
            for name in ("lenet", "resnet18:width=16")
            for x, y in batches
            for spec in DEFENSES
        ]
    found["targets"] = targets(found)
    keep(args.out, found)


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return, for each defence, the worst row."""
    written = []
    for spec in (*STEPS, RECORDS):
        mine = [r for r in [*found.get("steps", []), *found.get("records", [])] if r["defense"] == spec]
        wanted = PLAIN_STEPS.get(spec.partition(":")[0])
        if mine and wanted:
            worst, met = max(mine, key=lambda r: r["times"]), [r for r in mine if r["times"] <= wanted]
            what = (
                f"a step protected by {spec}, at most (on {worst['model']}, batch {worst['batch']}; within the aim: "
                f"{len(met)} of {len(mine)} networks and batches): plain steps"
            )
            written.append(target(what, wanted, worst["times"]))
    for spec in DEFENSES:
        if mine := [r for r in found.get("rows", []) if r["defense"] == spec]:
            worst = max(mine, key=lambda r: r["percent"])
            on = f"(on {worst['model']}, batch {worst['batch']})"
            what = f"checks of a guard, {spec}, at most {on}: % of a protected step"
            written.append(target(what, AT_MOST, worst["percent"]))
    return written


def target(what: str, wanted: float, got: float) -> dict[str, Any]:
    return {"target": what, "wanted": wanted, "got": got, "met": got <= wanted}


# --- a protected step against a plain one ---------------------------------------------------------------------------


def steps(name: str, x: Tensor, y: Tensor, seconds: float, specs: tuple[str, ...] = STEPS) -> list[dict[str, Any]]:
    ways = {spec: one(name, spec, x.device) for spec in ("none", *specs)}
    for guard, _ in ways.values():
        unwatch(guard._attachment)
    plain = ways["none"][0]
    plain.remove()
    times: dict[str, list[float]] = {spec: [] for spec in ways}
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds * len(ways) or len(times["none"]) < 8:
        for spec, (guard, optimizer) in ways.items():
            if spec != "none":  # only its own guard hears of a step
                watch(guard._attachment)
            times[spec].append(step(guard, optimizer, x, y))
            unwatch(guard._attachment)
    kept = {spec: some[4:] for spec, some in times.items()}
    model = plain.model
    found = []
    for spec in specs:
        row: dict[str, Any] = {"model": name, "batch": len(x), "defense": spec, "turns": len(kept[spec])}
        row |= {"plain_ms": quartile(kept["none"]) * 1e3, "ms": quartile(kept[spec]) * 1e3}
        row["times"] = row["ms"] / row["plain_ms"]
        row["median"] = statistics.median(a / b for a, b in zip(kept[spec], kept["none"], strict=True))
        if spec.startswith("representation"):
            row["method"] = choose(linearise(model, find_layer(model), x), 2.0)
        found.append(row)
        print(f"{name:20s} {len(x):3d} {spec:26s} {row['plain_ms']:9.2f} ms x {row['times']:5.2f} "
              f"(median {row['median']:5.2f}) {row.get('method', '')}", flush=True)  # fmt: skip
    for guard, _ in ways.values():
        guard.remove()
    return found


def quartile(times: list[float]) -> float:
    """Return the lower quartile: a burst of other work on the machine does not move it, one lucky step neither."""
    return sorted(times)[len(times) // 4]


# --- what the default chooses, against exact scores ------------------------------------------------------------------


def overlaps(name: str, images: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    count, lr, of = NETWORKS[name]
    model = model_of(name).to(images.device).train()
    rows = []
    for trained in (0, count):
        accuracy = train(model, images[of:], labels[of:], trained, lr) if trained else None
        x, layer = images[:of], find_layer(model)
        method = choose(linearise(model, layer, x), 2.0)
        (r, exact), (_, norms) = row_norms(model, layer, x, "exact"), row_norms(model, layer, x)
        row = {"model": name, "trained_steps": trained, "accuracy": accuracy, "images": of, "method": method}
        row |= {"shares": SHARES, "overlap": [shared(r, exact, norms, share) for share in SHARES]}
        row["size_alone"] = [shared(r, exact, torch.ones_like(norms), share) for share in SHARES]
        rows.append(row)
        print(f"{name} trained {trained} ({accuracy}) {method}", *(f"{o:.2f}" for o in row["overlap"]), flush=True)
    return rows


def shared(r: Tensor, exact: Tensor, estimated: Tensor, share: float) -> float:
    """Return which part of the exact top set the estimate's top set of the same size holds."""
    parts = []
    for entries, true, guess in zip(r, exact, estimated, strict=True):
        live = entries != 0
        size = entries[live].abs()
        count = max(1, round(share * len(size)))
        tops = [set((size / norms[live]).topk(count).indices.tolist()) for norms in (true, guess)]
        parts.append(len(tops[0] & tops[1]) / count)
    return sum(parts) / len(parts)


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, lr: float) -> float:
    """Train with Adam on batches of 32; return the accuracy on 500 images that were left out."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        some = torch.randint(500, len(images), (32,), generator=rng)
        optimizer.zero_grad()
        F.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(images[:500]).argmax(1) == labels[:500]).float().mean().item()


# --- what checks take ------------------------------------------------------------------------------------------------


class NoProvenance:
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


def checks(name: str, spec: str, x: Tensor, y: Tensor, seconds: float) -> dict[str, Any]:
    ways = {kind: one(name, spec, x.device) for kind in ("checked", "unchecked")}
    plain = attachment.stamp, attachment.is_same
    for guard, _ in ways.values():
        unwatch(guard._attachment)
    bare = ways["unchecked"][0]._attachment
    bare.provenance.untie()
    bare._provenance = NoProvenance(bare.model)  # type: ignore[assignment]
    for part in bare.model.modules():
        for key, hook in list(part._forward_hooks.items()):
            if isinstance(hook, Hook) and hook.method == "part_ran":
                del part._forward_hooks[key]
    times: dict[str, list[float]] = {"checked": [], "unchecked": []}
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds or len(times["checked"]) < 5:
        for kind, (guard, optimizer) in ways.items():
            if kind == "unchecked":
                attachment.stamp, attachment.is_same = lambda *_: ([], 0), lambda *_: False
            watch(guard._attachment)
            times[kind].append(step(guard, optimizer, x, y))
            unwatch(guard._attachment)
            attachment.stamp, attachment.is_same = plain
    pairs = list(zip(times["checked"], times["unchecked"], strict=True))[2:]  # the first warm up
    found: dict[str, Any] = {"model": name, "batch": len(x), "defense": spec, "pairs": len(pairs)}
    found["ms"] = statistics.median(a for a, _ in pairs) * 1e3
    found["percent"] = statistics.median(100 * (a - b) / a for a, b in pairs)
    for guard, _ in ways.values():
        guard.remove()
    print(f"{name} {len(x):3d} {spec:40s} {found['ms']:9.2f} ms {found['percent']:6.1f} %", flush=True)
    return found


def one(name: str, spec: str, device: torch.device) -> tuple[Guard, torch.optim.Optimizer]:
    model = model_of(name).to(device).train()
    return protect(model, spec), torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def step(guard: Guard, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(guard(x), y).backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
