"""Trap weights: rows that few examples activate, so that many rows show one example each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.analytic import FAINT, agreeing_rows
from gradveil.attacks.base import ATTACKS, Malicious
from gradveil.attacks.planting.rows import GAIN, Architecture, Rows, as_images, not_planted, nothing, prepare, sums
from gradveil.ranges import Between, Part, Positive
from gradveil.types import Batch, Observation, Reconstruction

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

    architecture: Architecture = "kept"
    rows: Rows = 1024  # of the block
    share: Between = 1 / 64  # of the public examples, that activate a row
    scale: Part = 0.95  # of the positive weights beside the negative ones
    gain: Positive = GAIN  # times, that the rows' gradients are made as large as they would be

    def plant(
        self, model: nn.Module, input_shape: tuple[int, ...], num_classes: int, public: Batch | None, rng: Generator
    ) -> nn.Module:
        """Return a copy with trap weights in its first layer, or in a block before it."""
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

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Read the examples off the rows of each update."""
        return [self._one(s) for s in seen]

    def _one(self, seen: Observation) -> Reconstruction:
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
