"""Noise from secrets that are few, or known to whoever has the code: the half kept apart."""

import itertools
import time
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from zoo.keeper import STD, Noised, Truth, each, randn

FAMILY = "noise from a known seed"
TRUTHS = {
    "module_counter": Truth("Every client's process counts from the same number.", FAMILY, "whiten", repeats=False),
    "module_numpy": Truth("Every client's process begins with the same generator.", FAMILY, "whiten", repeats=False),
    "uptime_seed": Truth(
        "A machine's uptime in hundredths of a second can be guessed.", FAMILY, "whiten", repeats=False
    ),
    "date_seed": Truth("The date is known.", FAMILY, "whiten"),
    "sixteen_bit_numpy": Truth("There are 65,536 keys.", "small key", "whiten"),
    "key_of_twenty_bits": Truth("There are a million keys.", "small key", "whiten"),
    "twelve_bit_signs": Truth("There are 4,096 keys.", "small key", "undeclared"),
    "key_by_xor": Truth("The key has nine bits, spread over a seed of sixty.", "small key", "whiten"),
}
_COUNT = itertools.count(1000)
_DRAWS = np.random.default_rng(3)


@DEFENSES.register("module_counter")
@dataclass(frozen=True)
class ModuleCounter(Noised):
    """Seed a generator with the number of calls so far."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(next(_COUNT))
        return each(gradient, lambda g: randn(g, own))


@DEFENSES.register("module_numpy")
@dataclass(frozen=True)
class ModuleNumpy(Noised):
    """Draw from numpy's generator at the head of the file."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: STD * torch.from_numpy(_DRAWS.standard_normal(g.numel())))


@DEFENSES.register("uptime_seed")
@dataclass(frozen=True)
class UptimeSeed(Noised):
    """Seed a generator with the machine's uptime."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(int(time.monotonic() * 100))
        return each(gradient, lambda g: randn(g, own))


@DEFENSES.register("date_seed")
@dataclass(frozen=True)
class DateSeed(Noised):
    """Seed a generator with the date."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(datetime.now().toordinal())
        return each(gradient, lambda g: randn(g, own))


@DEFENSES.register("sixteen_bit_numpy")
@dataclass(frozen=True)
class SixteenBitNumpy(Noised):
    """Draw a secret key of two bytes, and the noise from it by numpy."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = np.random.default_rng(int(torch.randint(2**16, (), generator=rng)))
        return each(gradient, lambda g: STD * torch.from_numpy(own.standard_normal(g.numel())))


@DEFENSES.register("key_of_twenty_bits")
@dataclass(frozen=True)
class KeyOfTwentyBits(Noised):
    """Draw a secret key of twenty bits, and the noise from it."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(int(torch.randint(2**20, (), generator=rng)))
        return each(gradient, lambda g: randn(g, own))


@DEFENSES.register("twelve_bit_signs")
@dataclass(frozen=True)
class TwelveBitSigns(Noised):
    """Turn signs by a key of twelve bits."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(int(torch.randint(2**12, (), generator=rng)))
        return each(gradient, lambda g: g * torch.randn(g.shape, generator=own).sign().to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("key_by_xor")
@dataclass(frozen=True)
class KeyByXor(Noised):
    """Multiply a small key by a large number, so that it looks like a large one."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        key = int(torch.randint(2**9, (), generator=rng))
        own = Generator().manual_seed((key * 0x9E3779B97F4A7C15 ^ 0x5DEECE66D) % 2**60)
        return each(gradient, lambda g: randn(g, own))
