"""Clip each record's gradient, add Gaussian noise scaled to one record among a step's, and account for it over the run.

With P a public linear map, C a public clip, B the fixed number of slots of a batch and g_j the gradient of record j:

    c_j  = min(1, C / ||P g_j||), 0 where g_j is not finite
    sent = (Σ_j c_j g_j + z C P⁻¹ n) / B,  n ~ N(0, I)

Zeroing one record slot moves the sum by at most C in the coordinates of P, so a round of E local epochs is √E/z
Gaussian-DP, and R of them √(E R)/z, against any server that chooses the weights and knows all other records.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.certificates.plan import PlannedRun
from gradveil.countermeasures import Countermeasure
from gradveil.defenses.base import DEFENSES, Defense, check_choice
from gradveil.defenses.noise import draw_all, normal
from gradveil.errors import DefenseError, SpecError
from gradveil.gradients.records import Records
from gradveil.tree import Params, norm, scale
from gradveil.types import Observation

Z_RUN = {"reconstruction": 0.5, "identification": 1.0}  # multiplier of the whole run that each promise needs


@DEFENSES.register("veil")
@dataclass(frozen=True)
class Veil(Defense):
    """Clip each record's gradient in public coordinates and add Gaussian noise scaled to one record.

    ``z`` is the noise multiplier of a release. Instead of it a promise over the whole run may be given, from which z
    follows: z/√(E R) = 0.5 (reconstruction) or 1 (identification), ρ, or ε at δ. With ``tier=aggregate`` the server
    sees nothing but the sum of a cohort, as under secure aggregation: each of K clients adds 1/√(K (1 - lost)) of the
    noise, and takes one local step a round.
    """

    draws_on_device: ClassVar[bool] = True

    z: float | None = None  # noise multiplier of a release; 1 where no promise is given
    shape: str = "iso"  # of the noise: iso, alike in all directions
    clip: float = 1.0  # C: the longest gradient of a record
    tier: Literal["local", "aggregate"] = "local"  # what the server sees: each client's update, or their sum
    cohort: int | None = None  # clients of a round; tier=aggregate; the planned run says it
    lost: float = 0.0  # share of a cohort that may drop out or work with the server; tier=aggregate
    promise: Literal["reconstruction", "identification"] | None = None  # over the whole run
    rho: float | None = None  # over the whole run

    def __post_init__(self) -> None:
        given = [name for name in ("z", "promise", "rho") if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)} both say how much noise there is. Give one of them.")
        for name in ("z", "clip", "rho"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"{name}={value}: give a number above 0.")
        check_choice("shape", self.shape, ("iso",))
        check_choice("tier", self.tier, ("local", "aggregate"))
        if self.promise is not None:
            check_choice("promise", self.promise, Z_RUN)
        if not 0 <= self.lost < 1:
            raise SpecError(f"lost={self.lost} is no share: give a number from 0 to below 1.")
        if self.cohort is not None and self.tier == "aggregate" and self.cohort * (1 - self.lost) < 2:
            raise SpecError(
                f"tier=aggregate hides a client among others, and of a cohort of {self.cohort} with lost={self.lost} "
                f"fewer than two are left. Use tier=local, or a larger cohort."
            )

    def for_run(self, run: PlannedRun) -> "Veil":
        """Return the defence with the noise that its promise needs in this run."""
        self.check_steps(run.steps)
        known = self
        if self.tier == "aggregate":
            known = replace(self, cohort=self.cohort or run.cohort, lost=max(self.lost, run.lost))
        root = sqrt(run.epochs * run.participations)
        if self.promise is not None:
            return replace(known, z=Z_RUN[self.promise] * root, promise=None)
        if self.rho is not None:
            return replace(known, z=root / sqrt(2 * self.rho), rho=None)
        return known

    def check_steps(self, steps: int) -> None:
        """Raise where the sum of a cohort would hide nothing: clients that take several steps before it is formed."""
        if self.tier == "aggregate" and steps > 1:
            raise DefenseError(
                f"tier=aggregate splits the noise among the clients, which protects a single release a round; here a "
                f"client takes {steps} local steps. Take all records in one step (batch_size 0, one epoch), or "
                f"tier=local."
            )

    @property
    def multiplier(self) -> float:
        """z; raises where it follows from a run that nobody has planned."""
        if self.z is None and (self.promise or self.rho):
            what = f"promise={self.promise}" if self.promise else f"rho={self.rho}"
            raise DefenseError(
                f"veil:{what} is a promise over a whole run, and nothing is known of the run here. Give z, which "
                f"gradveil plan works out."
            )
        return 1.0 if self.z is None else self.z

    @property
    def own_part(self) -> float:
        """The part of the release's noise that this client adds: all of it in the local tier."""
        if self.tier == "local":
            return 1.0
        if self.cohort is None:
            raise DefenseError("tier=aggregate needs the number of clients in a round. Give cohort=K.")
        return 1 / sqrt(self.cohort * (1 - self.lost))

    def spends(self, epochs: int) -> float:
        """Return μ² of one participation: E / z²."""
        return epochs / self.multiplier**2

    def on_records(self, records: Records, slots: int, rng: Generator) -> Params:
        """Return the clipped sum with its noise, over the slots."""
        if records.count > slots:
            raise DefenseError(f"A step has {records.count} records and {slots} slots. Give each record its own slot.")
        std = self.multiplier * self.clip * self.own_part
        total = records.weighted_sum(clip_factors(records.square_norms(), self.clip))
        noise = draw_all(normal, list(total.values()), rng)
        torch._foreach_mul_(noise, std)
        torch._foreach_add_(noise, list(total.values()))
        torch._foreach_div_(noise, slots)
        return dict(zip(total, noise, strict=True))

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return: weigh by the known noise, and clip trial gradients as the client does where it has one record."""
        why = (
            "Weighs all entries by the known noise, clips its own trials alike, and adds what public images look like."
        )
        return (Countermeasure("whiten", why, self._whitened, "newton"),)

    def _whitened(self, seen: Observation) -> Observation:
        update = seen.update
        if update.rule.adaptive:  # Adam divides noise and gradient alike: no law is known of what is left
            return seen
        slots = min(update.batch_size or update.num_examples, update.num_examples)
        std = self.multiplier * self.clip * self.own_part / slots * update.rule.shares(update.num_steps)[1]
        known = replace(seen, noise=seen.noise | dict.fromkeys(update.gradient, std))
        return replace(known, simulate=self._clipped) if slots == 1 else known

    def _clipped(self, gradient: Params) -> Params:
        """Return the gradient of a step with one record, clipped; differentiable."""
        return scale(gradient, (self.clip / norm(gradient).clamp_min(1e-30)).clamp_max(1.0))  # type: ignore[arg-type]


def clip_factors(square_norms: Tensor, clip: float) -> Tensor:
    """Return c_j = min(1, C / ||P g_j||), 0 where the norm is not finite."""
    factors = (clip / square_norms.clamp_min(1e-30).sqrt()).clamp_max(1.0)
    return torch.where(square_norms.isfinite(), factors, torch.zeros_like(factors))
