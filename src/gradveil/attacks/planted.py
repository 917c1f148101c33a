"""Rows of the server's own making: a fully connected layer in front of any model, or in the place of its first one."""

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from math import inf, prod
from statistics import NormalDist
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init

from gradveil.attacks.analytic import FAINT, agreeing_rows, examples_behind
from gradveil.attacks.base import ATTACKS, AppliesTo, Malicious, check_seen
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.modules import Link, prefix, sequential, trace
from gradveil.ranges import Between, Count, Part, Positive, Range, Whole
from gradveil.types import Batch, Observation, Reconstruction

Architecture = Literal["changed", "kept"]
Rows = Annotated[int, Range(1, 65536)]  # that are planted
GAIN = 1e6  # how many times as large gradients are made: absolute noise is small beside them
BLOCK = "planted"  # the name of what is put in front


@dataclass(frozen=True)
class Planting:
    """A copy of a model with a place for rows: they are linear, a ReLU follows, and ``back`` takes what they give."""

    model: nn.Module
    rows: nn.Linear
    back: nn.Linear
    inputs: Tensor  # (M, L) what public examples are as inputs of the rows

    def level(self, rng: Generator) -> None:
        """Let every row move what follows in the same way: an example has one δ for all rows that it activates."""
        weight = self.back.weight.detach()
        pattern = torch.randn(len(weight), generator=rng, device=rng.device).to(weight)
        weight.copy_((pattern * weight.std() / weight.shape[1] ** 0.5)[:, None].expand_as(weight))

    def amplify(self, gain: float) -> None:
        """Make the rows' gradients so many times as large: the output stays the same, as a ReLU keeps to scale."""
        with torch.no_grad():
            self.rows.weight.div_(gain)
            self.rows.bias.div_(gain)
            self.back.weight.mul_(gain)


def prepare(model: nn.Module, architecture: Architecture, count: int, public: Batch | None, rng: Generator) -> Planting:
    """Return a place for rows: ``count`` in front of the model, or as many as its first layer has."""
    if public is None or len(public) < 2:
        raise AttackError("To plant rows a server needs public examples of the clients' kind; it has none.")
    x = public.inputs.to(next(model.parameters()))
    copied = deepcopy(model)
    if architecture == "kept":
        rows, back = _first_pair(copied)
        with torch.no_grad(), quiet(copied):
            path = next(path for path, module in copied.named_modules() if module is rows)
            return Planting(copied, rows, back, prefix(copied, path)(x))
    planting = _in_front(copied, x, count)
    with torch.no_grad():
        noise = torch.randn(planting.back.weight.shape, generator=rng, device=rng.device).to(x)
        planting.back.weight.copy_(noise * x.std() / count**0.5)
        planting.back.bias.copy_(x.flatten(1).mean(0))
    return planting


def _in_front(model: nn.Module, x: Tensor, count: int) -> Planting:
    """Put a block before the model. The parts of a chain keep their names."""
    shape, size = tuple(x.shape[1:]), prod(x.shape[1:])
    rows, back = (skip_init(nn.Linear, n, m) for n, m in ((size, count), (count, size)))  # which draw nothing
    parts = OrderedDict(flatten=nn.Flatten(), rows=rows, relu=nn.ReLU(), back=back, shape=nn.Unflatten(1, shape))
    children = dict(model.named_children()) if type(model) is nn.Sequential else {"model": model}
    whole = nn.Sequential(OrderedDict({BLOCK: nn.Sequential(parts).to(x), **children}))
    whole.training = model.training
    return Planting(whole, rows, back, x.flatten(1))


def _first_pair(model: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """Return the first layer with weights and the next, where both are fully connected and a ReLU lies between."""
    links: Sequence[Link] = sequential(model) or ()
    start = next((i for i, link in enumerate(links) if link.has_parameters), len(links))
    parts = [link.module for link in links[start : start + 3]]
    if [type(part) for part in parts] == [nn.Linear, nn.ReLU, nn.Linear] and parts[0].bias is not None:
        rows, _, back = parts
        assert isinstance(rows, nn.Linear)
        assert isinstance(back, nn.Linear)
        return rows, back
    raise AttackError(
        f"{type(model).__name__} does not begin with two fully connected layers and a ReLU between them, so no rows "
        f"can be planted in it as it is. Use architecture=changed, which puts a block in front."
    )


@dataclass(frozen=True)
class Sums:
    """What an update shows of a planted layer: for each row Σ δ x and Σ δ over the examples that activate it."""

    path: str
    layer: nn.Linear
    of_inputs: Tensor  # (O, L)
    of_slopes: Tensor  # (O,)


def sums(seen: Observation, attack: str) -> Sums:
    """Read the first fully connected layer of the model that was sent."""
    check_seen([seen], sizes_for=attack)
    dense = trace(seen.model, seen.input_shape).visits[:1]
    path = dense[0].path if dense and isinstance(dense[0].layer, nn.Linear) else ""
    if not path or not {f"{path}.weight", f"{path}.bias"} <= set(seen.visible):
        raise not_planted(attack)
    gradient = seen.as_one_step().update.gradient
    layer = seen.model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return Sums(path, layer, gradient[f"{path}.weight"].double(), gradient[f"{path}.bias"].double())


def not_planted(attack: str) -> AttackError:
    """Return the refusal where the model is not one that the attack made."""
    return AttackError(
        f"{attack} reads what it planted itself, and this model's first layer is not of its making, or is not seen. "
        f"Let the clients train at what its plant() returns."
    )


def as_images(seen: Observation, path: str, values: Tensor) -> Tensor:
    """Return the examples (N, *shape) behind the inputs (N, L) of a layer before which nothing was lost."""
    undone = examples_behind(seen, path, values)
    if undone is None:
        raise AttackError(f"What lies before {path!r} cannot be undone, so its inputs do not show the examples.")
    return undone


def nothing(seen: Observation, details: dict[str, float]) -> Reconstruction:
    """Return the answer where no example took the bait: grey."""
    grey = torch.full((seen.num_examples, *seen.input_shape), sum(seen.bounds) / 2)
    return Reconstruction(grey, seen.labels, inf, False, details)


BELOW = 12.0  # standard deviations under the mean: every example activates the first row of a measurement
SAME = 1e-3  # relative distance of two sums that are of the same examples
EMPTY = 1e-5  # relative to the largest: a bin below it holds rounding, not an example
POINTS = 33  # of the kernel by which the public examples' numbers are smoothed


@ATTACKS.register("imprint")
@dataclass(frozen=True)
class Imprint(Malicious):
    """Plant rows that measure one number of an example and bin it: each bin's gradient is that of the examples in it.

    Rows i and i + 1 of a measurement differ by the examples between their thresholds, so the difference of their weight
    gradients over that of their bias gradients is an example, exactly, where it is alone there (Fowl et al. 2022).
    Thresholds are quantiles of public examples. Several measurements, each a random direction, share the rows: what two
    of them agree on is one example for certain, and is taken off the bins of the others, which may leave another alone.
    Secure aggregation does not stop it: a sum over clients reads like one client. Nor does noise of a fixed size: the
    rows' gradients are made ``gain`` times as large, at the same output.

    With ``clients`` each has rows of its own (after LOKI, Zhao et al. 2024, who do it by convolution kernels): in the
    model that ``client`` is sent no example activates those of the others, so a sum of all updates keeps them apart.
    The answer goes by client, and says how many examples are whose.
    """

    kind = "planted"
    applies_to = (AppliesTo(tier="malicious"),)

    architecture: Architecture = "changed"  # a block in front of the model, or its own first layer
    rows: Rows = 1024  # of the block
    directions: Count = 4  # that are measured
    gain: Positive = GAIN  # times, that the rows' gradients are made as large as they would be
    clients: Count = 1  # that a sum is over, each with a part of the rows
    client: Whole = 0  # that the planted model is for

    def __post_init__(self) -> None:
        if not 1 <= self.directions * self.clients <= self.rows // 2:
            measured = f"directions={self.directions} of clients={self.clients}"
            raise ValueError(f"{measured} must be between 1 and half of rows={self.rows} together")
        if self.client >= self.clients:
            raise ValueError(f"client={self.client} must be below clients={self.clients}")

    def plant(
        self, model: nn.Module, input_shape: tuple[int, ...], num_classes: int, public: Batch | None, rng: Generator
    ) -> nn.Module:
        planting = prepare(model, self.architecture, self.rows, public, rng)
        layer, inputs = planting.rows, planting.inputs.double()
        if layer.out_features < 2 * self.directions * self.clients:
            of = f" of each of {self.clients} clients" if self.clients > 1 else ""
            raise AttackError(
                f"The first layer has {layer.out_features} rows, too few for {self.directions} directions{of}."
            )
        planting.level(rng)
        directions = torch.randn(self.directions, layer.in_features, generator=rng, device=rng.device).to(inputs)
        with torch.no_grad():
            if self.clients > 1:  # rows that nothing activates
                layer.weight.zero_()
                layer.bias.fill_(-1.0)
            for w, part in zip(directions, self._parts(layer)[self.client], strict=True):
                measured = inputs @ w
                unit = w / measured.std().clamp_min(1e-12)
                layer.weight[part] = unit.to(layer.weight)
                layer.bias[part] = -thresholds(inputs @ unit, len(part)).to(layer.bias)
        planting.amplify(self.gain)
        return planting.model

    def _parts(self, layer: nn.Linear) -> list[tuple[Tensor, ...]]:
        """Return the rows of each measurement, by client; a client has as many as any other."""
        each = layer.out_features // self.clients
        rows = torch.arange(each * self.clients if self.clients > 1 else layer.out_features)
        return [own.to(layer.weight.device).tensor_split(self.directions) for own in rows.tensor_split(self.clients)]

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        read = sums(seen, "imprint")
        weight, bias = (p.detach().double() for p in (read.layer.weight, read.layer.bias))
        if len(weight) < 2 * self.directions * self.clients:
            raise not_planted("imprint")
        both = torch.cat([read.of_slopes[:, None], read.of_inputs], 1)  # (O, 1 + L)
        parts = self._parts(read.layer)
        for part in parts[self.client]:
            flat = torch.allclose(weight[part], weight[part[:1]])
            if not flat or bool((bias[part].diff() > 0).any()) or not bool(weight[part].any()):
                raise not_planted("imprint")
        certain, rest = [], []
        for theirs in parts:  # what they measure is the same for all clients
            measurements = []
            for part, like in zip(theirs, parts[self.client], strict=True):
                bins = torch.cat([both[part[:-1]] - both[part[1:]], both[part[-1:]]])
                measurements.append(Measurement(weight[like[0]], -bias[like], bins))
            certain.append(peel(measurements, seen.num_examples))
            rest.append(max((m.left() for m in measurements), key=len))
        owner = torch.cat([torch.full((len(some),), k) for kind in (certain, rest) for k, some in enumerate(kind)])
        owner = owner[: seen.num_examples]
        found = torch.cat([*certain, *rest])[owner.argsort(stable=True).to(both.device)]
        if not len(found):
            return nothing(seen, {"certain": 0.0, "missing": float(seen.num_examples)})
        values = found[:, 1:] / found[:, :1]
        missing = seen.num_examples - len(values)
        values = torch.cat([values, values.mean(0, keepdim=True).expand(missing, -1)])
        inputs = as_images(seen, read.path, values).to(torch.float32).clamp(*seen.bounds)
        details = {"certain": float(min(sum(map(len, certain)), seen.num_examples)), "missing": float(missing)}
        if self.clients > 1:
            details |= {
                f"of client {k}": float(count) for k, count in enumerate(owner.bincount(minlength=self.clients))
            }
        return Reconstruction(inputs, seen.labels, float(missing), missing == 0, details)


@dataclass(frozen=True)
class Measurement:
    """One direction, and the sums of δ (1, x) over the examples of each bin."""

    direction: Tensor  # (L,)
    thresholds: Tensor  # (B,), rising
    bins: Tensor  # (B, 1 + L)

    def filled(self) -> Tensor:
        size = self.bins[:, 0].abs()
        return (size > EMPTY * size.max()).nonzero()[:, 0]

    def left(self) -> Tensor:
        found = self.bins[self.filled()]
        return found[found[:, 0].abs().argsort(descending=True, stable=True)]

    def take_off(self, one: Tensor) -> None:
        place = torch.searchsorted(self.thresholds, one[1:] @ self.direction / one[0]) - 1
        here = self.bins[place.clamp_min(0)]
        rest = here - one
        here.copy_(torch.where(rest.norm() > SAME * one.norm(), rest, torch.zeros_like(rest)))


def peel(measurements: Sequence[Measurement], most: int) -> Tensor:
    """Return the δ (1, x) of the examples that two measurements agree on, and take them off the bins of all."""
    certain = measurements[0].bins[:0]
    while len(certain) < most:
        new = certain[:0]
        for a, b in combinations(measurements, 2):
            ours, theirs = a.bins[a.filled()], b.bins[b.filled()]
            new = torch.cat([new, _others(ours[_among(ours, theirs)], new)])
        new = _others(new, certain)
        if not len(new):
            break
        for one in new:
            for m in measurements:
                m.take_off(one)
        certain = torch.cat([certain, new])
    return certain


def _among(some: Tensor, others: Tensor) -> Tensor:
    """Return which rows of some (n, L) are among the others (m, L), up to rounding."""
    if not len(others):
        return torch.zeros(len(some), dtype=torch.bool, device=some.device)
    near: Tensor = torch.cdist(some, others).amin(1) < SAME * some.norm(dim=1)
    return near


def _others(some: Tensor, known: Tensor) -> Tensor:
    """Return the rows of some that are not known."""
    return some[~_among(some, known)]


def thresholds(measured: Tensor, count: int) -> Tensor:
    """Return quantiles (count,) of numbers (M,), smoothed by a Gaussian kernel; the first lies below everything."""
    std = measured.std()
    kernel = torch.tensor([NormalDist().inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)]).to(measured)
    width = std * len(measured) ** -0.2
    smooth = (measured[:, None] + width * kernel).flatten()
    levels = torch.arange(1, count).to(measured) / count
    return torch.cat([(measured.mean() - BELOW * std)[None], torch.quantile(smooth, levels)])


OUTSIDE = 1e-2  # of the data range, by which a quotient may leave it and still be an example


@ATTACKS.register("trap")
@dataclass(frozen=True)
class Trap(Malicious):
    """Set the first layer to rows of half negative, half positive weights, which few examples activate.

    The positive half is the negative one, mirrored, shuffled and made a little smaller, and the threshold is such that
    a small share of public examples activates a row (Boenisch et al. 2023, who choose it by the scale alone). A row
    that one example of the batch activates shows it exactly as dW / db. Such rows agree with others on the same
    example; quotients that leave the data range are mixtures. The architecture stays as it is, so the first two layers
    must be fully connected with a ReLU between them; elsewhere a block goes in front (``architecture=changed``).
    """

    kind = "planted"
    applies_to = (AppliesTo(tier="malicious"),)

    architecture: Architecture = "kept"
    rows: Rows = 1024  # of the block
    share: Between = 1 / 64  # of the public examples, that activate a row
    scale: Part = 0.95  # of the positive weights beside the negative ones
    gain: Positive = GAIN  # times, that the rows' gradients are made as large as they would be

    def plant(
        self, model: nn.Module, input_shape: tuple[int, ...], num_classes: int, public: Batch | None, rng: Generator
    ) -> nn.Module:
        planting = prepare(model, self.architecture, self.rows, public, rng)
        layer = planting.rows
        count, half = layer.out_features, layer.in_features // 2
        size = torch.randn(count, half, generator=rng, device=rng.device).abs()
        places = torch.rand(count, layer.in_features, generator=rng, device=rng.device).argsort(1)
        weight = torch.zeros(count, layer.in_features, device=rng.device)
        weight.scatter_(1, places[:, :half], -size).scatter_(1, places[:, half : 2 * half], self.scale * size)
        with torch.no_grad():
            layer.weight.copy_(weight.to(layer.weight) * layer.in_features**-0.5)
            layer.bias.copy_(-torch.quantile(planting.inputs @ layer.weight.T, 1 - self.share, dim=0))
        planting.amplify(self.gain)
        return planting.model

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        read = sums(seen, "trap")
        if not is_trap(read.layer.weight.detach(), self.scale):
            raise not_planted("trap")
        told = (read.of_slopes.abs() > FAINT * read.of_slopes.abs().max()).nonzero()[:, 0]
        if not len(told):
            return nothing(seen, {"rows": 0.0})
        of_inputs, of_slopes = read.of_inputs[told], read.of_slopes[told]
        images = as_images(seen, read.path, of_inputs / of_slopes[:, None])
        low, high = seen.bounds
        room = OUTSIDE * (high - low)
        inside = ((images > low - room) & (images < high + room)).flatten(1).all(1)
        if bool(inside.any()):
            of_inputs, of_slopes = of_inputs[inside], of_slopes[inside]
        share = agreeing_rows(of_inputs, of_slopes, seen.num_examples)
        values = share @ of_inputs / (share @ of_slopes)[:, None]
        inputs = as_images(seen, read.path, values).to(torch.float32).clamp(*seen.bounds)
        agreed = int(((share != 0).sum(1) > 1).sum())
        details = {"rows": float(len(told)), "inside": float(inside.sum()), "agreed": float(agreed)}
        return Reconstruction(
            inputs, seen.labels, float(seen.num_examples - agreed), agreed == seen.num_examples, details
        )


def is_trap(weight: Tensor, scale: float) -> bool:
    """Return whether the positive weights of each row (O, L) are its negative ones, mirrored and scaled."""
    half = weight.shape[1] // 2
    ordered = weight.double().sort(1).values
    mirrored = ordered[:, -half:].flip(1)
    return bool(torch.allclose(mirrored, -scale * ordered[:, :half], rtol=1e-3, atol=1e-6 * float(weight.abs().max())))
