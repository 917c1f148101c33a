"""Measure what the playground says a defence costs: training on digits at every strength of every dial.

python tools/play_accuracy.py [DIAL ...]

It writes accuracy.toml of the playground; all dials take about twenty minutes of one core. What is measured is that of
`gradveil train`: 20 rounds, ten clients, learning rate 0.2. veil is trained at four times that: it cuts gradients down
to length 1, and at 0.2 it has not arrived after 20 rounds (67 % at z=0.1, in place of 90 %).
"""

import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from gradveil.auditing.train import TrainConfig, train
from gradveil_studies.play.stage import DATASETS, DIALS, MODELS, STRENGTHS, spec_of

OUT = Path(__file__).resolve().parents[1] / "studies" / "src" / "gradveil_studies" / "play" / "accuracy.toml"
SEEDS = 3
TIMES = {"veil": 4}  # the learning rate


def accuracy(defense: str, seed: int) -> float:
    """Return the accuracy on the test split after the last round."""
    lr = TrainConfig().lr * TIMES.get(defense.partition(":")[0], 1)
    model = next(iter(MODELS["image"]))
    config = TrainConfig(dataset=next(iter(DATASETS)), model=model, defense=defense, seed=seed, lr=lr)
    with TemporaryDirectory() as folder:
        return float(train(config, Path(folder) / "run")["accuracy"])


def main(names: list[str]) -> None:
    """Train and write; what other dials have is kept."""
    known = tomllib.loads(OUT.read_text())["accuracy"] if OUT.exists() else {}
    for name in names or ["none", *DIALS]:
        for strength in range(1, STRENGTHS + 1) if name in DIALS else [1]:
            spec = spec_of(name, strength)
            known[spec] = [round(accuracy(spec, seed), 4) for seed in range(SEEDS)]
            print(f'"{spec}" = {known[spec]}', flush=True)
    lines = [
        "# Test accuracy by defence, one number a seed. Written by tools/play_accuracy.py, as by",
        f"# gradveil train --dataset digits --model {next(iter(MODELS['image']))} --defense SPEC --seed 0 (1, 2)",
        "# with --lr 0.8 for veil.",
        f'dataset = "{next(iter(DATASETS))}"',
        f'model = "{next(iter(MODELS["image"]))}"',
        "",
        "[accuracy]",
        *(f'"{spec}" = {found}' for spec, found in known.items()),
    ]
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
