"""What attacks get of text: share of tokens, by batch, noise, pruning, local steps and rank of low-rank factors.

    python studies/bench/text.py [part ...] [model ...]

Every scene is fixed here. Each is one client with passages of Python's manual at the weights of a new model (seed 0),
drawn ``DRAWS`` times, attacked by a server that takes the update as it is and, with ``span`` under noise, by one that
knows how strong the noise is. Beside each stands the blind guess: the most frequent token of each place among passages
that are no client's. Results are added to studies/bench/results/text.json as they come.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.errors import AttackError
from gradveil.federated.settings import Local
from gradveil.metrics import blind_guesses
from gradveil.protection.defense import Defense
from gradveil.protection.defense import build as build_defense
from gradveil.threats.panel import oblivious
from gradveil.threats.setup import fitting_model
from gradveil.threats.trial import Public, measured, observe
from gradveil.types import Reconstruction

FILE = Path(__file__).parent / "results" / "text.json"
MODELS = {"gpt_tiny": "manual", "bert_tiny": "manual:task=page"}
DRAWS = 2
LR = 0.01
RANKS = (4, 16, 64)
Scene = dict[str, object]
NARROW: Scene = {"width": 256}  # a third of the models' own, in heads of the same size, and a tenth of the time
NOISE: list[Scene] = [{"defense": f"gaussian:scale={s}"} for s in ("1e-5", "1e-4", "1e-3", "1e-2")]
PRUNING: list[Scene] = [{"defense": f"pruning:share={s}"} for s in (0.5, 0.9, 0.99)]
STEPS: list[Scene] = [{"epochs": n} for n in (2, 4, 8)]
TAG: Scene = {"attack": "tag:steps=100"}
SCENES: dict[str, list[Scene]] = {
    "batches": [{"examples": n} for n in (1, 4, 16)],  # of the models' own width
    "noise": [NARROW | scene for scene in NOISE],
    "pruning": [NARROW | scene for scene in PRUNING],
    "steps": [NARROW | scene for scene in STEPS],
    # half as many tokens as the rank, at the first step and at the second; and more tokens than any rank
    "lora": [
        *(NARROW | {"lora": r, "warm": warm, "examples": 1, "length": r // 2} for r in RANKS for warm in (0, 1)),
        *(NARROW | {"lora": r, "warm": 1} for r in RANKS),
    ],
    # more tokens than a model is wide
    "width": [{"width": w} for w in (256, 64)],
    "tag": [scene | TAG for scene in (NARROW, *(NARROW | one for one in (*NOISE, *PRUNING, *STEPS)), {"width": 64})],
    "wide": [*NOISE, *PRUNING, *STEPS],  # of the models' own width
}


def run(name: str, scene: Scene) -> dict[str, object]:
    """Return the share of tokens, and what else is measured, of each draw by each server."""
    rows: dict[str, list[dict[str, float]]] = {}
    for draw in range(DRAWS):
        for server, row in one(name, draw, **scene).items():  # type: ignore[arg-type]
            rows.setdefault(server, []).append(row)
    return {server: _together(its) for server, its in rows.items()}


def one(
    name: str,
    draw: int,
    examples: int = 4,
    length: int = 32,
    defense: str = "none",
    epochs: int = 1,
    lora: int = 0,
    warm: int = 0,
    width: int = 0,
    attack: str = "span",
) -> dict[str, dict[str, float]]:
    """Attack one update; ``warm``: steps that low-rank factors were trained for before, on other passages.

    ``width`` 0: the model's own, with no factors.
    """
    spec = MODELS[name]
    data = load(f"{spec}{',' if ':' in spec else ':'}length={length}")
    loss = data.fitting_loss("cross_entropy")
    settings = f":width={width},heads={width // 64},lora={lora}" if width else ""
    model = fitting_model(name + settings, data, loss, 0)
    rng = torch.Generator().manual_seed(draw)
    public, batch = Public.draw(data, rng, rank=None), data.train.sample(examples, rng)
    local = Local(epochs, None, loss)
    for _ in range(warm):
        _stepped(model, data, local, rng)
    client, outputs = build_defense(defense), data.outputs(loss)
    seen = observe(model, batch, client, rng, outputs, lr=LR, local=local, modality=data.modality)
    guesses = blind_guesses(batch, public.batch, modality=data.modality)
    blind = Reconstruction(guesses[data.modality.guesses[1]], None, 0, True)
    guessed = 1 - float(measured(blind, batch, modality=data.modality)[0]["wrong"].mean())
    rows = {}
    for server in _servers(client, model, defense, attack):
        start = time.process_time()
        try:
            found = build_attack(attack).reconstruct(server.view(seen), rng)
        except AttackError as error:
            print(name, server.name, error)
            found = Reconstruction(torch.zeros_like(batch.inputs), None, 0, False)  # nothing
        seconds = time.process_time() - start
        values, _ = measured(found, batch, modality=data.modality)
        said = {key: float(value.mean()) for key, value in values.items() if not value.isnan().any()}
        said = {"tokens": 1 - said.pop("wrong"), **said}
        rows[server.tier] = said | {"clear": float(found.converged), "blind": guessed, "cpu_seconds": seconds}
    return rows


def _stepped(model: nn.Module, data: Dataset, local: Local, rng: torch.Generator) -> None:
    """Take one step on other passages."""
    other = observe(model, data.test.sample(8, rng), build_defense("none"), rng, 1, lr=LR, local=local)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p -= LR * other.update.gradient.get(key, torch.zeros(()))


def _servers(client: Defense, model: nn.Module, defense: str, attack: str) -> list[Countermeasure]:
    """Return the server that takes the update as it is, and the one that knows of noise."""
    return [oblivious(), *(client.servers(model)[:1] if defense.startswith("gaussian") and attack == "span" else ())]


def _together(rows: list[dict[str, float]]) -> dict[str, object]:
    mean = {key: round(sum(row.get(key, 0.0) for row in rows) / len(rows), 4) for key in rows[0]}
    return mean | {"of_draws": [round(row["tokens"], 4) for row in rows]}


def main() -> None:
    """Run the parts and the models named, all by default."""
    asked = set(sys.argv[1:])
    if unknown := asked - SCENES.keys() - MODELS.keys():
        sys.exit(f"No part and no model is called {', '.join(sorted(unknown))}: {', '.join([*SCENES, *MODELS])}.")
    for part in (part for part in SCENES if part in asked or not asked & SCENES.keys()):
        for scene in SCENES[part]:
            for name in (name for name in MODELS if name in asked or not asked & MODELS.keys()):
                key = ", ".join([name, *(f"{k}={v}" for k, v in scene.items())])
                row = run(name, scene)
                done = json.loads(FILE.read_text()) if FILE.exists() else {}
                done.setdefault(part, {})[key] = row
                FILE.write_text(json.dumps(done, indent=1) + "\n")
                print(key, row, flush=True)


if __name__ == "__main__":
    main()
