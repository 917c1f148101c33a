"""How often honest ones are accused: weights that were trained, by ``check_model``; sound noise, by the probes.

``weights``: every network of gradveil untrained, and rounds of federated training on digits, each held against the
round before, the architecture and 16 own examples. ``noise``: defences with independent noise of a declared law, plain
and composed, on digits and a linear model, every fourth time on LeNet too. ``audits``: every sound defence of the zoo,
audited on a linear model, five images, by newton. Nothing new is begun after ``--seconds``.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil.auditing.audit import audit
from gradveil.auditing.incoming import check_model
from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.federated.settings import Local, Training
from gradveil.federated.simulate import simulate
from gradveil.models import MODELS, build, build_working
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.probes import probe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from zoo.keeper import FIRST, is_right, names, opened

Row = dict[str, Any]
SHAPE, CLASSES, OWN = (1, 8, 8), 10, 16
RELU = "lenet:activation=relu,init=kaiming"
TRAININGS: tuple[tuple[str, Row], ...] = (
    ("mlp", {"lr": 0.2}), ("mlp", {"lr": 0.1, "momentum": 0.9}), ("mlp", {"lr": 0.01, "optimizer": "adam"}),
    ("logistic:init=zeros", {"lr": 0.5}), ("logistic", {"lr": 0.01, "optimizer": "adam"}),
    ("lenet:strides=2/1", {"lr": 0.3}), (RELU, {"lr": 0.2}), (RELU, {"lr": 0.01, "optimizer": "adam"}),
    ("vit_tiny:depth=1", {"lr": 0.03}), ("vit_tiny:depth=1", {"lr": 0.003, "optimizer": "adam"}),
    ("leaknet:padding=2", {"lr": 0.1, "momentum": 0.9}), ("resnet18:width=4", {"lr": 0.03, "momentum": 0.9}),
)  # fmt: skip
SOUND = (
    "gaussian:scale=0.1", "laplace:scale=0.1", "gaussian:scale=2,relative=true,per=tensor",
    "laplace:scale=1,relative=true", "laplace:scale=0.05,on=weights", "gaussian:scale=0.1+pruning:share=0.8",
    "pruning:share=0.5+laplace:scale=0.3", "random_mask+laplace:scale=0.2",
)  # fmt: skip


def network(name: str, seed: int) -> nn.Module:
    if name != "mlp":
        return build(name, SHAPE, CLASSES, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        return nn.Sequential(nn.Flatten(), *layers)


def untrained(seeds: int) -> Iterator[Row]:
    """Check every network as it is made, for images of 32x32 in colour."""
    for name, seed in product((name for name, builder in MODELS if builder.takes == "image"), range(seeds)):
        found = check_model(dict((model := build(name, (3, 32, 32), CLASSES, seed)).state_dict()), model=model)
        yield {"of": "untrained", "name": name, "seed": seed, "findings": [f.text for f in found.findings]}


def trained(seeds: int) -> Iterator[Row]:
    """Check the weights of each of four rounds of honest training."""
    data = load("digits")
    own = data.train.batch(range(OWN))
    for seed in range(seeds):
        for name, settings in TRAININGS:
            model, drawn = network(name, seed), Seeds(seed)
            clients = partition(data.train.labels, "iid:devices=10", drawn("partition"))
            training = Training(rounds=4, clients=3, batch_size=8, epochs=2, **settings)
            before = {n: v.clone() for n, v in model.state_dict().items()}
            for after in simulate(model, data, clients, training, "none", drawn):
                now = {n: v.clone() for n, v in after.model.state_dict().items()}
                found = check_model(before, now, model=after.model, batch=own)
                about = {"of": "round", "name": name, "settings": settings, "seed": seed, "round": after.number}
                yield about | {"findings": [f.text for f in found.findings]}
                before = now


def sound(seeds: int) -> Iterator[Row]:
    """Probe defences with independent noise; an error, a server or a doubt is a false alarm."""
    data = load("digits")
    models = [build_working(name, SHAPE, CLASSES, 0).train() for name in ("logistic", "lenet:strides=2/1")]
    public = data.test.sample(300, torch.Generator().manual_seed(0))
    zoo = [name for name in names("sound") if not name.startswith("dp_")]
    with opened(*zoo):
        for seed, spec in product(range(seeds), (*SOUND, *zoo)):
            for model in models if seed % 4 == 0 else models[:1]:
                examples = 1 + seed % 2
                found = probe(build_defense(spec), model, public, examples, Local(batch_size=1), 0.3, Seeds(seed), 10)
                said = [*found.errors, *(server.name for server in found.servers if spec in SOUND)]
                said += [] if found.assessed or spec in zoo else ["not assessed"]
                about = {"of": "noise", "name": spec, "model": type(model).__name__, "seed": seed, "examples": examples}
                yield about | {"findings": said}


def audits(seeds: int) -> Iterator[Row]:
    """Audit all sound defences of the zoo, with other seeds than rules were written on; any accusation is an alarm."""
    for config in (replace(FIRST, model="logistic", seed=100 + seed) for seed in range(seeds)):
        with opened(*names("sound")) as kept, tempfile.TemporaryDirectory() as scratch:
            found = audit(defenses=list(kept), config=config, out=Path(scratch) / "audit").verdicts
        for one in (one for one in found if one.defense in kept):
            said = [] if is_right(kept[one.defense], one) else [one.outcome, *one.errors]
            yield {"of": "audit", "name": one.defense, "seed": config.seed, "outcome": one.outcome, "findings": said}


def main() -> None:
    parts: dict[str, tuple[Callable[[int], Iterator[Row]], ...]]
    parts = {"weights": (untrained, trained), "noise": (sound,), "audits": (audits,)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts, nargs="?", help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="of networks and trainings; 16 times as many of noise")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, help="a file of JSON lines, one for each check")
    options = parser.parse_args()
    end, rows = time.monotonic() + options.seconds, []
    for name in [options.part] if options.part else parts:
        for part in parts[name]:
            checks = part(options.seeds * (16 if name == "noise" else 1))
            found = list(takewhile(lambda _: time.monotonic() < end, checks))
            alarms = [row for row in found if row["findings"]]
            print(f"{part.__name__}: {len(alarms)} alarms in {len(found)} checks", *alarms, sep="\n", flush=True)
            rows += found
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
