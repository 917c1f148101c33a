"""Learned attacks beside the others, on the same updates: one row per defence and attack.

python studies/bench/learned_attacks.py --dataset mnist --images 32 --device cuda --out mnist.json

Of other attacks than ``inverter`` every view that the defence declares is tried and the one with the least error is
shown, in their favour: the truth chooses. Rows are written as they come.
"""

import argparse
import copy
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Generator, nn

from gradveil import pace
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.data import load
from gradveil.errors import GradveilError
from gradveil.models import build as build_model
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.trial import Public, floors, measured, observe
from gradveil.tree import Params
from gradveil.types import Batch, Observation

DEFENSES_TRIED = ["none", "gaussian:scale=0.1", "gaussian:scale=0.3", "pruning:share=0.99", "signs", "two_bits"]


@DEFENSES.register("signs")
@dataclass(frozen=True)
class Signs(Defense):
    """Send the sign of each entry (signSGD)."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return {n: g.sign() for n, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("two_bits")
@dataclass(frozen=True)
class TwoBits(Defense):
    """Round each tensor to -1, 0 and 1 times its largest entry."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        most = {n: g.abs().max().clamp_min(1e-12) for n, g in gradient.items()}
        return {n: (g / most[n]).round() * most[n] for n, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--defenses", nargs="+", default=DEFENSES_TRIED)
    parser.add_argument("--attacks", nargs="+", default=["newton", "inverter"])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, for one attack on one defence")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    seeds, dataset, device = Seeds(args.seed), load(args.dataset), torch.device(args.device)
    public = Public.draw(dataset, seeds("public"))
    known = replace(public.to(device), batch=public.batch.to(device))
    truth = dataset.train.sample(args.images, seeds("victims"))
    model = build_model(args.model, dataset.input_shape, dataset.num_classes, args.seed).to(device)
    guesses: dict[str, list[float]] = {}
    for row in floors(truth, public)[0]:
        guesses.setdefault(row["guess"], []).append(row["mse"])
    rows = [{"dataset": args.dataset, "attack": g, "mse": sum(v) / len(v)} for g, v in guesses.items()]
    for row in rows:
        print(row, flush=True)
    for spec in args.defenses:
        defense = build_defense(spec)
        seen = _observed(model, truth, known, defense, seeds, dataset.num_classes)
        for attack in args.attacks:
            row = _best(attack, defense, seen, truth, public, seeds, args.seconds)
            rows.append({"dataset": args.dataset, "defense": spec, "attack": attack, **row})
            print(rows[-1], flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))


def _shown(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(r[name] for r in rows) / len(rows) for name in ("mse", "ssim", "identified")}


def _observed(
    model: nn.Module, truth: Batch, public: Public, defense: Defense, seeds: Seeds, classes: int
) -> list[Observation]:
    device = next(model.parameters()).device

    def client(batch: Batch, rng: Generator) -> Params:
        return observe(model, batch, copy.deepcopy(defense), rng, classes).update.gradient

    out = []
    for i in range(len(truth)):
        seen = observe(model, truth[i : i + 1].to(device), defense, seeds("client", i), classes, public.prior)
        out.append(replace(seen, client=client, public=public.batch))
    return out


def _best(
    attack: str, defense: Defense, seen: list[Observation], truth: Batch, public: Public, seeds: Seeds, seconds: float
) -> dict[str, float | str]:
    """Return the means of the view with the least error, and the seconds of that view."""
    best: dict[str, float | str] = {"mse": math.inf}
    servers = defense.servers(seen[0].model)
    for server in servers if not attack.startswith("inverter") else (plain(),):
        began, cpu = time.perf_counter(), time.process_time()
        try:
            with pace.Limit(seconds):
                found = build_attack(attack).reconstruct_many(
                    [server.view(s) for s in seen], [seeds("attack", i) for i in range(len(seen))]
                )
        except GradveilError as error:
            print(attack, server.name, error)
            continue
        rows = [measured(r, truth[i : i + 1], public.gallery)[0] for i, r in enumerate(found)]
        shown = _shown([{n: float(v) for n, v in row.items()} for row in rows])
        if shown["mse"] < float(best["mse"]):
            own = sum(r.objective for r in found) / len(found)
            best = {"server": server.name, **shown, "objective": own, "seconds": time.perf_counter() - began}
            best |= {"cpu": time.process_time() - cpu}
    return best


if __name__ == "__main__":
    main()
