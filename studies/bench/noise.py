"""What noise costs: nanoseconds a number, in turns in one process, for vectors of several lengths.

- drawn: torch's ``normal_`` in float32, from a generator with a seed.
- drawn, scaled, added: the same, times a standard deviation, added to a sum: what a simulated release does.
- secret: ``gradveil.privacy.noise.release``: from a cipher's words, on a public grid, scaled and added in one pass.
- secret, numpy: the same where the compiled kernel was not built.
- opacus: ``torch.normal`` with a standard deviation, and the sum: what Opacus does without its secure mode.

``times`` is of *drawn, scaled, added*. By processor time on a CPU.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from defense_scores import machine
from torch import Tensor

from gradveil.privacy import noise as gaussian
from gradveil.privacy.noise import SecretDraws

STD, LENGTHS, GPU = 0.5, (1_000, 20_000, 1_000_000, 10_000_000), (100_000_000,)
BASE = "drawn, scaled, added"


def ways(total: Tensor) -> dict[str, Callable[[], Any]]:
    """Return what is measured on a sum."""
    at = total.device
    rng, secret, room = torch.Generator(at).manual_seed(0), SecretDraws(at), torch.empty_like(total)
    found: dict[str, Callable[[], Any]] = {
        "drawn": lambda: room.normal_(generator=rng),
        BASE: lambda: room.normal_(generator=rng).mul_(STD).add_(total),
        "opacus": lambda: total + torch.normal(mean=0, std=STD, size=total.shape, device=at, generator=rng),
        "secret": lambda: gaussian.release(total, STD, secret),
    }
    if at.type == "cpu" and gaussian._compiled("cpu") is not None and len(total) <= 1_000_000:
        found["secret, numpy"] = lambda: _by_numpy(total, secret)
    return found


def _by_numpy(total: Tensor, secret: SecretDraws) -> Tensor:
    with patch.object(gaussian, "_compiled", lambda device: None):
        return gaussian.release(total, STD, secret)


def measure(count: int, device: torch.device, turns: int) -> list[dict[str, Any]]:
    total = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    repeats = max(1, 200_000 // count) if device.type == "cpu" else 10
    timed: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for name, call in ways(total).items():
            call()
            _wait(device)
            start = clock()
            for _ in range(repeats):
                call()
            _wait(device)
            if turn:
                timed.setdefault(name, []).append((clock() - start) / repeats / count * 1e9)
    rows = []
    for name, times in timed.items():
        row = {
            "numbers": count,
            "way": name,
            "ns": round(min(times), 3),
            "ns_median": round(statistics.median(times), 3),
        }
        row["times"] = round(min(times) / min(timed[BASE]), 2)
        rows.append(row)
        print(
            f"{count:12,} {name:22} {row['ns']:9.3f} ns (median {row['ns_median']:9.3f})  x {row['times']}", flush=True
        )
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/noise.json"))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--note", default="", help="kept beside the rows: what else the machine did")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    found: dict[str, Any] = {"machine": machine(device, 1), "load": list(os.getloadavg()), "note": args.note}
    found |= {"compiled": gaussian._compiled(device.type) is not None}
    lengths = LENGTHS if device.type == "cpu" else (*LENGTHS, *GPU)
    found["rows"] = [row for count in lengths for row in measure(count, device, args.turns)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
