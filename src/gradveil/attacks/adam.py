"""Batched Adam: moments and steps per problem, plain or signed gradients, step decay, kept in a box."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.lbfgs import State

MILESTONES = (3 / 8, 5 / 8, 7 / 8)  # of the run, where the step shrinks tenfold (Geiping et al. 2020)


@dataclass(frozen=True)
class Adam:
    """Settings of the optimiser (Kingma and Ba 2015); signed gradients and decay as Geiping et al. 2020 have them."""

    steps: int  # of the whole run, which the decay is laid out over
    lr: float = 0.1
    signed: bool = False  # feed the sign of the gradient
    decay: bool = True
    boxed: int = 0  # so many leading coordinates are kept within the bounds
    bounds: tuple[float, float] = (0.0, 1.0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def start(self, z: Tensor) -> State:
        """Return the state of problems that start at z (P, d)."""
        zero, number = z.new_zeros(len(z)), torch.zeros(len(z), dtype=torch.long, device=z.device)
        return {
            "point": z, "best": z, "best_value": zero + torch.inf, "first": torch.zeros_like(z),
            "second": torch.zeros_like(z), "iterations": number, "evaluations": number,
            "dead": number > 0, "stuck": number > 0,
        }  # fmt: skip

    def tick(self, state: State, value: Tensor, gradient: Tensor, ticks: int | None = None) -> State:
        """Return the state after an evaluation at ``point``: value (P,), gradient (P, d)."""
        new, old = dict(state), state
        finite = value.isfinite() & gradient.isfinite().all(1) & ~old["dead"]
        new["dead"] = ~finite
        new["evaluations"] = old["evaluations"] + 1
        better = finite & (value < old["best_value"])
        new["best_value"] = torch.where(better, value, old["best_value"])
        new["best"] = torch.where(better[:, None], old["point"], old["best"])
        g = gradient.masked_fill(~finite[:, None], 0.0)
        g = g.sign() if self.signed else g
        new["first"] = old["first"].lerp(g, 1 - self.betas[0])
        new["second"] = old["second"] * self.betas[1] + g * g * (1 - self.betas[1])
        new["iterations"] = old["iterations"] + finite
        point = old["point"] - self._step(new)
        if self.boxed:
            point[:, : self.boxed].clamp_(*self.bounds)
        new["point"] = torch.where(finite[:, None], point, old["point"])
        return new

    def _step(self, new: State) -> Tensor:
        count = new["iterations"].to(new["first"].dtype)[:, None]
        first = new["first"] / (1 - self.betas[0] ** count)
        second = new["second"] / (1 - self.betas[1] ** count)
        rate = self.lr * torch.ones_like(count)
        if self.decay:
            for milestone in MILESTONES:
                rate = torch.where(count > milestone * self.steps, 0.1 * rate, rate)
        return rate * first / (second.sqrt() + self.eps)
