"""What the update of a vision transformer gives away of which only low-rank factors are trained, and all of it.

Scenes: digits in patches of 4x4 (4 patches beside the class token), MNIST in patches of 7x7 (16) and of 4x4 (49);
ranks, one local step at the first weights and one after a step on other examples, learning rate 0.1. ``all`` trains
every weight: the control. ``python studies/bench/picture_factors.py [PART OF A KEY]`` writes what is missing to
``studies/bench/results/picture_factors.json`` and prints the table of docs/how-to/trained-parts.md.
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
from gradveil.errors import GradveilError
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.trial import Public, floors, measured, observe

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


def scenes() -> dict[str, tuple[str, str, int, int, int, int, str]]:
    """Return every scene by its key: data, model, rank, examples, draws, step and attack."""
    return {
        f"{name}, {spec}, {rank}, {count}, {step}, {attack}": (name, spec, rank, count, draws, step, attack)
        for name, spec, ranks, count, draws, attacks in SCENES
        for rank in ranks
        for step in (1, 2)
        for attack in attacks
    }


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
    wrong, told, objectives = list[float](), list[float](), list[float]()
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
        objectives.append(result.objective)
    exact = sum(value < 1e-6 for value in wrong) / len(wrong)
    found |= _said(wrong) | {"worst": max(wrong), "exact": exact, "identified": sum(told) / len(told)}
    return found | {"errors": wrong, "objectives": objectives}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the results as the lines of a table of a page."""
    heads = "data, model", "trained", "pictures a batch", "blind guess", "attack", "first step", "second step"
    told = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for key, (name, spec, rank, count, _, step, attack) in scenes().items():
        later = found.get(key.replace(f", {count}, 1, ", f", {count}, 2, "))
        if step == 1 and (its := found.get(key)) is not None:
            trained = f"factors of rank {rank}" if rank else "all"
            about = f"{name}, `{spec}` | {trained} | {count} | {its['blind']['mean']:.3f} | `{attack}`"
            told.append(f"| {about} | {_cell(its)} | {_cell(later)} |")
    return told


def _cell(its: dict[str, Any] | None) -> str:
    if its is None:
        return "not run"
    if "refused" in its:
        return "refused"
    right = f"{round(its['exact'] * its['images'])} of {its['images']} exact"
    return right if its["exact"] == 1 else f"{right}; {its['mean']:.3f} [{its['low']:.3f}, {its['high']:.3f}]"


def main() -> None:
    """Run what is missing, of the scenes whose key has the words given."""
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    for key, its in scenes().items():
        if key not in found and all(part in key for part in sys.argv[1:]):
            one = scene(*its)
            found = json.loads(OUT.read_text()) if OUT.exists() else {}
            found[key] = one
            OUT.write_text(json.dumps(found, indent=2) + "\n")
            print(key, json.dumps(one), flush=True)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
