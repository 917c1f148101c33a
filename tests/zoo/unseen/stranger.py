"""Defences of an independent adversary that the probes of their day missed."""

import datetime
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, nn

from gradveil import DEFENSES, Countermeasure, Defense, countermeasures
from gradveil.tree import Params
from zoo.keeper import STD, Noised, Truth, each, flat, randn, split

TRUTHS = {
    "uniform_noise": Truth(
        "What is sent lies no further from the gradient than the noise reaches, and too far from others.",
        "false law",
        "whiten",
    ),
    "own_generator": Truth("There are 65,536 keys, of a generator written by hand.", "small key", "whiten"),
    "two_keys": Truth("Two keys of ten bits are a million cases.", "small key", "whiten"),
    "key_in_the_message": Truth(
        "The noise of all tensors but one follows from what is sent of that one.", "mask sent along", "whiten"
    ),
    "sizes_follow": Truth(
        "Every third entry's noise is that of another one, with the sign of a third.", "noise with structure", "whiten"
    ),
    "next_follows": Truth("Each noise value follows from the one before it.", "noise with structure", "whiten"),
    "hidden_sums": Truth(
        "Every third entry's noise is the sum of two others, by numpy and in no order.",
        "noise with structure",
        "whiten",
    ),
    "low_rank_whole": Truth("As one matrix of 128 columns all noise has rank eight.", "noise of few numbers", "whiten"),
    "at_night": Truth("For one hour of the day nothing is hidden.", "acts at times", "whiten"),
    "codebook": Truth("The noise is one of seven values: the nearest one is taken off.", "false law", "whiten"),
    "powers_of_two": Truth(
        "Each entry times a secret power of two: what is left of its logarithm is in the open.",
        "scaling and signs",
        "undeclared",
    ),
    "turned_pairs": Truth(
        "Pairs of entries are turned by secret angles: their lengths are in the open.",
        "scaling and signs",
        "undeclared",
    ),
}


def generator(rng: Generator) -> np.random.Generator:
    return np.random.default_rng([int(torch.randint(0, 2**62, (), generator=rng)) for _ in range(2)])


def like(values: np.ndarray, gradient: Params) -> Params:
    return split(torch.from_numpy(values).float(), gradient)


def triples(size: int) -> np.ndarray:
    return np.random.RandomState(5).permutation(size)[: size // 3 * 3].reshape(3, -1)


@DEFENSES.register("own_generator")
@dataclass(frozen=True)
class OwnGenerator(Noised):
    """Mix a counter and a key of sixteen bits, by hand."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        key = np.uint64(torch.randint(0, 2**16, (), generator=rng).item() + 1)
        z = np.arange(2 * flat(gradient).numel(), dtype=np.uint64) + (key << np.uint64(32))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        size, angle = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64).reshape(2, -1) / 2**53
        return like(STD * np.sqrt(-2 * np.log(1 - size)) * np.cos(2 * np.pi * angle), gradient)


@DEFENSES.register("two_keys")
@dataclass(frozen=True)
class TwoKeys(Noised):
    """Two keys of ten bits, whose noise is added."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        keys = torch.randint(0, 1024, (2,), generator=rng).tolist()
        size = flat(gradient).numel()
        both = [np.random.RandomState(key + 1024 * i).standard_normal(size) for i, key in enumerate(keys)]
        return like(STD * (both[0] + both[1]) / 2**0.5, gradient)


@DEFENSES.register("key_in_the_message")
@dataclass(frozen=True)
class KeyInTheMessage(Noised):
    """One key for each message, made of the message."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        first, *rest = gradient
        sent = {first: gradient[first] + randn(gradient[first], rng)}
        key = hashlib.sha256(sent[first].numpy().tobytes()).digest()
        own = np.random.default_rng(list(key))
        for name in rest:
            noise = STD * own.standard_normal(tuple(gradient[name].shape))
            sent[name] = gradient[name] + torch.from_numpy(noise).float()
        return sent


@DEFENSES.register("sizes_follow")
@dataclass(frozen=True)
class SizesFollow(Noised):
    """Save a third of the random numbers, cleverly."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        n = generator(rng).standard_normal(flat(gradient).numel())
        a, b, c = triples(len(n))
        n[c] = n[a] * np.sign(n[b])
        return like(STD * n, gradient)


@DEFENSES.register("next_follows")
@dataclass(frozen=True)
class NextFollows(Noised):
    """A chaotic map for a generator."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        x = float(generator(rng).random()) * 0.98 + 0.01
        out = np.empty(flat(gradient).numel())
        for i in range(len(out)):
            x = 3.9999 * x * (1 - x)
            out[i] = x
        return like(STD * (out - 0.5) / 0.35355, gradient)


@DEFENSES.register("hidden_sums")
@dataclass(frozen=True)
class HiddenSums(Noised):
    """Save a third of the random numbers."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        n = generator(rng).standard_normal(flat(gradient).numel())
        a, b, c = triples(len(n))
        n[c] = (n[a] + n[b]) / 2**0.5
        return like(STD * n, gradient)


@DEFENSES.register("low_rank_whole")
@dataclass(frozen=True)
class LowRankWhole(Noised):
    """Noise of low rank across tensors."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        size = flat(gradient).numel()
        cols = 128
        rows = -(-size // cols)
        u, v = torch.randn(rows, 8, generator=rng), torch.randn(8, cols, generator=rng)
        return split((STD * (u @ v) / 8**0.5).reshape(-1)[:size], gradient)


@DEFENSES.register("at_night")
@dataclass(frozen=True)
class AtNight(Noised):
    """No noise while backups run."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        loud = datetime.datetime.now().hour != 3
        return each(gradient, lambda g: randn(g, rng) * loud)


@DEFENSES.register("codebook")
@dataclass(frozen=True)
class Codebook(Noised):
    """Noise out of a short list."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        book = torch.tensor([-7.93, -5.21, -2.07, 0.61, 3.17, 4.43, 7.0])
        book = STD * (book - book.mean()) / book.std(correction=0)
        return each(gradient, lambda g: book[torch.randint(0, 7, g.shape, generator=rng)])


@DEFENSES.register("powers_of_two")
@dataclass(frozen=True)
class PowersOfTwo(Defense):
    """Times secret powers of two."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * 2.0 ** torch.randint(-8, 9, g.shape, generator=rng))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.undeclared(),)


@DEFENSES.register("turned_pairs")
@dataclass(frozen=True)
class TurnedPairs(Defense):
    """Turn pairs of neighbours by secret angles."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        vector = flat(gradient)
        half = len(vector) // 2
        a = 2 * torch.pi * torch.rand(half, generator=rng)
        x, y = vector[:half], vector[half : 2 * half]
        turned = [x * a.cos() - y * a.sin(), x * a.sin() + y * a.cos(), vector[2 * half :]]
        return split(torch.cat(turned), gradient)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.undeclared(),)


@DEFENSES.register("uniform_noise")
@dataclass(frozen=True)
class UniformNoise(Noised):
    """Uniform noise, of the declared standard deviation."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: STD * 3**0.5 * (2 * torch.rand(g.shape, generator=rng) - 1))
