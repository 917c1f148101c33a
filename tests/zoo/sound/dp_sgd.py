"""DP-SGD as Opacus runs it: clipped, with Gaussian noise, at epsilon 8 over a whole training."""

import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth

TRUTH = Truth("Differential privacy at epsilon 8: what one gradient tells is less than its noise.", "DP-SGD", "whiten")


@DEFENSES.register("dp_sgd")
@dataclass(frozen=True)
class DpSgd(Defense):
    """Let Opacus' optimiser clip the gradient and add its noise; a step on several examples is clipped as one."""

    epsilon: float = 8.0
    delta: float = 1e-5
    sample_rate: float = 0.01
    steps: int = 1000  # of the training that epsilon is for
    clip: float = 1.0
    batch: int = 8  # expected: what the sum is divided by

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        from opacus.optimizers import DPOptimizer

        weights = [nn.Parameter(torch.zeros_like(g)) for g in gradient.values()]
        for weight, g in zip(weights, gradient.values(), strict=True):
            weight.grad_sample = g.detach()[None]
        seed, device = int(torch.randint(2**62, (), generator=rng)), weights[0].device
        private = DPOptimizer(
            torch.optim.SGD(weights, lr=1.0),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.clip,
            expected_batch_size=self.batch,
            generator=Generator(device).manual_seed(seed),
        )
        private.pre_step()
        return {name: weight.grad.detach() for name, weight in zip(gradient, weights, strict=True)}

    @property
    def noise_multiplier(self) -> float:
        """What Opacus' accountant asks for."""
        return _multiplier(self.epsilon, self.delta, self.sample_rate, self.steps)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        std = self.noise_multiplier * self.clip / self.batch
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, std)),)


@lru_cache
def _multiplier(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the range of orders that it searches
        return float(
            get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps)
        )
