"""Attacks on batches of fully connected networks: how many images come back, and in how long.

``spear`` on ReLU networks of six hidden layers of 400 units, untrained and trained for 300 steps; ``cocktail`` on one
hidden layer of 1,024. With ``--public`` the attack of that checkout (github.com/facebookresearch/cocktail_party_attack,
with its settings for Tiny-ImageNet) unmixes the same gradients of CIFAR-10; the truth chooses the sign of its images.
The images are 2,500 of each data set (GRADVEIL_DATA says where they are); with ``--images``, those of a file of images
and labels by name of the data set, ``{"mnist": (x, y)}``, x in 0..255, written by ``torch.save``.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks.base import build
from gradveil.data import load
from gradveil.types import Observation, Update

Row = dict[str, Any]
EXACT, NEAR = 60.0, 20.0  # dB
SPEAR, COCKTAIL = (2, 4, 8, 10, 16, 20, 25), (8, 32, 64, 128, 256)
MODELS: dict[tuple[str, str], nn.Module] = {}
IMAGES: dict[str, tuple[Tensor, Tensor]] = {}


def network(pixels: int, width: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for before in (pixels, *[width] * (hidden - 1)):
        layers += [nn.Linear(before, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def train(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rng = torch.Generator().manual_seed(0)
    for _ in range(300):
        i = torch.randint(500, len(x), (64,), generator=rng)  # the first 500 are attacked
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
    return model.requires_grad_()


def observe(model: nn.Module, x: Tensor, y: Tensor) -> Observation:
    found = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    gradient = dict(zip(dict(model.named_parameters()), found, strict=True))
    return Observation(model, Update(gradient, num_examples=len(x)), tuple(x.shape[1:]), 10)


def decibels(truth: Tensor, found: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image by the nearest of those found."""
    far = torch.cdist(truth.flatten(1).double(), found.to(truth).flatten(1).double()).square() / truth[0].numel()
    return -10 * far.min(1).values.clamp_min(1e-12).log10()


def by_spear(task: tuple[str, str, int, int]) -> Row:
    name, weights, count, turn = task
    x, y = (part[turn * 25 : turn * 25 + count] for part in IMAGES[name])
    start = time.perf_counter()
    found = build("spear").reconstruct(observe(MODELS[name, weights], x, y), torch.Generator().manual_seed(turn))
    seconds = time.perf_counter() - start
    db = decibels(x, found.inputs)
    return {
        "attack": "spear", "data": name, "weights": weights, "examples": count, "turn": turn,
        "exact": float((db > EXACT).float().mean()), "converged": found.converged,
        "least_db": round(float(db.min()), 1), "seconds": round(seconds, 2), "draws": found.details["draws"],
    }  # fmt: skip


def near(attack: str, name: str, truth: Tensor, found: Tensor, seconds: float) -> Row:
    db = decibels(truth, found)
    return {
        "attack": attack, "data": name, "examples": len(truth), "near": round(float((db > NEAR).float().mean()), 3),
        "median_db": round(float(db.median()), 1), "seconds": round(seconds, 1),
    }  # fmt: skip


def gradients(name: str, count: int, device: str) -> tuple[Observation, Tensor, Tensor]:
    x, y = (part[:count].to(device) for part in IMAGES[name])
    return observe(network(x[0].numel(), 1024, 1).to(device), x, y), x, y


def by_cocktail(name: str, count: int, device: str) -> Row:
    seen, x, _ = gradients(name, count, device)
    start = time.perf_counter()
    found = build("cocktail").reconstruct(seen, torch.Generator().manual_seed(0))
    return near("cocktail", name, x, found.inputs, time.perf_counter() - start)


def public_code(folder: Path) -> ModuleType:
    """Load the public attack without what it needs for data sets and logs."""
    shape = {
        "xshape_dict": {"cifar10": [3, 32, 32]},
        "ds_type_dict": {"cifar10": "image"},
        "nclasses_dict": {"cifar10": 10},
    }
    plain = {"ds_mean": {"cifar10": [0.0] * 3}, "ds_std": {"cifar10": [1.0] * 3}}
    data = ModuleType("datasets")
    data.__dict__.update(shape | plain)
    sys.modules["datasets"] = data
    sys.path.insert(0, str(folder))
    module = importlib.import_module("gradient_inversion")
    held: Any = module
    held.exists, held.write_pickle, held.get_attack_exp_path = (lambda _: False), (lambda *_: None), (lambda _: "")
    return module


def by_public(module: Any, count: int, device: str, steps: int) -> Row:
    """Return how near the public attack comes after so many of its steps, each image in the sign that is nearer."""
    seen, x, y = gradients("cifar10", count, device)
    model: Any = seen.model
    model.model_type, model.attack_index = "fc", 0
    args = SimpleNamespace(
        use_labels=False, n_iter=steps, batch_size=count, sigma=0.0, C=1.0, ds="cifar10", tv=3.1, l1=0.0, nv=0.0,
        ne=1.0, T=12.4, decor=1.47, opt="adam", lr=1e-3, sch="none",
    )  # fmt: skip
    start = time.perf_counter()
    attack = module.CocktailPartyAttack(model, list(seen.update.gradient.values()), y, args, 0)
    for _ in range(steps):
        attack.step()
    found = attack.get_rec()
    row = near("public", "cifar10", x, torch.cat([found, 1 - found]), time.perf_counter() - start)
    return row | {"steps": steps}


def read(path: Path | None) -> None:
    if path is not None:
        IMAGES.update({name: (x.float() / 255, y) for name, (x, y) in torch.load(path, weights_only=True).items()})  # noqa: TID251
        return
    for name in ("mnist", "cifar10", "digits"):
        batch = load(name).train.sample(2500, torch.Generator().manual_seed(0))
        IMAGES[name] = ((255 * batch.inputs).round() / 255, batch.labels)


def prepare(path: Path | None, wanted: set[tuple[str, str]]) -> None:
    """Make the networks of a worker; in each, since what has run backwards must not be forked."""
    torch.set_num_threads(1)
    read(path)
    for name, weights in wanted:
        x, y = IMAGES[name]
        model = network(x[0].numel(), 400, 6)
        MODELS[name, weights] = train(model, x, y) if weights == "trained" else model


def run(args: argparse.Namespace) -> list[Row]:
    begun, rows = time.perf_counter(), []

    def left() -> float:
        return float(args.seconds - (time.perf_counter() - begun))

    read(args.images)
    tasks = [(n, w, b, t) for b in SPEAR for t in range(args.turns) for n in IMAGES for w in ("untrained", "trained")]
    tasks = [task for task in tasks if fnmatch("spear/{}/{}/{}/{}".format(*task), args.only)]
    wanted = {(name, weights) for name, weights, _, _ in tasks}
    with multiprocessing.get_context("fork").Pool(args.workers, prepare, (args.images, wanted)) as pool:
        pending = [pool.apply_async(by_spear, (task,)) for task in tasks]
        mixed = [
            (name, b) for b in COCKTAIL for name in ("mnist", "cifar10") if fnmatch(f"cocktail/{name}/{b}", args.only)
        ]
        rows += [by_cocktail(name, b, args.device) for name, b in mixed if left() > 0]
        if args.public is not None:
            public = public_code(args.public)
            rows += [by_public(public, b, args.device, args.steps) for b in (32, 8, 64, 128) if left() > 20]
        for result in pending:
            with contextlib.suppress(multiprocessing.TimeoutError):
                rows.append(result.get(max(0.1, left())))
        pool.terminate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--public", type=Path)
    parser.add_argument("--steps", type=int, default=25000, help="of the public attack")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing new is begun")
    parser.add_argument("--only", default="*", help="e.g. spear/cifar10/trained/16/1, the last one the turn; * is any")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = run(args)
    for row in rows:
        print(row)
    if args.out is not None:
        args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
