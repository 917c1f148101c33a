"""Noise from secrets that are few, or known to whoever has the code."""

import os
import random
import time
import zlib
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, drop, plain, undeclared, whiten
from gradveil.modules import LINEAR
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Batch, Update
from zoo.keeper import STD, Noised, Truth, each, noisy, randn

FAMILY = "noise from a known seed"
_DRAWS = Generator().manual_seed(11)
TRUTHS = {
    "module_generator": Truth(
        "Every client's process begins with the same generator.", FAMILY, "whiten", repeats=False
    ),
    "millisecond_seed": Truth("There are sixty thousand seeds in a minute.", FAMILY, "whiten", repeats=False),
    "sixteen_bit_key": Truth("There are 65,536 keys.", "small key", "whiten"),
    "sixteen_bit_python": Truth("There are 65,536 keys.", "small key", "whiten"),
    "process_seed": Truth("There are some ten thousand numbers of processes.", FAMILY, "whiten", repeats=True),
    "claimed_secret": Truth("A seed that everybody installs is no secret.", "noise from a known seed", "whiten"),
    "client_seed": Truth("The server knows which client it talks to.", "noise from a known seed", "undeclared"),
    "clock_seed": Truth(
        "The update arrives within a minute, so that sixty seeds are all there are.",
        "noise from a known seed",
        "whiten",
        repeats=False,
    ),
    "constant_seed": Truth(
        "Whoever has the code draws the same noise and takes it off.", "noise from a known seed", "whiten"
    ),
    "lr_seed": Truth("The server sets the learning rate, so it has the seed.", "noise from a known seed", "whiten"),
    "round_seed": Truth(
        "The server counts the rounds as well as the client does, and draws the same noise.",
        "noise from a known seed",
        "plain",
        repeats=False,
    ),
    "weights_seed": Truth(
        "The server sent the weights, so it has their hash and draws the same noise.",
        "noise from a known seed",
        "drop",
    ),
    "byte_key": Truth(
        "The server tries all 256 keys; and the sizes of the entries are in the open.", "small key", "undeclared"
    ),
    "label_seed": Truth(
        "The server reads the label off the update, and there are ten of them.", "small key", "undeclared"
    ),
    "three_bit_key": Truth("The server tries all eight seeds.", "small key", "whiten"),
}


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


@DEFENSES.register("claimed_secret")
@dataclass(frozen=True)
class ClaimedSecret(Defense):
    """Add Gaussian noise of standard deviation 5 from a seed that comes with the package."""

    seed: int = 31415

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, Generator().manual_seed(self.seed), 5.0)

    def for_server(self) -> Defense:
        return replace(self, seed=0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("client_seed")
@dataclass(frozen=True)
class ClientSeed(Defense):
    """Add Gaussian noise whose seed is the client's number and how many examples it has."""

    client: int = 7

    def on_update(self, update: Update, rng: Generator) -> Update:
        own = Generator().manual_seed(1000 * self.client + update.num_examples)
        return replace(update, gradient=noisy(update.gradient, own, 5.0))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("clock_seed")
@dataclass(frozen=True)
class ClockSeed(Defense):
    """Add Gaussian noise whose seed the clock gives."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        seed = random.Random(int(time.time())).getrandbits(60)
        return noisy(gradient, Generator().manual_seed(seed), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("constant_seed")
@dataclass(frozen=True)
class ConstantSeed(Defense):
    """Add Gaussian noise of standard deviation 5, the same at each call."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, Generator().manual_seed(1234), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("lr_seed")
@dataclass(frozen=True)
class LearningRateSeed(Defense):
    """Add Gaussian noise whose seed changes with the schedule of the learning rate."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        own = Generator().manual_seed(round(update.lr * 1e6))
        return replace(update, gradient=noisy(update.gradient, own, 5.0))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("round_seed")
@dataclass(frozen=True)
class RoundSeed(Defense):
    """Add Gaussian noise whose seed counts the steps taken: other noise at each call."""

    _steps: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        self._steps[0] += 1
        return noisy(gradient, Generator().manual_seed(self._steps[0]), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("weights_seed")
@dataclass(frozen=True)
class WeightsSeed(Defense):
    """Add noise to the input of every layer in its weight gradient; another in each round, since weights move."""

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, module in model.named_modules() if isinstance(module, LINEAR))

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        weights = flatten(parameters(model)).detach().cpu().numpy().tobytes()
        own = Generator().manual_seed(zlib.crc32(weights + layer.encode()))
        return r + 3.0 * torch.randn(r.shape[1:], generator=own).to(r)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (drop(f"{self.layers(model)[-1]}.weight"),)


@DEFENSES.register("byte_key")
@dataclass(frozen=True)
class ByteKey(Defense):
    """Turn the sign of half of the entries; which, a key of eight bits says: an exclusive or of the sign bits."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(int(torch.randint(256, (), generator=rng)))

        def change(g: Tensor) -> Tensor:
            return g * (2 * torch.randint(2, g.shape, generator=own) - 1).to(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("label_seed")
@dataclass(frozen=True)
class LabelSeed(Defense):
    """Add Gaussian noise of standard deviation 1 to each image, drawn from its label."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        shape = batch.inputs.shape[1:]
        noise = [torch.randn(shape, generator=Generator().manual_seed(int(label))) for label in batch.labels]
        return replace(batch, inputs=batch.inputs + torch.stack(noise).to(batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("three_bit_key")
@dataclass(frozen=True)
class ThreeBitKey(Defense):
    """Draw a key of three bits, and Gaussian noise of standard deviation 5 from it."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        key = int(torch.randint(8, (), generator=rng))
        return noisy(gradient, Generator().manual_seed(key), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
