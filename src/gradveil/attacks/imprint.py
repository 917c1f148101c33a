"""An imprint layer: rows that all measure one number of an example, with thresholds at its quantiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import ATTACKS, Malicious
from gradveil.attacks.planting.rows import GAIN, Architecture, Rows, as_images, not_planted, nothing, prepare, sums
from gradveil.errors import AttackError
from gradveil.ranges import Count, Positive, Whole
from gradveil.types import Batch, Observation, Reconstruction

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
    of them agree on is one example for certain, and is taken off the bins of the others, which may leave another alone
    there. It reads a sum over clients as it reads one client: secure aggregation does not stop it. Nor does noise of a
    size that the gradient does not limit: the rows' gradients are made ``gain`` times as large, at the same output.

    With ``clients`` each has rows of its own (after LOKI, Zhao et al. 2024, who do it by convolution kernels): in the
    model that ``client`` is sent no example activates those of the others, so a sum of all updates keeps them apart.
    The answer goes by client, and says how many examples are whose.
    """

    kind = "planted"

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
        """Return a copy with the rows in it."""
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

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Read the examples off the rows of each update."""
        return [self._one(s) for s in seen]

    def _parts(self, layer: nn.Linear) -> list[tuple[Tensor, ...]]:
        """Return the rows of each measurement, by client; a client has as many as any other."""
        each = layer.out_features // self.clients
        rows = torch.arange(each * self.clients if self.clients > 1 else layer.out_features)
        return [own.to(layer.weight.device).tensor_split(self.directions) for own in rows.tensor_split(self.clients)]

    def _one(self, seen: Observation) -> Reconstruction:
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
        """Return which bins hold examples."""
        size = self.bins[:, 0].abs()
        return (size > EMPTY * size.max()).nonzero()[:, 0]

    def left(self) -> Tensor:
        """Return the sums of the bins that hold examples, the largest first."""
        found = self.bins[self.filled()]
        return found[found[:, 0].abs().argsort(descending=True, stable=True)]

    def take_off(self, one: Tensor) -> None:
        """Take an example off its bin."""
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
