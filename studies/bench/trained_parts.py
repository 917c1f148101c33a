"""What an undefended update gives away of which only a part of the model is trained: all, the head, batch norm alone.

Scenes, fixed before any result was seen: pictures (digits, ``lenet:strides=2/1`` and the same with batch norm) and rows
(made_up_patients, ``mlp``); three clients with one example and three with eight, one local step at the first weights,
learning rate 0.1. ``python studies/bench/trained_parts.py`` writes ``studies/bench/results/trained_parts.json``.
"""

import json
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks.base import build as build_attack
from gradveil.attacks.labels import recover_labels
from gradveil.data import load
from gradveil.errors import GradveilError
from gradveil.federated.settings import only_trained
from gradveil.metrics import interval
from gradveil.modalities.base import label_accuracy
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.trial import Public, floors, measured, observe
from gradveil.tree import parameters, size

OUT = Path(__file__).parent / "results" / "trained_parts.json"
SCENES = (
    ("digits", "lenet:strides=2/1", ("all", "head")),
    ("digits", "lenet:strides=2/1,batchnorm=true", ("all", "head", "batch_norm")),
    ("made_up_patients", "mlp", ("all", "head")),
)
ATTACKS = {
    "digits": ("analytic", "gs:steps=300"),
    "made_up_patients": ("analytic", "rowwise", "tableak:steps=300,starts=4"),
}
EXAMPLES = (1, 8)
CLIENTS = 3


def scene(name: str, spec: str, trains: str, count: int) -> dict[str, Any]:
    """Return what each attack gets: the error of the data's kind, and the share of labels that can be read."""
    data, seeds = load(name), Seeds(0)
    model = only_trained(build(spec, data.input_shape, data.num_classes, 0, data.modality), trains)
    public, error = Public.draw(data, seeds("public")), data.modality.error
    held = [data.train.sample(count, seeds("client", i)) for i in range(CLIENTS)]
    seen = [
        observe(
            model, one, build_defense("none"), seeds("update", i), data.num_classes, public.prior, 0.1,
            modality=data.modality,
        )
        for i, one in enumerate(held)
    ]  # fmt: skip
    blind: dict[str, list[float]] = {}
    for one in held:
        for row in floors(one, public, modality=data.modality)[0]:
            blind.setdefault(row["guess"], []).append(row[error])
    guess = min(blind, key=lambda name: sum(blind[name]))
    read = [recover_labels(s, seeds("labels", i)) for i, s in enumerate(seen)]
    right = [label_accuracy(y, one.labels).mean() for y, one in zip(read, held, strict=True) if y is not None]
    found: dict[str, Any] = {
        "tensors": list(seen[0].update.gradient), "numbers": size(parameters(model)), "error": error,
        "blind": {"guess": guess} | _said(blind[guess]),
        "labels": float(torch.stack(right).mean()) if right else None,
    }  # fmt: skip
    for attack in ATTACKS[name]:
        wrong, told = list[float](), list[float]()
        try:
            rngs = [seeds("attack", attack, i) for i in range(CLIENTS)]
            for result, one in zip(build_attack(attack).reconstruct_many(seen, rngs), held, strict=True):
                values, _ = measured(result, one, public.gallery, modality=data.modality)
                wrong += values[error].tolist()
                told += values["identified"].tolist()
        except GradveilError as refusal:
            found[attack] = {"refused": str(refusal)}
            continue
        found[attack] = _said(wrong) | {"identified": sum(told) / len(told)}
    return found


def _said(values: list[float]) -> dict[str, float]:
    its = interval(values)
    return {"mean": round(its.mean, 5), "low": round(its.low, 5), "high": round(its.high, 5)}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the results as the lines of a table of a page."""
    heads = "model", "trained", "numbers sent", "examples", "labels read", "blind guess", "best attack", "told apart"
    told = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for key, its in found.items():
        data, rest = key.split(", ", 1)
        spec, trains, count = rest.rsplit(", ", 2)
        attacks = {a: v for group in ATTACKS.values() for a in group if (v := its.get(a)) and "mean" in v}
        best = min(attacks, key=lambda a: attacks[a]["mean"])
        labels = "–" if its["labels"] is None else f"{its['labels']:.0%}"
        name = best.partition(":")[0]
        told.append(
            f"| {data}, `{spec}` | {trains} | {its['numbers']:,} | {count} | {labels} | "
            f"{_cell(its['blind'], its['error'])} | {_cell(attacks[best], its['error'])} `{name}` | "
            f"{attacks[best]['identified']:.0%} |"
        )
    return told


def _cell(value: dict[str, float], error: str) -> str:
    form = ".0%" if error == "wrong" else ".4f"
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def main() -> None:
    """Run what is missing."""
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, spec, parts in SCENES:
        for trains in parts:
            for count in EXAMPLES:
                key = f"{name}, {spec}, {trains}, {count}"
                if key not in found:
                    found[key] = scene(name, spec, trains, count)
                    OUT.write_text(json.dumps(found, indent=2) + "\n")
                    print(key, json.dumps(found[key]), flush=True)


if __name__ == "__main__":
    main()
