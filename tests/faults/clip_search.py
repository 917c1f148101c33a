"""What a server may choose to make one record count for more than the clip: layers, numbers, maps, types and roads.

Each case is some clients (K) at once, and each of them one trial: with all its records, and with one slot at zero.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradveil.defenses.veil import ClipMap, Coordinates, Veil
from gradveil.protection.layers import KINDS, LayerRecord
from gradveil.protection.records import Captured, Held, Records

NUMBERS = 2**17  # of inputs and δ in a case, about


@dataclass(frozen=True)
class Case:
    """Records under a veil."""

    family: str
    records: Records
    veil: Veil
    exact: Tensor  # the square norms (K, N) of the gradients, in float64
    said: str  # what was chosen


class Draw:
    """Choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Generator().manual_seed(seed)

    def of(self, *some: Any) -> Any:
        """Return one of these."""
        return some[int(torch.randint(len(some), (), generator=self.rng))]

    def chance(self, share: float) -> bool:
        """Return true in a share of the cases."""
        return float(torch.rand((), generator=self.rng)) < share

    def power(self, least: float, most: float, *shape: int) -> Tensor:
        """Return powers of ten between two exponents."""
        return 10 ** (least + (most - least) * torch.rand(shape, generator=self.rng, dtype=torch.float64))

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self.rng, dtype=torch.float64)


def ratios(case: Case, slots: Tensor) -> Tensor:
    """Return ||sum with all - sum without one slot|| / C (K,) before the noise; ``slots`` (K,) says which."""
    shape = case.records.shape if isinstance(case.records, Captured) else (case.records.count,)
    present = torch.ones(shape)
    present.view(-1, shape[-1]).scatter_(1, slots[:, None], 0)
    with_it, without = (case.veil.clipped_sum(case.records, p).double() for p in (torch.ones(shape), present))
    moved = (with_it - without).reshape(len(slots), -1)
    return torch.linalg.vector_norm(moved, dim=1).nan_to_num(nan=torch.inf) / case.veil.measured.clip


def worst(case: Case, draw: Draw) -> Tensor:
    """Return the largest ratio of each client, over the record whose norm is the most too small and one by chance."""
    found = case.records.square_norms().double().view_as(case.exact).clamp_min(1e-300)
    others = torch.randint(found.shape[1], (len(found),), generator=draw.rng)
    return torch.maximum(ratios(case, others), ratios(case, (case.exact / found).nan_to_num(-1, -1).argmax(1)))


# --- what layers see, as a server's weights may make it --------------------------------------------------------------


def layer_of(family: str, draw: Draw) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a layer, and the shape of one record's input."""
    of, groups = draw.of, draw.of(1, 1, 2)
    if family == "linear":
        return nn.Linear(of(1, 3, 40, 700), of(1, 5, 60)), ()
    if family == "positions":
        return nn.Linear(of(2, 90, 90, 300), of(2, 70, 70, 150)), (of(2, 2, 3, 16, 40),)
    if family == "convolution":
        one, size = draw.chance(0.3), of(3, 4, 5, 5, 9)
        kind: Any = nn.Conv1d if one else nn.Conv2d
        settings = {"stride": of(1, 2), "padding": of(0, 1), "dilation": of(1, 1, 2), "groups": groups}
        kernel, mode = of(1, 2, 3, 3, 3), of("zeros", "zeros", "reflect", "circular", "replicate")
        layer = kind(of(2, 24, 24), of(4, 32, 32), kernel, **settings, padding_mode=mode, bias=of(True, False))
        return layer, (layer.in_channels, *[max(size, settings["dilation"] * kernel)] * (1 if one else 2))
    if family == "normalisation":
        kind, positions = of("layer", "group", "rms", "instance", "batch"), of(1, 4)
        if kind in ("layer", "rms"):
            return (nn.LayerNorm(12) if kind == "layer" else nn.RMSNorm(12)), (positions, 12)
        dims = of(1, 1, 2, 3)
        instance, batch = getattr(nn, f"InstanceNorm{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        made = {"group": nn.GroupNorm(2, 6), "instance": instance(6, affine=True), "batch": batch(6)}
        return made[kind].eval(), (6, positions + 2, *[2] * (dims - 1))
    return nn.Embedding(of(4, 50), of(1, 6, 30), padding_idx=of(None, 0)), (of(1, 2, 9, 40),)


FAMILIES = ("linear", "positions", "convolution", "normalisation", "embedding")


def numbers(draw: Draw, shape: tuple[int, ...], places: list[int]) -> tuple[Tensor, str]:
    """Return numbers (K, N, ...) of one kind; ``places``: the dimensions of positions."""
    kind = draw.of(
        "plain", "scaled", "scaled records", "level", "level", "level", "pairs", "sparse", "tiny", "alike", "large one"
    )
    values, lead = draw.normal(*shape), (*shape[:2], *[1] * (len(shape) - 2))
    if kind == "scaled":
        values *= draw.power(-30, 30, shape[0], *[1] * (len(shape) - 1))
    if kind == "scaled records":
        values *= draw.power(-12, 12, *lead)
    if kind == "level":
        level = draw.normal(*[1 if d in places else size for d, size in enumerate(shape)])
        values = level + values * draw.power(-9, -1, *lead)
    if kind == "pairs":
        for place in places:
            half = shape[place] // 2
            values.narrow(place, half, half).copy_(values.narrow(place, 0, half) * draw.of(1, -1))
    if kind == "sparse":
        values *= torch.rand(shape, generator=draw.rng) < 0.1
    if kind == "tiny":
        values *= draw.power(-45, -20, *lead)
    if kind == "alike":
        values = values[:, :1].expand(shape).clone()
    if kind == "large one":
        values.view(shape[0], -1)[:, 0] *= draw.power(0, 30, shape[0])
    return values * draw.power(-3, 8, shape[0], *[1] * (len(shape) - 1)), kind


def seen_of(family: str, draw: Draw, count: int) -> tuple[LayerRecord, str]:
    """Return what a layer saw of K clients' records (K, N): inputs and slopes as a server's weights may make them."""
    layer, shape = layer_of(family, draw)
    if isinstance(layer, nn.Linear):
        shape = (*shape, layer.in_features)
    given = torch.zeros(1, *shape, dtype=torch.long if family == "embedding" else torch.float32)
    with torch.no_grad():
        out = tuple(layer(given).shape[1:])
    size = max(int(torch.Size(shape).numel() + torch.Size(out).numel()), layer.weight.numel() // 4)  # type: ignore[operator]
    clients = max(1, min(64, NUMBERS // (count * size)))
    dtype = draw.of(*[torch.float32] * 5, torch.float64)
    spoilt = draw.of(*[lambda v: v] * 4, lambda v: v.bfloat16(), lambda v: v.half())
    channels_last = isinstance(layer, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm))

    def places(of: tuple[int, ...]) -> list[int]:
        return list(range(2, 1 + len(of)) if channels_last else range(3, 2 + len(of)))

    if family == "embedding":
        a, how = torch.randint(layer.num_embeddings, (clients, count, *shape), generator=draw.rng), "numbers"  # type: ignore[call-overload]
        a = a if draw.chance(0.5) else a[..., :1].expand(a.shape).contiguous()
    else:
        values, how = numbers(draw, (clients, count, *shape), places(shape))
        a = spoilt(values).to(dtype)
    delta, slopes = numbers(draw, (clients, count, *out), places(out))
    if places(out) and draw.chance(0.5):
        delta, slopes = delta - delta.mean(places(out), keepdim=True), f"{slopes}, balanced"
    if draw.chance(0.2):
        delta, slopes = climbed(layer, a, delta), f"{slopes}, climbed"
    delta = spoilt(delta).to(dtype)
    for values in (a, delta) if draw.chance(0.1) and family != "embedding" else ():
        values.view(clients, -1)[0, 0] = draw.of(torch.nan, torch.inf)
    return KINDS[type(layer)](layer.to(dtype), "", a, delta), f"{layer} inputs {how}, slopes {slopes}, {count} records"


def climbed(layer: nn.Module, a: Tensor, delta: Tensor, steps: int = 6) -> Tensor:
    """Return slopes of the same length whose gradients are shorter: some steps downhill, by autograd."""
    given, layer = unit(a.double()) if a.is_floating_point() else a, copy.deepcopy(layer).double()
    free = unit(delta)
    for _ in range(steps):
        free = free.detach().requires_grad_()
        with torch.enable_grad():
            own = KINDS[type(layer)](layer, "", given, free).own("weight")
            (slope,) = torch.autograd.grad(lengths(own).log().sum(), free)
        free = unit(free.detach() - 0.3 * unit(slope))
    return free * lengths(delta)


def lengths(values: Tensor) -> Tensor:
    """Return the length of each record's numbers (K, N, 1, ...), and no zero."""
    over = list(range(2, values.ndim))
    return torch.linalg.vector_norm(values, dim=over, keepdim=True).clamp_min(1e-300)


def unit(values: Tensor) -> Tensor:
    """Return each record's numbers at length 1."""
    return values / lengths(values)


def exact_norms(seen: LayerRecord, *names: str) -> Tensor:
    """Return the square norms of what a layer saw in float64, of all its parameters or those named."""
    a = seen.a.double() if seen.a.is_floating_point() else seen.a
    layer = copy.deepcopy(seen.layer).double()
    each = type(seen)(layer, "", a, seen.delta.double())
    return sum((each.own(which).flatten(2).square().sum(2) for which in names or each.trained), torch.zeros(()))


def clip_near(exact: Tensor, draw: Draw) -> float:
    """Return a clip that is somewhat shorter than some record's gradient, or anything."""
    if draw.chance(0.2):
        return float(draw.power(-12, 9))
    some = float(exact.flatten()[int(torch.randint(exact.numel(), (), generator=draw.rng))].nan_to_num(0, 0, 0).sqrt())
    return min(max(some * float(draw.power(-4, 0.5)), 1e-12), 1e9)


def at_layers(seed: int) -> Case:
    """Return a case whose layers' inputs and slopes are chosen freely: a server's weights can make nearly all."""
    draw = Draw(seed)
    family = draw.of(*FAMILIES, "positions", "convolution")
    count = draw.of(1, 2, 3, 8, 8, 17, 64, 64, 300 if draw.chance(0.5) else 1024)
    seen, said = seen_of(family, draw, count)
    like = {name: p.detach() for name, p in seen.layer.named_parameters()}
    records, exact = Captured([seen], like, tuple(seen.delta.shape[:2])), exact_norms(seen)
    clip, map_ = clip_near(exact, draw), None
    if draw.chance(0.25):
        clip, map_ = min(max(clip, 1e-6), 1e6), hostile_map(draw, like)
    veil = Veil(clip=clip, _measured=None if map_ is None else ClipMap(clip, map_))
    return Case(family if map_ is None else f"{family}, mapped", records, veil, exact, f"{said}, clip {clip:.1e}")


def hostile_map(draw: Draw, like: dict[str, Tensor]) -> Coordinates:
    """Return coordinates as a server may send them, in the range that is taken."""
    size = sum(p.numel() for p in like.values())
    rank = min(draw.of(1, 2, 8), size)
    rows = torch.linalg.qr(draw.normal(size, rank)).Q.T
    values = draw.of(torch.ones(rank) * 1e4, draw.power(0, 4, rank))
    return Coordinates(rows.float(), values.float())


def side_by_side(seed: int) -> Case:
    """Return a case whose gradients lie side by side, of any type and scale."""
    draw = Draw(seed)
    count, dtype = draw.of(1, 5, 64, 1024), draw.of(torch.float32, torch.float64, torch.bfloat16, torch.float16)
    each = {}
    for name, shape in (("weight", (draw.of(1, 30), draw.of(7, 300))), ("bias", (draw.of(1, 4),))):
        values, kind = numbers(draw, (1, count, *shape), [])
        each[name] = values[0].to(dtype)
    if draw.chance(0.2):
        each["bias"][0] = draw.of(torch.nan, torch.inf)
    exact = torch.cat([v.double().flatten(1) for v in each.values()], 1).square().sum(1)[None]
    clip = clip_near(exact, draw)
    return Case(f"held, {dtype}", Held(each), Veil(clip=clip), exact, f"{kind} {count} records, clip {clip:.1e}")


@contextmanager
def watched() -> Iterator[list[Records]]:
    """Within, collect the records of which any veil makes a sum."""
    found: list[Records] = []
    plain: Callable[..., Any] = Veil.clipped_sum

    def look(self: Veil, records: Records, present: Tensor | None = None) -> Any:
        found.append(records)
        return plain(self, records, present)

    try:
        Veil.clipped_sum = look  # type: ignore[method-assign, assignment]
        yield found
    finally:
        Veil.clipped_sum = plain  # type: ignore[method-assign]
