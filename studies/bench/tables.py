"""How many cells of a table come back from an undefended update, against the blind guess.

Scenes, fixed before any result was seen: breast cancer (30 columns of numbers) and the made-up patients (4 columns of
numbers, 7 of categories); clients with 1, 8 and 32 rows; one local step on all of them, and two epochs in batches of 8.
Three clients each, the model ``mlp`` at its first weights, learning rate 0.1. ``python studies/bench/tables.py`` writes
``studies/bench/results/tables.json``; what an attack got in a scene and is there already is not run again.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks.base import build as build_attack
from gradveil.data import load
from gradveil.errors import GradveilError
from gradveil.federated.settings import Local
from gradveil.metrics import Interval, interval
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.trial import Public, floors, measured, observe

OUT = Path(__file__).parent / "results" / "tables.json"
DATA = ("breast_cancer", "made_up_patients")
ROWS = (1, 8, 32)
LOCAL = {"one step": Local(batch_size=None), "two epochs": Local(epochs=2, batch_size=8)}
TABLEAK = "tableak:steps=600,starts=4,lr=0.1"
ATTACKS = {
    "one step": ("rowwise", TABLEAK, "analytic", "spear", "newton"),
    "two epochs": ("rowwise", TABLEAK, "surrogate:steps=600", "newton"),
}
SKIPPED = {("newton", 32)}  # a thousand unknowns take it too long
CLIENTS = 3
LR = 0.1


def scene(name: str, count: int, training: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return what each attack and the best blind guess get: the share of cells that are right, and of rows told."""
    data, seeds = load(name), Seeds(0)
    model = build(data.default_model, data.input_shape, data.num_classes, 0, data.modality)
    public = Public.draw(data, seeds("public"))
    held = [data.train.sample(count, seeds("client", i)) for i in range(CLIENTS)]
    seen = [
        observe(
            model, one, build_defense("none"), seeds("update", i), data.num_classes, public.prior, LR,
            local=LOCAL[training], modality=data.modality,
        )
        for i, one in enumerate(held)
    ]  # fmt: skip
    blind: dict[str, list[float]] = {}
    for one in held:
        for row in floors(one, public, modality=data.modality)[0]:
            blind.setdefault(row["guess"], []).append(1 - row["wrong"])
    guess = max(blind, key=lambda name: sum(blind[name]))
    found: dict[str, Any] = {
        "steps": seen[0].update.num_steps,
        "blind": {"guess": guess} | _said(interval(blind[guess])),
    }
    for attack in ATTACKS[training]:
        if attack in known:
            found[attack] = known[attack]
        if attack in known or (attack, count) in SKIPPED:
            continue
        begun, right, told = time.process_time(), list[float](), list[float]()
        try:
            rngs = [seeds("attack", attack, i) for i in range(CLIENTS)]
            for result, one in zip(build_attack(attack).reconstruct_many(seen, rngs), held, strict=True):
                values, _ = measured(result, one, public.gallery, modality=data.modality)
                right += (1 - values["wrong"]).tolist()
                told += values["identified"].tolist()
        except GradveilError as error:
            found[attack] = {"refused": str(error)}
            continue
        cost = round(time.process_time() - begun, 1)
        found[attack] = _said(interval(right)) | {"identified": sum(told) / len(told), "cpu_seconds": cost}
    return found


def _said(share: Interval) -> dict[str, float]:
    return {
        "right": round(share.mean, 4),
        "low": round(share.low, 4),
        "high": round(share.high, 4),
        "rows": share.count,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the results as the lines of a table of a page: the blind guess, then each attack."""
    names = ["rowwise", TABLEAK.partition(":")[0], "analytic", "spear", "newton", "surrogate"]
    head = ["| scene | blind guess |", *(f" {name} |" for name in names)]
    told = ["".join(head), "|---|---|" + "---|" * len(names)]
    for key, its in found.items():
        by_name = {attack.partition(":")[0]: value for attack, value in its.items()}
        cells = [_cell(by_name.get(name)) for name in ("blind", *names)]
        told.append(f"| {key} | " + " | ".join(cells) + " |")
    return told


def _cell(value: dict[str, Any] | None) -> str:
    if value is None or "refused" in value:
        return "–" if value is None else "refused"
    return f"{value['right']:.0%} [{value['low']:.0%}, {value['high']:.0%}]"


def main() -> None:
    """Run what is missing, the quick scenes first."""
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    for count in ROWS:
        for training in LOCAL:
            for name in DATA:
                key = f"{name}, {count} {'row' if count == 1 else 'rows'}, {training}"
                known = found.get(key, {})
                if any(a not in known and (a, count) not in SKIPPED for a in ATTACKS[training]):
                    found[key] = scene(name, count, training, known)
                    OUT.write_text(json.dumps(found, indent=2) + "\n")
                    print(key, json.dumps(found[key]), flush=True)


if __name__ == "__main__":
    main()
