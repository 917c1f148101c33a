"""Noise that is loud in each entry and leaves combinations of entries alone: the half kept apart."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from zoo.keeper import STD, Noised, Truth, each, flat, randn, split

FAMILY = "noise with structure"
TRUTHS = {
    "negated_half": Truth("The second half of all noise is the first, with its sign turned.", FAMILY, "whiten"),
    "orthogonal_whole": Truth("The noise has no part along the whole gradient.", FAMILY, "whiten"),
    "centred_rows": Truth("The sum of a row is free of noise.", FAMILY, "whiten"),
    "centred_laplace": Truth("The sum of a column is free of noise, which is Laplace's.", FAMILY, "whiten"),
    "shifted_lattice": Truth("The noise is a half more than a multiple of 4.", FAMILY, "whiten"),
    "quiet_rows": Truth("Two rows in three carry a thousandth of the noise, others each time.", FAMILY, "whiten"),
    "rows_and_columns": Truth("A number a row and a number a column, added.", FAMILY, "whiten"),
    "nearly_twins": Truth("Two entries share each noise value but for a thousandth.", FAMILY, "whiten"),
    "sums_of_two": Truth("Every third entry's noise is the sum of that of the two before.", FAMILY, "whiten"),
    "along_weights": Truth("The noise has no part in directions that the weights give.", FAMILY, "whiten"),
    "large_entries_spared": Truth("The largest tenth of the entries is sent as it is.", FAMILY, "whiten"),
    "mostly_public": Truth(
        "Nearly all of the noise comes from a seed in the code.", "noise from a known seed", "whiten"
    ),
}


@DEFENSES.register("negated_half")
@dataclass(frozen=True)
class NegatedHalf(Noised):
    """Use the noise of the first layers for the last ones, negated."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        size = flat(gradient).numel()
        half = STD * torch.randn(-(-size // 2), generator=rng)
        return split(torch.cat([half, -half])[:size], gradient)


@DEFENSES.register("orthogonal_whole")
@dataclass(frozen=True)
class OrthogonalWhole(Noised):
    """Take the part along the gradient off the noise, all tensors together."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        g = flat(gradient)
        drawn = randn(g, rng)
        return split(drawn - (drawn @ g) / (g @ g).clamp_min(1e-30) * g, gradient)


@DEFENSES.register("centred_rows")
@dataclass(frozen=True)
class CentredRows(Noised):
    """Take the mean of each row off the noise."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def centred(g: Tensor) -> Tensor:
            rows = randn(g, rng).reshape(len(g), -1) if g.ndim > 1 else randn(g, rng)[None]
            return rows - rows.mean(1, keepdim=True)

        return each(gradient, centred)


@DEFENSES.register("centred_laplace")
@dataclass(frozen=True)
class CentredLaplace(Noised):
    """Take the mean of each column off Laplace noise that numpy draws."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        drawn = np.random.default_rng(int(torch.randint(2**62, (), generator=rng)))

        def centred(g: Tensor) -> Tensor:
            rows = torch.from_numpy(drawn.laplace(scale=STD / 2**0.5, size=(len(g), g.numel() // len(g))))
            return rows - rows.mean(0)

        return each(gradient, centred)


@DEFENSES.register("shifted_lattice")
@dataclass(frozen=True)
class ShiftedLattice(Noised):
    """Add noise on a grid that does not hold zero."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: 4.0 * (10 * randn(g, rng) / 4.0).floor() + 2.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 10 * STD)),)


@DEFENSES.register("quiet_rows")
@dataclass(frozen=True)
class QuietRows(Noised):
    """Add loud noise to one row in three."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def mixed(g: Tensor) -> Tensor:
            loud = torch.rand(len(g), *[1] * (g.ndim - 1), generator=rng) < 1 / 3
            return randn(g, rng) * torch.where(loud, 3**0.5, 1e-3)

        return each(gradient, mixed)


@DEFENSES.register("rows_and_columns")
@dataclass(frozen=True)
class RowsAndColumns(Noised):
    """Add a number to each row and one to each column; to a bias, noise of the usual kind."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def crossed(g: Tensor) -> Tensor:
            rows, columns = len(g), g.numel() // len(g)
            scale = STD / 2**0.5
            return scale * (torch.randn(rows, 1, generator=rng) + torch.randn(1, columns, generator=rng))

        return each(gradient, crossed)


@DEFENSES.register("nearly_twins")
@dataclass(frozen=True)
class NearlyTwins(Noised):
    """Use each noise value twice, and add a little to each."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def twice(g: Tensor) -> Tensor:
            half = STD * torch.randn(-(-g.numel() // 2), generator=rng)
            return half.repeat(2)[: g.numel()] + 1e-3 * randn(g.flatten(), rng)

        return each(gradient, twice)


@DEFENSES.register("sums_of_two")
@dataclass(frozen=True)
class SumsOfTwo(Noised):
    """Draw two values in three."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def summed(g: Tensor) -> Tensor:
            pairs = 0.87 * STD * torch.randn(-(-g.numel() // 3), 2, generator=rng)
            return torch.cat([pairs, pairs.sum(1, keepdim=True)], 1).flatten()[: g.numel()]

        return each(gradient, summed)


@DEFENSES.register("along_weights")
@dataclass(frozen=True)
class AlongWeights(Noised):
    """Keep the noise off directions that a hash of each tensor's shape gives, half as many as it has rows."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def off(g: Tensor) -> Tensor:
            drawn = randn(g, rng).reshape(len(g), -1)
            count = min(drawn.shape) // 2
            public = torch.randn(drawn.shape[1], count, generator=Generator().manual_seed(sum(g.shape)))
            basis = torch.linalg.qr(public)[0]
            return drawn - (drawn @ basis) @ basis.T

        return each(gradient, off)


@DEFENSES.register("large_entries_spared")
@dataclass(frozen=True)
class LargeEntriesSpared(Noised):
    """Add noise to nine entries in ten: the large ones are few, and matter."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: randn(g, rng) * (g.abs() <= g.abs().flatten().quantile(0.9)))


@DEFENSES.register("mostly_public")
@dataclass(frozen=True)
class MostlyPublic(Noised):
    """Add public noise, and secret noise of a hundredth."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(99)
        return each(gradient, lambda g: randn(g, own) + 0.01 * randn(g, rng))
