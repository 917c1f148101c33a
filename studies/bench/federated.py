"""Seconds per round of federated averaging: one client at a time, worker processes, stacked clients, Flower.

Synthetic CIFAR-shaped data, 10 of 100 clients with 200 examples each, batches of 32, one local epoch; the time of a
round is that of its clients and of the averaging, without the evaluation. Needs torch and NumPy only.
"""

import argparse
import copy
import importlib.util
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import keep, machine, show

from gradveil.data.base import Dataset, Split, from_arrays
from gradveil.federated.simulate import Training, simulate
from gradveil.models import build
from gradveil.protection.defense import NoDefense

MODELS = ("lenet:activation=relu,init=kaiming", "leaknet")
ENGINES = {
    "cpu": ("sequential", "processes", "vectorised"),
    "cuda": ("sequential", "vectorised:graph=false", "vectorised"),
}
Row = dict[str, Any]


def world(examples: int = 20_000) -> Dataset:
    """Random images of CIFAR's shape."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (examples, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, examples)
    labels[:10] = np.arange(10)
    return from_arrays("noise", (images, labels), (images[:10], labels[:10]))


def flower_world() -> Dataset:
    """The same, for Flower's workers, which import this file."""
    return world()


def rounds(model: str, device: str, clients: int, samples: int, engine: str, data: Split, total: int) -> Iterator[Any]:
    parts = [np.arange(i * samples, (i + 1) * samples) % len(data) for i in range(max(clients, 100))]
    network = build(model, (3, 32, 32), 10).to(device)
    training = Training(rounds=total, clients=clients, lr=0.01)
    dataset = Dataset("noise", data, data, tuple("0123456789"))
    return simulate(network, dataset, parts, training, NoDefense(), 0, engine=engine)


def measure(
    model: str, device: str, clients: int, samples: int, engine: str, data: Split, repeats: int, warm: int = 2
) -> Row:
    """Time some rounds after the first ones, which start workers and record graphs."""
    times = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    running = rounds(model, device, clients, samples, engine, data, warm + repeats)
    started = time.perf_counter()
    for i in range(warm + repeats):
        next(running)
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if i >= warm:
            times.append(now - started)
        started = now
    running.close()  # type: ignore[attr-defined]
    row = {"model": model, "engine": engine, "clients": clients, "samples": samples}
    row |= {"seconds": min(times), "median": statistics.median(times), "rounds": repeats}
    if device == "cuda":
        row["gpu_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    else:
        row["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    return row


def plain_loop(model: str, device: str, data: Split, repeats: int) -> Row:
    """Time the loop that one would write by hand: a copy of the model and an SGD of its own for every client."""
    network = build(model, (3, 32, 32), 10).to(device)
    images = torch.from_numpy(np.array(data.images)).to(device).float() / data.scale
    labels = data.labels.to(device)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        ended = [
            _train_by_hand(network, images[i * 200 : i * 200 + 200], labels[i * 200 : i * 200 + 200]) for i in range(10)
        ]
        with torch.no_grad():
            for values in zip(network.parameters(), *(m.parameters() for m in ended), strict=True):
                values[0].copy_(torch.stack(values[1:]).mean(0))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    row = {"model": model, "engine": "plain loop", "clients": 10, "samples": 200}
    return row | {"seconds": min(times[1:]), "median": statistics.median(times[1:]), "rounds": repeats}


def _train_by_hand(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    own = copy.deepcopy(network)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    for chosen in torch.randperm(len(images)).split(32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(own(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return own


def on_flower(model: str, repeats: int) -> Row:
    """Time Flower's simulation on the same clients, after the rounds in which its workers start."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, here)
    from gradveil.integrations.flower.engine import simulate as simulate_on_flower
    from gradveil.integrations.flower.settings import FlowerSettings

    settings = FlowerSettings(
        dataset="federated:flower_world",
        model=model,
        partition="iid:devices=100,per_device=200",
        rounds=repeats + 2,
        clients=10,
    )
    times = [row["seconds"] for row in simulate_on_flower(settings).rounds][2:]
    row = {"model": model, "engine": "flower", "clients": 10, "samples": 200}
    return row | {"seconds": min(times), "median": statistics.median(times), "rounds": len(times)}


def compare(device: str, repeats: int, flower: bool) -> list[Row]:
    data = world().train
    found = []
    for model in MODELS:
        rows = [plain_loop(model, device, data, repeats)]
        rows += [measure(model, device, 10, 200, engine, data, repeats) for engine in ENGINES[device]]
        if device == "cpu":
            rows.append(_on_one_thread(model, data, repeats))
        if flower:
            rows.append(on_flower(model, repeats))
        for row in rows:
            row["speedup"] = rows[1]["seconds"] / row["seconds"]  # against our own one-at-a-time engine
            row["over_plain_loop"] = rows[0]["seconds"] / row["seconds"]
            show(row)
        found += rows
    return found


def _on_one_thread(model: str, data: Split, repeats: int) -> Row:
    """Time the sequential engine without a second thread: what each worker process is, alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(model, "cpu", 10, 200, "sequential", data, repeats) | {"engine": "sequential, one thread"}
    finally:
        torch.set_num_threads(before)


def scaling(device: str, repeats: int, largest: int) -> list[Row]:
    """Time against the number of clients and of examples."""
    data = world().train
    engine = "vectorised" if device == "cuda" else "processes"
    samples = 200 if device == "cuda" else 40
    sizes = [(n, samples) for n in (10, 100, 1000) if n <= largest] + [(10, 2 * samples), (10, 4 * samples)]
    found = []
    for clients, each in sizes:
        row = measure(MODELS[0], device, clients, each, engine, data, repeats, warm=1)
        row["microseconds_per_example"] = 1e6 * row["seconds"] / (clients * each)
        show(row)
        found.append(row)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1000, help="clients in the scaling test")
    parser.add_argument("--no-flower", action="store_true")
    args = parser.parse_args(argv)
    flower = args.device == "cpu" and not args.no_flower and importlib.util.find_spec("flwr") is not None
    result = machine(args.device) | {
        "per_round": compare(args.device, args.repeats, flower),
        "scaling": scaling(args.device, max(2, args.repeats // 2), args.largest),
    }
    keep(args.out, result)


if __name__ == "__main__":
    main()
