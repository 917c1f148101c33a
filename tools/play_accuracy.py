"""Measure what the playground says a defence costs: training on digits at every strength of every dial.

python tools/play_accuracy.py        # writes src/gradveil/play/accuracy.toml; about ten minutes of one core
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from gradveil.experiments.train import TrainConfig, train
from gradveil.play.stage import DATASETS, DIALS, MODELS, STRENGTHS, spec_of

OUT = Path(__file__).resolve().parents[1] / "src" / "gradveil" / "play" / "accuracy.toml"
SEEDS = 3


def accuracy(defense: str, seed: int) -> float:
    """Return the accuracy on the test split after the last round, the learning rate that of ``gradveil train``."""
    config = TrainConfig(dataset=next(iter(DATASETS)), model=next(iter(MODELS["image"])), defense=defense, seed=seed)
    with TemporaryDirectory() as folder:
        return float(train(config, Path(folder) / "run")["accuracy"])


def main() -> None:
    """Train and write."""
    config = TrainConfig()
    specs = ["none", *(spec_of(name, strength) for name in DIALS for strength in range(1, STRENGTHS + 1))]
    lines = [
        "# Test accuracy by defence, one number a seed. Written by tools/play_accuracy.py, as by",
        f"# gradveil train --dataset digits --model {next(iter(MODELS['image']))} --defense SPEC --seed 0 (1, 2)",
        f'dataset = "{next(iter(DATASETS))}"',
        f'model = "{next(iter(MODELS["image"]))}"',
        f"rounds = {config.rounds}",
        "",
        "[accuracy]",
    ]
    for spec in specs:
        found = [round(accuracy(spec, seed), 4) for seed in range(SEEDS)]
        lines.append(f'"{spec}" = {found}')
        print(lines[-1], flush=True)
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
