"""Numbers are rounded, clipped or cut to their signs."""

from dataclasses import dataclass
from typing import Literal

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain, undeclared, whiten
from gradveil.defenses.compression import Qsgd, Quantise, Sign
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTHS = {
    "eight_bits": Truth("The error is a thousandth of the range: noise that is far too small.", "rounding", "plain"),
    "half_precision": Truth("Eleven bits of each entry arrive.", "rounding", "undeclared"),
    "hard_clip": Truth("Signs and small entries are left, and nothing is random.", "rounding", "whiten"),
    "mean_signs": Truth("Five thousand signs are more than enough for sixty-four pixels.", "rounding", "plain"),
    "random_rounding": Truth(
        "The mean is the gradient, and five thousand rounded entries still tell one image from others.",
        "rounding",
        "undeclared",
    ),
}


@DEFENSES.register("eight_bits")
@dataclass(frozen=True)
class EightBits(Quantise):
    """Round each entry to one of 255 levels of its tensor, and declare that nothing is hidden."""

    bits: int = 8

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("half_precision")
@dataclass(frozen=True)
class HalfPrecision(Defense):
    """Send float16."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.half().to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("hard_clip")
@dataclass(frozen=True)
class HardClip(Defense):
    """Clip each entry to 0.02; the noise that is declared was forgotten."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.clamp(-0.02, 0.02))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 0.1)),)


@DEFENSES.register("mean_signs")
@dataclass(frozen=True)
class MeanSigns(Sign):
    """Send the sign of each entry, times its tensor's mean absolute value, and declare that nothing is hidden."""

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("random_rounding")
@dataclass(frozen=True)
class RandomRounding(Qsgd):
    """Send each entry as its tensor's largest size with its sign, or as zero, so that the mean is right (TernGrad)."""

    levels: int = 1
    norm: Literal["l2", "max"] = "max"

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
