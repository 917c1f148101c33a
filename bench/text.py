"""What `span` gets of text: share of tokens, by batch, defence, local steps and rank of low-rank factors.

    python bench/text.py [part ...]

Every scene is fixed here; each is one client with passages of 32 tokens of Python's manual, drawn with seed 0, at the
weights of a new model of the default size. Parts: batches, defences, steps, lora. Results are added to
bench/results/text.json as they come.
"""

import json
import sys
import time
from pathlib import Path

import torch

from gradveil.attacks.base import build as build_attack
from gradveil.data import load
from gradveil.defenses.base import build as build_defense
from gradveil.errors import AttackError
from gradveil.experiments.scene import fitting_model
from gradveil.experiments.trial import measured, observe
from gradveil.federated.settings import Local

FILE = Path(__file__).parent / "results" / "text.json"
MODELS = {"gpt_tiny": "manual", "bert_tiny": "manual:task=page"}
LR = 0.01
SCENES: dict[str, list[dict[str, object]]] = {
    "batches": [{"examples": n} for n in (1, 4, 16)],
    "defences": [
        {"examples": 4, "defense": d}
        for d in ("gaussian:scale=0.0001", "gaussian:scale=0.01", "pruning:share=0.1", "pruning:share=0.9")
    ],
    "steps": [{"examples": 4, "epochs": n} for n in (2, 4)],
    "lora": [{"examples": n, "lora": rank, "warm": warm} for rank in (4, 16, 64) for warm in (0, 1) for n in (1,)],
}


def run(
    name: str, examples: int, defense: str = "none", epochs: int = 1, lora: int = 0, warm: int = 0
) -> dict[str, object]:
    """Attack one update; ``warm``: steps that low-rank factors were trained for before, on other passages."""
    data = load(MODELS[name])
    loss = data.fitting_loss("cross_entropy")
    model = fitting_model(f"{name}:lora={lora}" if lora else name, data, loss, 0)
    rng = torch.Generator().manual_seed(0)
    batch = data.train.sample(examples, rng)
    local = Local(epochs, None, loss)
    for _ in range(warm):
        other = observe(model, data.test.sample(8, rng), build_defense("none"), rng, 1, lr=LR, local=local)
        with torch.no_grad():
            for key, p in model.named_parameters():
                p -= LR * other.update.gradient.get(key, torch.zeros(()))
    num_classes = data.outputs(loss)
    seen = observe(model, batch, build_defense(defense), rng, num_classes, lr=LR, local=local, modality=data.modality)
    start = time.process_time()
    try:
        found = build_attack("span").reconstruct(seen, rng)
    except AttackError as error:
        return {"refused": str(error)}
    seconds = round(time.process_time() - start, 1)
    values, _ = measured(found, batch, modality=data.modality)
    said = {key: round(float(value.mean()), 4) for key, value in values.items() if not value.isnan().any()}
    return {"tokens": round(1 - said.pop("wrong"), 4), **said, "clear": found.converged, "cpu_seconds": seconds}


def main() -> None:
    """Run the parts named, all by default."""
    for part in sys.argv[1:] or SCENES:
        for scene in SCENES[part]:
            for name in MODELS:
                done = json.loads(FILE.read_text()) if FILE.exists() else {}
                key = ", ".join([name, *(f"{k}={v}" for k, v in scene.items())])
                done.setdefault(part, {})[key] = run(name, **scene)  # type: ignore[arg-type]
                FILE.write_text(json.dumps(done, indent=1) + "\n")
                print(key, done[part][key], flush=True)


if __name__ == "__main__":
    main()
