"""A rehearsal's prediction beside what real runs lose: digits, features of patches, product code.

Each row trains with `veil:...,clip=auto,lr=auto`; what it loses is beside the best of four rates without a defence,
each a mean over the seeds. The rehearsal of each seed comes from that seed's public records; a row holds where the mean
loss lies in the mean of the intervals.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gradveil.auditing.train import TrainConfig, train

MODEL = "scatter:patches=64,dims=60,init=zeros"
COMMON = {"model": MODEL, "partition": "iid:devices=10,per_device=100", "clients": 10, "rounds": 30}
PROMISES = (
    "epsilon=8,tier=aggregate",
    "epsilon=2,tier=aggregate",
    "epsilon=0.5,tier=aggregate",
    "epsilon=4,tier=local",
)
RATES = (1.0, 3.0, 10.0, 30.0)


def trained(seed: int, defense: str, lr: float = 1.0) -> dict[str, Any]:
    """Return what a run says at its end."""
    common: dict[str, Any] = COMMON | {"batch_size": None, "aggregator": "fedavgm:momentum=0.9", "evaluate_every": 30}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(**common, seed=seed, defense=defense, lr=lr, save_every=30, engine="sequential")
        return train(config, Path(folder) / "run")


def main() -> None:
    """Train, and write a row for each promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/rehearsals.json"))
    given = parser.parse_args()
    bare = max(fmean(trained(seed, "none", lr)["accuracy"] for seed in given.seeds) for lr in RATES)
    rows = []
    for promise in PROMISES:
        runs = [trained(seed, f"veil:{promise},clip=auto,lr=auto") for seed in given.seeds]
        lost = 100 * (bare - fmean(run["accuracy"] for run in runs))
        low, said, high = (fmean(run["rehearsed"][key] for run in runs) for key in ("low", "lost", "high"))
        row = {"promise": promise, "undefended": bare, "lost": lost, "said": said, "low": low, "high": high}
        rows.append(row | {"holds": low <= lost <= high, "choices": [run["rehearsed"] for run in runs]})
        print({key: value for key, value in rows[-1].items() if key != "choices"}, flush=True)
        given.out.write_text(json.dumps({"model": MODEL, "seeds": given.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
