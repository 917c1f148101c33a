"""Strong noise in the numbers, and the gradient beside them: the half kept apart."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params, map_values
from gradveil.types import Update
from zoo.keeper import Noised, Truth, each, flat, randn

FAMILY = "beside the numbers"
TRUTHS = {
    "masked_bits": Truth("The lower bits are the gradient's, under a mask that stands in the code.", FAMILY, "whiten"),
    "long_storage": Truth("The tensors are the front halves of longer ones.", FAMILY, "whiten"),
    "more_tensors": Truth("The gradient is sent under other names.", FAMILY, "whiten"),
    "odd_learning_rate": Truth("The learning rate that is sent holds the first weights' gradient.", FAMILY, "whiten"),
    "raises_at_times": Truth("It ends with an error on some; the others are sent as they are.", "crashes", "plain"),
}


class _OnUpdate(Noised):
    """Acts on nothing but the update."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        """Change nothing."""
        return gradient


@DEFENSES.register("masked_bits")
@dataclass(frozen=True)
class MaskedBits(Noised):
    """Write the gradient into the lower bits of the noise, under a public mask."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def hidden(g: Tensor) -> Tensor:
            noisy = (g.detach().float() + randn(g, rng)).contiguous().view(torch.int32)
            mask = torch.randint(2**16, g.shape, generator=Generator().manual_seed(1), dtype=torch.int32)
            low = ((g.detach().float().contiguous().view(torch.int32) >> 16) & 0xFFFF) ^ mask
            return ((noisy & -0x10000) | low).view(torch.float32)

        return each(gradient, hidden)


@DEFENSES.register("long_storage")
@dataclass(frozen=True)
class LongStorage(_OnUpdate):
    """Send views of storage that goes on behind them."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        def longer(g: Tensor) -> Tensor:
            both = torch.cat([(g + randn(g, rng)).flatten(), g.flatten()])
            return both[: g.numel()].view(g.shape)

        return replace(update, gradient=map_values(longer, update.gradient))


@DEFENSES.register("more_tensors")
@dataclass(frozen=True)
class MoreTensors(_OnUpdate):
    """Send more tensors than the model has."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        noisy = map_values(lambda g: g + randn(g, rng), update.gradient)
        return replace(update, gradient=noisy | {f"{n}.true": g for n, g in update.gradient.items()})


@DEFENSES.register("odd_learning_rate")
@dataclass(frozen=True)
class OddLearningRate(_OnUpdate):
    """Send a learning rate whose digits say more than it should."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        noisy = map_values(lambda g: g + randn(g, rng), update.gradient)
        return replace(update, gradient=noisy, lr=update.lr * (1 + 1e-4 * float(flat(update.gradient)[0])))


@DEFENSES.register("raises_at_times")
@dataclass(frozen=True)
class RaisesAtTimes(Noised):
    """Fail on gradients of a norm above 2, and change nothing else."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        if float(flat(gradient).norm()) > 2:
            raise KeyError("no entry for gradients as large as this")
        return gradient

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
