"""What malicious servers get: the share of a batch that imprint, trap and fishing recover, and what stops them.

With ``--breaching`` the imprint and trap blocks of that checkout (github.com/JonasGeiping/breaching, the settings of
its ``malicious-model-rtf`` and ``malicious-model-cah``, with as many rows as ours) stand in front of the same model,
are given the same batches and read out by its own attack, in the same run; without it those rows are left out.
Recovered: a mean squared error under 0.001, pixels in [0, 1].
"""

import argparse
import importlib
import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Generator, nn

from gradveil import tree
from gradveil.attacks.base import Malicious, build
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.federated.client import step_gradient
from gradveil.metrics import measure
from gradveil.models import build as build_model
from gradveil.protection.defense import NoDefense
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import Public, observe
from gradveil.types import Batch, Observation

ROWS = 1024
RECOVERED = 1e-3
DEFENSES = (
    "none", "representation:share=0.4", "pruning:share=0.8", "gaussian:scale=0.01", "gaussian:scale=0.1",
    "each example clipped", "each example clipped, noise",
)  # fmt: skip
CLIP, NOISE = 1.0, 1.0  # of DP-SGD: the largest norm of an example's gradient, and the noise beside it
Row = dict[str, Any]


def rng(*parts: int) -> Generator:
    return torch.Generator().manual_seed(sum(p * 1009**i for i, p in enumerate(parts, 1)))


def network(name: str, shape: tuple[int, ...], width: int = 512) -> nn.Module:
    if name != "mlp":
        return build_model(name, shape, 10)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = torch.Size(shape).numel()
        return nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 10))


def drawn(data: Dataset, count: int, trial: int, distinct: bool = False) -> Batch:
    if not distinct:
        return data.train.sample(count, rng(count, trial))
    order = torch.randperm(len(data.train), generator=rng(count, trial))
    labels = data.train.labels[order]
    return data.train.batch([int(order[(labels == c).nonzero()[0, 0]]) for c in range(count)])


def sent(model: nn.Module, batch: Batch, defense: str, public: Public, labels: bool) -> Observation:
    """Return what the server sees of a client's one step on the batch."""
    clipped = defense.startswith("each")
    seen = observe(model, batch, build_defense("none" if clipped else defense), rng(3), 10, public.prior, None, labels)
    if not clipped:
        return seen
    total = tree.scale(seen.update.gradient, 0.0)
    for i in range(len(batch)):
        own = step_gradient(model, batch[i : i + 1], NoDefense(), rng(3))
        total = tree.add(total, tree.scale(own, min(1.0, CLIP / float(tree.norm(own)))))
    if "noise" in defense:
        drawn = rng(4)
        total = {n: g + NOISE * CLIP * torch.randn(g.shape, generator=drawn) for n, g in total.items()}
    return replace(seen, update=replace(seen.update, gradient=tree.scale(total, 1 / len(batch))))


def ours(spec: str, name: str, data: Dataset, public: Public, count: int, trials: int, **more: Any) -> Row:
    """Attack so many batches under a defence, and say what share of their examples came out."""
    defense, distinct = more.get("defense", "none"), more.get("distinct", False)
    shares, one = [], []
    begun = time.perf_counter()
    for trial in range(trials):
        batch = drawn(data, count, trial, distinct)
        full = spec + (f",target={int(batch.labels[0])}" if spec.startswith("fishing") else "")
        attack = build(full)
        assert isinstance(attack, Malicious)
        planted = attack.plant(network(name, data.input_shape), data.input_shape, 10, public.batch, rng(5, trial))
        found = attack.reconstruct(sent(planted, batch, defense, public, False), rng(6, trial))
        errors = measure(found.inputs, None, batch)[0]["mse"]
        shares.append(float((errors < RECOVERED).float().mean()))
        one.append(float(errors.min() < RECOVERED))
    kind = "distinct classes" if distinct else "any classes"
    row = {"attack": spec, "data": data.name, "model": name, "batch": count, "classes": kind, "defense": defense}
    row |= {"share": sum(shares) / trials, "one": sum(one) / trials, "trials": trials}
    print(json.dumps(row), f"{time.perf_counter() - begun:.1f} s", flush=True)
    return row


class _Settings(dict[str, Any]):
    """A dictionary with attributes, in the place of the configuration files' objects."""

    __getattr__ = dict.__getitem__


def breaching(checkout: Path, kind: str, name: str, data: Dataset, count: int, trials: int) -> Row:
    """Run the block and the attack of the checkout at the same batches.

    Its packages are entered without their ``__init__``, which ask for hydra and data sets. Inputs are normalised, as
    its bins expect, and for trap weights as they are as well; of these, of its two kinds of measurement and of its two
    ways to choose among hits the best is taken.
    """
    for package in ("", ".attacks", ".cases", ".cases.models", ".cases.malicious_modifications"):
        module = sys.modules.setdefault(f"breaching{package}", ModuleType(f"breaching{package}"))
        module.__path__ = [str(checkout / f"breaching{package}".replace(".", "/"))]
    blocks = importlib.import_module("breaching.cases.malicious_modifications.imprint")
    attacks = importlib.import_module("breaching.attacks.analytic_attack")
    x, shape, shares = data.test.batch(slice(0, 2000)).inputs, data.input_shape, {}
    for measured, kept in product(("fourier", "randn") if kind == "imprint" else ("", "raw"), ("weight", "bias")):
        mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
        if measured == "raw":
            mean, std = torch.zeros_like(mean), torch.ones_like(std)
        about = SimpleNamespace(shape=shape, modality="vision", mean=mean.tolist(), std=std.tolist())
        settings = _Settings(
            breach_padding=True, breach_reduction=kept, sort_by_bias=False, normalize_gradients=False,
            text_strategy="no-preprocessing", label_strategy=None,
            impl=_Settings(dtype="float", mixed_precision=False, JIT=None),
        )  # fmt: skip
        shares[measured, kept] = 0.0
        for trial in range(trials):
            batch = drawn(data, count, trial)
            with torch.random.fork_rng():
                torch.manual_seed(trial)
                if kind == "imprint":
                    block = blocks.ImprintBlock(shape, ROWS, connection="linear", gain=1.0, linfunc=measured, mode=32)
                else:
                    block = blocks.CuriousAbandonHonesty(shape, ROWS, 0, 0.5, 0.95, connection="addition")
            model = nn.Sequential(block, network(name, shape))
            inputs = (batch.inputs - mean[:, None, None]) / std[:, None, None]
            loss = nn.functional.cross_entropy(model(inputs), batch.labels)
            gradients = [g.detach() for g in torch.autograd.grad(loss, list(model.parameters()))]
            names = [n for n, _ in model.named_parameters()]
            secret = {"weight_idx": names.index("0.linear0.weight"), "bias_idx": names.index("0.linear0.bias")}
            secrets = {"ImprintBlock": secret | {"shape": shape, "structure": block.structure}}
            attacker = attacks.ImprintAttacker(
                model, nn.CrossEntropyLoss(), settings, {"device": torch.device("cpu"), "dtype": torch.float}
            )
            payload = [{"parameters": list(model.parameters()), "buffers": list(model.buffers()), "metadata": about}]
            known = {"num_data_points": count, "labels": batch.labels, "local_hyperparams": None}
            shared = [{"gradients": gradients, "buffers": None, "metadata": known}]
            found, _ = attacker.reconstruct(payload, shared, secrets)
            images = found["data"].detach() * std[:, None, None] + mean[:, None, None]
            errors = measure(images[:count], None, batch)[0]["mse"]
            shares[measured, kept] += float((errors < RECOVERED).float().mean()) / trials
    row = {"attack": f"breaching: {kind}", "data": data.name, "model": name, "batch": count, "classes": "any classes"}
    row |= {"defense": "none", "share": max(shares.values()), "trials": trials}
    print(json.dumps(row), flush=True)
    return row


def fishing(name: str, data: Dataset, public: Public, trials: int) -> list[Row]:
    """Run the rows of fishing: by size of the batch, then by defence."""
    found: list[Row] = []
    for model, attack in (("mlp", "analytic"), ("lenet", "newton"))[: 2 if name == "digits" else 1]:
        for n, distinct in ((8, True), (8, False), (64, False)):
            spec = f"fishing:attack={attack},examples={1 if distinct else n}"
            found.append(ours(spec, model, data, public, n, 4 * trials, distinct=distinct))
    spec = "fishing:attack=analytic,examples=1,gain=1e6"
    return found + [ours(spec, "mlp", data, public, 8, trials, defense=d, distinct=True) for d in DEFENSES[1:]]


def rows(checkout: Path | None, trials: int, names: list[str], only: str = "") -> list[Row]:
    """Run everything, or one attack."""
    found: list[Row] = []
    for name in names:
        data = load(name)
        public = Public.draw(data, rng(2))
        if only in ("", "fishing"):
            found += fishing(name, data, public, trials)
        if only == "fishing":
            continue
        for model, spec in (
            ("lenet", "imprint"), ("mlp", "imprint:architecture=kept"), ("resnet18:width=16", "imprint"),
        ):  # fmt: skip
            found += [ours(spec, model, data, public, n, trials) for n in (1, 8, 64, 256)]
        for model, spec in (("mlp", "trap"), ("resnet18:width=16", "trap:architecture=changed")):
            found += [ours(spec, model, data, public, n, trials) for n in (1, 8, 64)]
        for defense in DEFENSES[1:]:
            found.append(ours("imprint", "lenet", data, public, 8, trials, defense=defense))
            found.append(ours("trap", "mlp", data, public, 8, trials, defense=defense))
        if checkout is not None:
            for kind in ("imprint", "trap"):
                found += [
                    breaching(checkout, kind, "resnet18:width=16", data, n, trials)
                    for n in (1, 8, 64, 256)[: 4 if kind == "imprint" else 3]
                ]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "malicious.json")
    parser.add_argument("--breaching", type=Path, help="a checkout of github.com/JonasGeiping/breaching")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--data", default="digits,mnist,cifar10")
    parser.add_argument("--only", choices=("", "fishing"), default="", help="run these rows; the others stay")
    args = parser.parse_args(argv)
    found = rows(args.breaching, args.trials, args.data.split(","), args.only)
    if args.only:
        old = json.loads(args.out.read_text())["rows"]
        made = {(row["data"], row["attack"].partition(":")[0]) for row in found}
        found = [row for row in old if (row["data"], row["attack"].partition(":")[0]) not in made] + found
    args.out.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
