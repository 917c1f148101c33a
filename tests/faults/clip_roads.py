"""Whole networks whose weights a server chose, on every road by which their records' gradients come about."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.clip_search import Case, Draw, numbers, watched
from gradveil.defenses.veil import Veil
from gradveil.errors import GradveilError
from gradveil.losses import CROSS_ENTROPY
from gradveil.models import build
from gradveil.protection import capture as ways
from gradveil.protection.capture import output_shapes, records_of, records_together
from gradveil.protection.protect import protect
from gradveil.protection.records import Records
from gradveil.tree import parameters
from gradveil.types import Batch

CLASSES, WORDS = 3, 20


class Pooled(nn.Module):
    """A module that gives a sequence, its mean over positions, and a last layer."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out = self.inner(x)
        out = out[0] if isinstance(out, tuple) else out
        return self.last(out.flatten(1, -2).mean(1))  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Attention of a sequence to itself, with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = nn.MultiheadAttention(6, 2, batch_first=True), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence."""
        return self.attention(x, x, x, need_weights=False)[0] * self.scale  # type: ignore[no-any-return]


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


# name: the network and the shape of one record; the words of a text are numbers
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two tokens": (lambda: nn.Sequential(nn.Linear(4, 60), nn.Linear(60, 50), nn.Flatten(), nn.Linear(100, CLASSES)),
                   (2, 4)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 40, 3, 2), nn.Flatten(),
                                  nn.Linear(160, CLASSES)), (1, 7, 7)),
    "grouped cnn": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.GELU(),
                                          nn.Conv2d(8, 30, 3, dilation=2), nn.Flatten(), nn.LazyLinear(CLASSES)),
                    (2, 7, 7)),
    "signal": (lambda: nn.Sequential(nn.Conv1d(3, 30, 3, padding=1, padding_mode="circular"), nn.LayerNorm(4),
                                     nn.Conv1d(30, 40, 2), nn.Flatten(), nn.Linear(120, CLASSES)), (3, 4)),
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.RMSNorm(30), nn.Linear(30, CLASSES)), (20,)),
    "words": (lambda: Pooled(nn.Sequential(nn.Embedding(WORDS, 40, padding_idx=0), nn.Linear(40, 40), nn.ReLU()), 40),
              (5,)),
    "one word": (lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)), ()),
    "lstm": (lambda: Pooled(nn.LSTM(5, 6, batch_first=True), 6), (4, 5)),
    "gru": (lambda: Pooled(nn.GRU(5, 6, batch_first=True, bidirectional=True), 12), (4, 5)),
    "attention": (lambda: Pooled(Attending(), 6), (3, 6)),
    "lenet": (lambda: build("lenet", (1, 16, 16), CLASSES), (1, 16, 16)),
    "vit": (lambda: build("vit_tiny:width=16,depth=1", (3, 8, 8), CLASSES), (3, 8, 8)),
}  # fmt: skip
LARGE = ("lenet", "vit")  # tried less often
CANCELLING = ("two tokens", "two tokens", "cnn", "cnn", "signal")  # tried more often
ROADS = ("layers", "one by one", "in parts", "protect", "stacked")
TYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


def made(name: str, draw: Draw, count: int) -> tuple[nn.Module, Batch]:
    """Return a network with a server's weights, and records."""
    network, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**30, (), generator=draw.rng)))
        model = network()
        if any("word" in part for part in (name,)):
            x = torch.randint(WORDS, (count, *shape), generator=draw.rng)
        else:
            x = numbers(draw, (1, count, *shape), list(range(2, 2 + len(shape))))[0][0].float()
        model(x[:1])  # lazy layers
    if name in CANCELLING and draw.chance(0.7):
        apart = float(draw.power(-12, -3)) if draw.chance(0.3) else 0.0
        cancel(model, float(draw.power(3, 9)), float(draw.power(0, 3)), apart, halves=name == "two tokens")
    else:
        spoil(model, draw)
    y = torch.randint(CLASSES, (count,), generator=draw.rng)
    if draw.chance(0.2):
        x, y = x[:1].expand(x.shape).clone(), y[:1].expand(count).clone()  # one record again and again
    if draw.chance(0.15) and x.is_floating_point():
        climb(model, x, y)
    dtype = draw.of(*TYPES)
    return model.to(dtype), Batch(x.to(dtype) if x.is_floating_point() else x, y)


def cancel(model: nn.Module, bias: float, stretch: float, apart: float = 0.0, *, halves: bool = False) -> None:
    """Write weights that make a layer's inputs large and nearly equal at all positions, and its slopes opposite.

    The first bias is large and the next layer does not see it; of the last layer, columns are others' negatives:
    of the other half, or of their neighbours.
    """
    with torch.no_grad():
        first, then, *_, last = [p for p in model.parameters() if p.ndim > 1 and p.is_floating_point()] * 2
        first.mul_(stretch)
        next(p for name, p in model.named_parameters() if name.endswith("bias") and len(p) == len(first)).add_(bias)
        then.sub_(then.flatten(1).mean(1).view(-1, *[1] * (then.ndim - 1))).div_(stretch)
        opposite(last, apart, halves)


def opposite(weight: Tensor, apart: float, halves: bool) -> None:
    """Make columns of a weight nearly the negatives of others."""
    half = weight.shape[1] // 2
    if halves:
        weight[:, half : 2 * half] = -weight[:, :half] * (1 + apart)
    else:
        weight[:, 1 : 2 * half : 2] = -weight[:, : 2 * half : 2] * (1 + apart)


def spoil(model: nn.Module, draw: Draw) -> None:
    """Write weights as a server may: large biases, columns that cancel, rows nearly alike, any scale."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") and draw.chance(0.4):
                p.add_(float(draw.power(0, 7)))
            if p.ndim > 1 and draw.chance(0.4):
                opposite(p, float(draw.power(-12, 0)), draw.chance(0.5))
            if p.ndim > 1 and draw.chance(0.2):
                p.copy_(p[:1] + p * float(draw.power(-8, -1)))
            if draw.chance(0.3):
                p.mul_(float(draw.power(-8, 8) if draw.chance(0.7) else draw.power(-30, 30)))


def climb(model: nn.Module, x: Tensor, y: Tensor, steps: int = 3) -> None:
    """Change the weights by a few steps that shorten the first record's gradient in the first layer."""
    weights = list(model.parameters())
    for _ in range(steps):
        with torch.enable_grad():
            first, *_ = torch.autograd.grad(F.cross_entropy(model(x[:1]), y[:1]), weights, create_graph=True)
            value = first.square().sum().clamp_min(1e-37).log()
            slopes = torch.autograd.grad(value, weights, allow_unused=True) if value.requires_grad else []
        with torch.no_grad():
            for p, slope in zip(weights, slopes, strict=False):
                if slope is not None and bool(slope.isfinite().all()):
                    p.sub_(0.05 * p.norm() * slope / slope.norm().clamp_min(1e-37))


def records_by(road: str, model: nn.Module, batch: Batch) -> Records:
    """Return the gradients of records by one road."""
    if road == "layers":
        return records_of(model, batch, CROSS_ENTROPY)
    if road == "one by one":
        return ways._one_by_one(model, batch, CROSS_ENTROPY)
    if road == "in parts":
        before, ways.HELD = ways.HELD, 2**12
        try:
            return ways._one_by_one(model, batch, CROSS_ENTROPY)
        finally:
            ways.HELD = before
    if road == "stacked":
        outputs = output_shapes(model, batch, CROSS_ENTROPY)
        if not outputs:
            raise GradveilError("These records are not stacked.")
        weights = {n: torch.stack([w, w * 1.5]) for n, w in parameters(model).items()}
        x, y = (torch.stack([v, v.flip(0)]) for v in (batch.inputs, batch.labels))
        return records_together(model, weights, x, y, CROSS_ENTROPY, outputs)
    model.train()
    with watched() as seen, protect(model, Veil(clip=1.0)):
        F.cross_entropy(model(batch.inputs).float(), batch.labels).backward()
    return seen[-1]


def on_a_road(seed: int) -> Case | None:
    """Return a case of a network; None where it is refused, or has no such road."""
    draw = Draw(seed)
    name: Any = draw.of(*CANCELLING, *[n for n in NETWORKS if n not in LARGE or draw.chance(0.2)])
    road = draw.of(*ROADS)
    model, batch = made(name, draw, draw.of(1, 2, 3, 8))
    try:
        records = records_by(road, model, batch)
    except (GradveilError, NotImplementedError):
        return None
    except RuntimeError as error:
        if "not implemented for" in str(error) or "expected" in str(error):  # types that a layer lacks on a CPU
            return None
        raise
    found = records.square_norms()
    some = float(found.nan_to_num(0, 0, 0).double().clamp_min(0).flatten()[0].sqrt())
    clip = min(max(some * float(draw.power(-4, 1)), 1e-12), 1e9) if draw.chance(0.8) else float(draw.power(-12, 9))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    lead = found.shape if found.ndim > 1 else (1, *found.shape)
    return Case(f"{road}, {dtype}", records, Veil(clip=clip), torch.zeros(lead), f"{name}, clip {clip:.1e}")
