"""Noise from secrets that are few, or known to whoever has the code."""

import os
import random
import time
from dataclasses import dataclass

import torch
from torch import Generator

from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from zoo.keeper import STD, Noised, Truth, each, randn

FAMILY = "noise from a known seed"
TRUTHS = {
    "module_generator": Truth(
        "Every client's process begins with the same generator.", FAMILY, "whiten", repeats=False
    ),
    "millisecond_seed": Truth("There are sixty thousand seeds in a minute.", FAMILY, "whiten", repeats=False),
    "sixteen_bit_key": Truth("There are 65,536 keys.", "small key", "whiten"),
    "sixteen_bit_python": Truth("There are 65,536 keys.", "small key", "whiten"),
    "process_seed": Truth("There are some ten thousand numbers of processes.", FAMILY, "whiten", repeats=True),
}
_DRAWS = Generator().manual_seed(11)


@DEFENSES.register("module_generator")
@dataclass(frozen=True)
class ModuleGenerator(Noised):
    """Draw from a generator that stands at the head of the file."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: randn(g, _DRAWS))


@DEFENSES.register("millisecond_seed")
@dataclass(frozen=True)
class MillisecondSeed(Noised):
    """Seed a generator with the time in milliseconds."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(time.time_ns() // 1_000_000)
        return each(gradient, lambda g: randn(g, own))


@DEFENSES.register("sixteen_bit_key")
@dataclass(frozen=True)
class SixteenBitKey(Noised):
    """Draw a secret key of two bytes, and the noise from it."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(int(torch.randint(2**16, (), generator=rng)))
        return each(gradient, lambda g: randn(g, own))


@DEFENSES.register("sixteen_bit_python")
@dataclass(frozen=True)
class SixteenBitPython(Noised):
    """Draw a secret key of two bytes, and the noise from it by Python's random."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = random.Random(int(torch.randint(2**16, (), generator=rng)))
        return each(gradient, lambda g: torch.tensor([own.gauss(0, STD) for _ in range(g.numel())]))


@DEFENSES.register("process_seed")
@dataclass(frozen=True)
class ProcessSeed(Noised):
    """Seed a generator with the number of the process."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(os.getpid())
        return each(gradient, lambda g: randn(g, own))
