"""Clip each record's gradient, add Gaussian noise scaled to one record among a step's, and account for it over the run.

With P a public linear map, C a public clip, B the fixed number of slots of a batch and g_j the gradient of record j:

    c_j  = min(1, C / ||P g_j||), 0 where g_j is not finite
    sent = (Σ_j c_j g_j + z C P⁻¹ n) / B,  n ~ N(0, I)

Zeroing one record slot moves the sum by at most C in the coordinates of P, so a round of E local epochs is √E/z
Gaussian-DP, and R of them √(E R)/z, against any server that chooses the weights and knows all other records.
"""

from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.certificates.plan import PROMISES, PlannedRun, z_run_of
from gradveil.countermeasures import Countermeasure
from gradveil.defenses.base import DEFENSES, Defense, check_choice
from gradveil.defenses.noise import draw_all, normal
from gradveil.errors import DefenseError, SpecError
from gradveil.gradients.records import Records
from gradveil.tree import Params, norm, scale
from gradveil.types import Observation


@DEFENSES.register("veil")
@dataclass(frozen=True)
class Veil(Defense):
    """Clip each record's gradient in public coordinates and add Gaussian noise scaled to one record.

    ``z`` is the noise multiplier of a release. Instead of it a promise over the whole run may be given, from which z
    follows: z/√(E R) = 0.5 (reconstruction) or 1 (identification), ρ, or ε at δ. With ``tier=aggregate`` the server
    sees nothing but the sum of a cohort, as under secure aggregation: each of K clients adds 1/√(K (1 - lost -
    colluding)) of the noise, and takes one local step a round.
    """

    draws_on_device: ClassVar[bool] = True

    z: float | None = None  # noise multiplier of a release; 1 where no promise is given
    shape: str = "iso"  # of the noise: iso, alike in all directions
    clip: float = 1.0  # C: the longest gradient of a record
    tier: Literal["local", "aggregate"] = "local"  # what the server sees: each client's update, or their sum
    cohort: int | None = None  # clients of a round; tier=aggregate; the planned run says it
    lost: float = 0.0  # share of a cohort that may drop out of a round; tier=aggregate
    colluding: float = 0.0  # share of a cohort that may work with the server; tier=aggregate
    promise: Literal["reconstruction", "identification"] | None = None  # over the whole run
    rho: float | None = None  # over the whole run
    epsilon: float | None = None  # over the whole run, at delta
    delta: float = 1e-5
    limit: float | None = None  # μ² that a record may spend over the whole run; a promise says it

    def __post_init__(self) -> None:
        given = [name for name in ("z", "promise", "rho", "epsilon") if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)} both say how much noise there is. Give one of them.")
        for name in ("z", "clip", "rho", "epsilon", "limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"{name}={value}: give a number above 0.")
        check_choice("shape", self.shape, ("iso",))
        check_choice("tier", self.tier, ("local", "aggregate"))
        if self.promise is not None:
            check_choice("promise", self.promise, PROMISES)
        if not 0 < self.delta < 1:
            raise SpecError(f"delta={self.delta}: give a chance between 0 and 1, e.g. 1e-5.")
        if not (self.lost >= 0 and self.colluding >= 0 and self.lost + self.colluding < 1):
            raise SpecError(f"lost={self.lost}, colluding={self.colluding}: give shares from 0, together below 1.")
        if self.cohort is not None and self.tier == "aggregate" and self.honest < 2:
            raise SpecError(
                f"tier=aggregate hides a client among others, and of a cohort of {self.cohort} with lost={self.lost} "
                f"and colluding={self.colluding} fewer than two are left. Use tier=local, or a larger cohort."
            )

    def for_run(self, run: PlannedRun) -> "Veil":
        """Return the defence with the noise that its promise needs in this run."""
        self.check_steps(run.steps)
        known = self
        if self.tier == "aggregate":
            lost, colluding = max(self.lost, run.lost), max(self.colluding, run.colluding)
            known = replace(self, cohort=self.cohort or run.cohort, lost=lost, colluding=colluding)
        if (z_run := self._promised) is None:
            return known
        return replace(known, z=run.z(z_run), limit=self.allowance, promise=None, rho=None, epsilon=None)

    @property
    def _promised(self) -> float | None:
        """The multiplier of the whole run that the promise asks for; None where z is given."""
        if self.promise is None and self.rho is None and self.epsilon is None:
            return None
        return z_run_of(self.promise, self.epsilon, self.delta, self.rho)

    @property
    def allowance(self) -> float | None:
        """μ² that a record may spend over the whole run."""
        return self.limit if (z_run := self._promised) is None else min(1 / z_run**2, self.limit or float("inf"))

    @property
    def honest(self) -> float:
        """The clients of a round whose noise is in the sum and secret."""
        return (self.cohort or 1) * (1 - self.lost - self.colluding)

    @property
    def fewest(self) -> int:
        """The fewest arrivals whose sum may be released; in the local tier each is released by itself."""
        return ceil((self.cohort or 1) * (1 - self.lost) - 1e-9) if self.tier == "aggregate" else 0

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
        if self._promised is not None:
            name = next(name for name in ("promise", "rho", "epsilon") if getattr(self, name) is not None)
            what = f"{name}={getattr(self, name)}"
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
        return 1 / sqrt(self.honest)

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
