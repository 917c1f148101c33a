"""Noise on what is sent. It clips nothing and gives no differential privacy: it is named for what it is."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.privacy.noise import Drawn, Source, grid_of, is_secret, laplace, normal, release
from gradveil.protection.defense import DEFENSES, Defense, Place
from gradveil.ranges import Weight
from gradveil.tree import Params, flatten, size
from gradveil.types import Observation, Update


@dataclass(frozen=True)
class Noise(Defense):
    """Add independent zero-mean noise of a given standard deviation; a subclass draws it.

    ``scale`` is always the standard deviation (Sun et al. 2020 call it the variance in one place). Where the noise
    goes decides what it does: on the gradient of each local step, on the update in units of the gradient,
    (W_before - W_after) / lr, or on the weights that are sent, which is 1/lr times as much of the update.
    """

    draws_on_device: ClassVar[bool] = True

    scale: Weight = 0.01  # standard deviation; with relative=true in units of the RMS entry
    relative: bool = False  # scale × the RMS of the entries, in place of an absolute value
    per: Literal["global", "tensor"] = "global"  # relative: the RMS of all entries together, or of each tensor
    on: Literal["gradient", "update", "weights"] = "gradient"  # where the noise goes

    @property
    def acts_on(self) -> frozenset[Place]:
        return frozenset({"gradient" if self.on == "gradient" else "update"})

    @abstractmethod
    def draw(self, shape: torch.Size, rng: Source) -> Tensor:
        """Return independent noise of mean 0 and standard deviation 1, where the source lies."""

    def released(self, g: Tensor, std: float, rng: Source) -> Tensor:
        """Return one tensor with secret noise, on a grid that follows from its size; as it is where there is none."""
        drawn = self.draw(g.flatten().shape, rng).double()
        return Drawn(drawn * std, grid_of(std)).on(g.flatten()).view_as(g) if std else g

    def stds(self, gradient: Params) -> dict[str, float]:
        """Return the standard deviation of the noise for each tensor of a gradient."""
        if not self.relative:
            return dict.fromkeys(gradient, self.scale)
        if self.per == "tensor":
            return {name: self.scale * _rms(g) for name, g in gradient.items()}
        return dict.fromkeys(gradient, self.scale * _rms(flatten(gradient)))

    def _add(self, gradient: Params, rng: Source, factor: float = 1.0) -> Params:
        stds = self.stds(gradient)
        if is_secret(rng):
            return {name: self.released(g, factor * stds[name], rng) for name, g in gradient.items()}
        grads = list(gradient.values())
        noise = draw_all(self.draw, grads, rng)
        torch._foreach_mul_(noise, [factor * stds[name] for name in gradient])
        torch._foreach_add_(noise, grads)
        return dict(zip(gradient, noise, strict=True))

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        return self._add(gradient, rng) if self.on == "gradient" else gradient

    def on_update(self, update: Update, rng: Source) -> Update:
        if self.on == "gradient":
            return update
        return replace(update, gradient=self._add(update.gradient, rng, self._unit(update)))

    def _unit(self, update: Update) -> float:
        """Return what one unit of noise is in the update: noise on the weights counts 1 / lr."""
        return 1.0 / update.lr if self.on == "weights" and not self.relative else 1.0

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(self._known),)

    def _known(self, seen: Observation) -> dict[str, float]:
        """Return the noise std of each tensor of the update, as a server that knows the settings works it out.

        Relative noise is a share of a norm that the server sees with the noise in it: σ² = s²/(1 + s²) of what it
        sees for one step. Over T steps it takes the step gradients as alike: T g in sum, with noise √T s g; momentum
        counts some of them more often. Adam divides noise and gradient alike by their size, so that no law is known
        of what is left; clipped noise has at most the norm that was clipped to.
        """
        update = seen.update
        if self.on == "gradient" and update.rule.adaptive:
            return {}
        total, spread = update.rule.shares(update.num_steps) if self.on == "gradient" else (1.0, 1.0)
        if self.relative:
            factor = spread / sqrt(total**2 + (spread * self.scale) ** 2)
        else:
            factor = spread * self._unit(update)
        known = {name: factor * std for name, std in self.stds(update.gradient).items()}
        most = spread * update.rule.clip / sqrt(size(update.gradient))
        return {name: min(std, most) for name, std in known.items()} if most and self.on == "gradient" else known


def draw_all(draw: Callable[[torch.Size, Source], Tensor], like: Sequence[Tensor], rng: Source) -> list[Tensor]:
    """Return noise for each tensor: drawn one by one on the CPU, at once on a device, and moved at once."""
    if rng.device.type == "cpu" and not (like and all(g.is_cuda for g in like)):
        return [draw(g.shape, rng).to(g) for g in like]
    sizes = [g.numel() for g in like]
    on_cpu = rng.device.type == "cpu"
    flat = torch.cat([draw(g.shape, rng).flatten() for g in like]) if on_cpu else draw(torch.Size([sum(sizes)]), rng)
    return [part.view(g.shape).to(g) for part, g in zip(flat.to(like[0]).split(sizes), like, strict=True)]


def with_noise(g: Tensor, std: float, rng: Source) -> Tensor:
    """Return a tensor with secret Gaussian noise, on a grid that follows from its size; as it is without noise."""
    return release(g.flatten(), std, rng).view_as(g) if std else g


def _rms(entries: Tensor) -> float:
    return float(entries.square().mean().sqrt()) if entries.numel() else 0.0


@DEFENSES.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Noise):
    """Add Gaussian noise to every entry, the same on all layers."""

    title = "Gaussian noise"

    def draw(self, shape: torch.Size, rng: Source) -> Tensor:
        return normal(shape, rng)

    def released(self, g: Tensor, std: float, rng: Source) -> Tensor:
        """Return one tensor with secret noise, made and rounded in one pass."""
        return with_noise(g, std, rng)

    def mean_of(self, rounds: int) -> Defense:
        return replace(self, scale=self.scale / sqrt(rounds))


@DEFENSES.register("laplace")
@dataclass(frozen=True)
class Laplace(Noise):
    """Add Laplace noise to every entry: the Laplace scale is b = scale / √2, so that ``scale`` is its std."""

    title = "Laplace noise"

    def draw(self, shape: torch.Size, rng: Source) -> Tensor:
        return laplace(shape, rng)
