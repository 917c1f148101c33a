"""What a promise costs in time, beside Opacus: one training step as a multiple of a plain one, in turns in one process.

Same network, same weights, same batch, same clip and noise multiplier; every way has a model of its own and takes one
step after the other's. ``times``: the least time of a step over the least of a plain one, by processor time on a CPU;
``median``: of the ratio of steps that were taken in the same turn. ``apart``: how far the gradient of a step without
noise is from that of Opacus's hooks, as a share of its size: the ways do the same.

- plain: backward and step of SGD.
- gradveil: ``protect(model, "veil:z=1,clip=1")``.
- opacus hooks, opacus ghost: ``PrivacyEngine().make_private`` with ``grad_sample_mode`` "hooks" and "ghost".

Opacus's noise is ``torch.normal`` from torch's own generator, which is no cipher. Its ``secure_mode=True`` needs
torchcsprng; where that is not installed, as here, it cannot be measured: then gradveil's noise is of another kind, and
its time stands in the same step. The output says which noise each has.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from defense_scores import machine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradveil.models import build
from gradveil.models.text import Embedded, PostNormBlock, TextModel
from gradveil.models.vision import TransformerBlock
from gradveil.protection.protect import protect

Z, CLIP, CLASSES, LR = 1.0, 1.0, 10, 1e-4
TOKENS, VOCABULARY = 64, 2048
LENET = "lenet:activation=relu,init=kaiming"
CPU = (("lenet", 32), ("lenet", 200), ("mlp", 8), ("mlp", 32), ("convnet", 16), ("resnet18", 16), ("vit", 16),
       ("text", 16))  # fmt: skip
LARGE = (("lenet", 2000), ("mlp", 2000), ("convnet", 256), ("resnet18", 128), ("vit", 256), ("text", 256))
Step = Callable[[Tensor, Tensor], None]


class Vit(nn.Module):
    """A small vision transformer of layers that Opacus knows: positions as an embedding, the mean over tokens."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 4, 4), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(64, device=x.device).repeat(len(x), 1)
        out: Tensor = self.fc(self.norm(self.blocks(self.patches(x).flatten(2).mT + self.places(places))).mean(1))
        return out


class Words(Embedded):
    """Embeddings with places that lie one after the other in memory, which Opacus's ghost asks for."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids) + self.places(torch.arange(TOKENS, device=ids.device).repeat(len(ids), 1))
        return out


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a network and the shape of its inputs."""
    torch.manual_seed(0)
    if name == "lenet":
        return build(LENET, (1, 28, 28), CLASSES), (1, 28, 28)
    if name == "mlp":
        parts = [nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)]
        return nn.Sequential(*parts), (3, 32, 32)
    if name == "vit":
        return Vit(), (3, 32, 32)
    if name == "text":
        blocks = [PostNormBlock(128, 4, 1e-12) for _ in range(2)]
        return TextModel(Words(VOCABULARY, TOKENS, 128), blocks, CLASSES, causal=False), (TOKENS,)
    return build({"resnet18": "resnet18:norm=group"}.get(name, name), (3, 32, 32), CLASSES), (3, 32, 32)


def batch(shape: tuple[int, ...], count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(1, VOCABULARY, (count, *shape), generator=rng) if len(shape) == 1 else torch.rand(count, *shape)
    return x.to(device), torch.randint(0, CLASSES, (count,), generator=rng).to(device)


@dataclass(frozen=True)
class Way:
    """A model under one way of training."""

    model: nn.Module
    step: Step
    noise: str


def plain(name: str, data: tuple[Tensor, Tensor], z: float) -> Way:
    model = network(name)[0].to(data[0].device).train()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    return Way(model, _stepped(model, optimizer, loss), "none")


def gradveil(name: str, data: tuple[Tensor, Tensor], z: float) -> Way:
    model = network(name)[0].to(data[0].device).train()
    guard = protect(model, f"veil:z={z},clip={CLIP}")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    noise = getattr(guard.report, "noise", "torch's generator, seeded by the operating system")
    return Way(model, _stepped(model, optimizer, nn.CrossEntropyLoss()), str(noise))


def opacus(mode: str) -> Callable[[str, tuple[Tensor, Tensor], float], Way]:
    def made(name: str, data: tuple[Tensor, Tensor], z: float) -> Way:
        from opacus import PrivacyEngine

        bare = network(name)[0].to(data[0].device).train()
        loader = DataLoader(TensorDataset(*(d.cpu() for d in data)), batch_size=len(data[0]))
        model, optimizer, *rest = PrivacyEngine().make_private(
            module=bare, optimizer=torch.optim.SGD(bare.parameters(), lr=LR), criterion=nn.CrossEntropyLoss(),
            data_loader=loader, noise_multiplier=z, max_grad_norm=CLIP, poisson_sampling=False, grad_sample_mode=mode,
        )  # fmt: skip
        loss = rest[0] if len(rest) == 2 else nn.CrossEntropyLoss()
        return Way(bare, _stepped(model, optimizer, loss), "torch's generator (secure_mode=False)")

    return made


def _stepped(model: nn.Module, optimizer: Any, loss: Any) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


WAYS = {"plain": plain, "gradveil": gradveil, "opacus hooks": opacus("hooks"), "opacus ghost": opacus("ghost")}


def measure(name: str, count: int, device: torch.device, turns: int) -> list[dict[str, Any]]:
    data = batch(network(name)[1], count, device)
    size = sum(p.numel() for p in network(name)[0].parameters())
    head = {"model": name, "parameters": size, "records": count}
    ways: dict[str, Way] = {}
    failed: dict[str, str] = {}
    quiet = {way: _quiet(make, name, data) for way, make in WAYS.items() if way != "plain"}
    for way, make in WAYS.items():
        try:
            ways[way] = make(name, data, Z)
            ways[way].step(*data)  # passes are recorded, buffers allocated
            ways[way].step(*data)
        except Exception as error:
            ways.pop(way, None)
            failed[way] = " ".join(str(error).split())[:200]
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, one in ways.items():
            _wait(device)
            start = clock()
            one.step(*data)
            _wait(device)
            taken[way].append(clock() - start)
    rows = [head | {"way": way, "failed": why} for way, why in failed.items()]
    for way, times in taken.items():
        row = head | {"way": way, "turns": turns, "ms": round(1e3 * min(times), 3), "noise": ways[way].noise}
        row["times"] = round(min(times) / min(taken["plain"]), 2)
        row["median"] = round(statistics.median(a / b for a, b in zip(times, taken["plain"], strict=True)), 2)
        reference = quiet.get("opacus hooks")
        if reference is not None and (mine := quiet.get(way)) is not None:
            row["apart"] = float(f"{float((mine - reference).norm() / reference.norm()):.1e}")
        rows.append(row)
    for row in rows:
        said = row.get("failed") or f"{row['ms']:9.2f} ms  x {row['times']:6.2f} (median {row['median']:6.2f})"
        print(f"{name:9} {count:5} {row['way']:13} {said} {row.get('apart', '')}", flush=True)
    return rows


def _quiet(make: Callable[[str, tuple[Tensor, Tensor], float], Way], name: str, data: Any) -> Tensor | None:
    """Return the gradient of one step with next to no noise; None where the way fails."""
    try:
        way = make(name, data, 1e-9)
        way.step(*data)
        return torch.cat([p.grad.detach().flatten() for p in way.model.parameters() if p.grad is not None])
    except Exception:
        return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/beside-opacus.json"))
    parser.add_argument("--models", default="", help="those to measure, by comma; none: all")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--note", default="", help="kept beside the rows: what else the machine did, which code")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    device = torch.device(args.device)
    cases = CPU if device.type == "cpu" else (*CPU, *LARGE)
    chosen = [case for case in cases if not args.models or case[0] in args.models.split(",")]
    secure = "installed" if util.find_spec("torchcsprng") else "not installed: secure_mode=True cannot be measured"
    found: dict[str, Any] = {"machine": machine(device, 1), "load": list(os.getloadavg()), "note": args.note}
    found |= {"opacus": metadata.version("opacus"), "torchcsprng": secure, "z": Z, "clip": CLIP, "rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for case in chosen:
        found["rows"] += measure(*case, device, args.turns)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
