"""What the update of a vision transformer gives away of which only low-rank factors are trained, and all of it.

Scenes: digits in patches of 4x4 (4 patches beside the class token), MNIST in patches of 7x7 (16) and of 4x4 (49);
ranks, one local step at the first weights and one after a step on other examples, learning rate 0.1. ``all`` trains
every weight: the control. ``python bench/picture_factors.py [PART OF A KEY]`` writes what is missing to
``bench/results/picture_factors.json`` and prints the table of docs/how-to/trained-parts.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trained_parts import _said

from gradveil.attacks.base import build as build_attack
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.defenses.base import build as build_defense
from gradveil.errors import GradveilError
from gradveil.experiments.trial import Public, floors, measured, observe
from gradveil.models import build
from gradveil.seeds import Seeds

OUT = Path(__file__).parent / "results" / "picture_factors.json"
LR = 0.1
SMALL, WIDE = "vit_tiny:patch=7", "vit_tiny:width=128"
SCENES: list[tuple[str, str, tuple[int, ...], int, int, tuple[str, ...]]] = [
    # data, model, ranks (0: all weights), examples, draws, attacks
    ("digits", "vit_tiny", (4, 16, 64, 0), 1, 8, ("patches", "newton")),
    ("digits", "vit_tiny", (16, 64, 0), 2, 4, ("patches",)),
    ("digits", "vit_tiny", (16, 64, 0), 4, 4, ("patches",)),
    ("mnist", SMALL, (16, 64, 0), 1, 8, ("patches",)),
    ("mnist", WIDE, (128, 0), 1, 3, ("patches",)),
]


def sent_model(spec: str, rank: int, data: Dataset, step: int, seeds: Seeds) -> nn.Module:
    """Return the model before a client's first or second step; the first one was on eight examples of another."""
    named = f"{spec}{',' if ':' in spec else ':'}lora={rank}" if rank else spec
    model = build(named, data.input_shape, data.num_classes, 0, data.modality)
    for k in range(step - 1):
        other = data.train.sample(8, seeds("other", k))
        gradient = observe(model, other, build_defense("none"), seeds("before", k), data.num_classes).update.gradient
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in gradient:
                    p -= LR * gradient[name]
    return model


def scene(name: str, spec: str, rank: int, count: int, draws: int, step: int, attack: str) -> dict[str, Any]:
    """Return the errors of an attack and of the best blind guess."""
    data, seeds = load(name), Seeds(0)
    model, public = sent_model(spec, rank, data, step, seeds), Public.draw(data, seeds("public"))
    held = [data.train.sample(count, seeds("client", count, i)) for i in range(draws)]
    blind: dict[str, list[float]] = {}
    for one in held:
        for row in floors(one, public, modality=data.modality)[0]:
            blind.setdefault(row["guess"], []).append(row["mse"])
    guess = min(blind, key=lambda name: sum(blind[name]))
    found: dict[str, Any] = {"blind": {"guess": guess} | _said(blind[guess]), "images": count * draws}
    wrong, told = list[float](), list[float]()
    for i, one in enumerate(held):
        rest = (seeds("update", count, i), data.num_classes, public.prior, LR)
        seen = observe(model, one, build_defense("none"), *rest, modality=data.modality)
        try:
            result = build_attack(attack).reconstruct(seen, seeds("attack", count, i))
        except GradveilError as refusal:
            return found | {"refused": str(refusal)}
        values, _ = measured(result, one, public.gallery, modality=data.modality)
        wrong += values["mse"].tolist()
        told += values["identified"].tolist()
    exact = sum(value < 1e-6 for value in wrong) / len(wrong)
    return found | _said(wrong) | {"worst": max(wrong), "exact": exact, "identified": sum(told) / len(told)}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the results as the lines of a table of a page."""
    heads = "data, model", "trained", "pictures a batch", "step", "attack", "blind guess", "mean squared error", "exact"
    told = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for key, its in found.items():
        name, spec, rank, count, step, attack = key.split(", ")
        trained = "all" if rank == "0" else f"factors of rank {rank}"
        got = "refused | –" if "refused" in its else f"{_error(its)} | {its['exact']:.0%} of {its['images']}"
        told.append(
            f"| {name}, `{spec}` | {trained} | {count} | {step} | `{attack}` | {its['blind']['mean']:.3f} | {got} |"
        )
    return told


def _error(its: dict[str, Any]) -> str:
    return "below 10⁻⁶ each" if its["worst"] < 1e-6 else f"{its['mean']:.3f} [{its['low']:.3f}, {its['high']:.3f}]"


def main() -> None:
    """Run what is missing, of the scenes whose key has the words given."""
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, spec, ranks, count, draws, attacks in SCENES:
        for rank, step, attack in ((r, s, a) for r in ranks for s in (1, 2) for a in attacks):
            key = f"{name}, {spec}, {rank}, {count}, {step}, {attack}"
            if key not in found and all(part in key for part in sys.argv[1:]):
                one = scene(name, spec, rank, count, draws, step, attack)
                found = json.loads(OUT.read_text()) if OUT.exists() else {}
                found[key] = one
                OUT.write_text(json.dumps(found, indent=2) + "\n")
                print(key, json.dumps(one), flush=True)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
