"""Clip each record's gradient, add Gaussian noise scaled to one record among a step's, and account for it over the run.

With P a public linear map, C a public clip, B the fixed number of slots of a batch and g_j the gradient of record j:

    c_j  = min(1, C' / ||P g_j||), 0 where g_j is not finite; C' is C less the room that rounding takes
    sent = (Σ_j c_j g_j + z C P⁻¹ n) / B,  n ~ N(0, I)

Zeroing one record slot moves the sum by at most C in the coordinates of P, so a round of E local epochs is √E/z
Gaussian-DP, and R of them √(E R)/z, against any server that chooses the weights and knows all other records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.errors import DefenseError, SpecError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.noise import Drawn, Source, noise, release
from gradveil.privacy.plan import PlannedRun, Tier, z_run_of
from gradveil.protection.defense import DEFENSES, Accounted, PerRound, RunningStep
from gradveil.protection.records.coordinates import ClipMap, measure
from gradveil.protection.records.records import Records, clipped_sum, split
from gradveil.protection.records.rounding import SLACK
from gradveil.ranges import Count, Part, Positive, Share
from gradveil.tree import Params, flatten
from gradveil.types import Batch, Observation

SHORTEST = 1e-12  # clip: far above what float32 loses of products of large and small numbers

# of the grid in a standard deviation: a secure sum rounds each client's numbers again (how-to/secure-aggregation.md)
STEPS: dict[Tier, int] = {"local": 16, "aggregate": 4096}


@DEFENSES.register("veil")
@dataclass(frozen=True)
class Veil(Accounted, PerRound):
    """Clip each record's gradient in public coordinates and add Gaussian noise scaled to one record.

    ``z`` is the noise multiplier of a release. Instead of it a promise over the whole run may be given, from which z
    follows: z/√(E R) = 0.5 (reconstruction) or 1 (identification), ε at δ, or ρ. With ``tier=aggregate`` the server
    sees nothing but the sum of a cohort, as under secure aggregation: each of K clients adds 1/√(K (1 - lost -
    colluding)) of the noise, and takes one local step a round.
    """

    title = "Clipping and shaped noise (veil)"

    draws_on_device: ClassVar[bool] = True

    z: Positive | None = None  # noise multiplier of a release; 1 where no promise is given
    shape: str = "iso"  # of the noise: iso, public (by public gradients of the round), or a file that the server sent
    clip: Positive | None = None  # C: the longest gradient of a record; 1 where nothing says it
    quantile: Part | None = None  # instead of clip: C is this quantile of public gradients' norms in the round
    tier: Tier = "local"  # what the server sees: each client's update, or the sum of a cohort
    cohort: Count | None = None  # clients of a round, for tier=aggregate; a planned run says it
    lost: Share = 0.0  # share of the cohort that may drop out of a round, for tier=aggregate
    colluding: Share = 0.0  # share of the cohort that may work with the server, for tier=aggregate
    promise: Literal["reconstruction", "identification"] | None = None  # over the whole run
    epsilon: Positive | None = None  # over the whole run
    delta: Part = 1e-5  # of epsilon
    rho: Positive | None = None  # over the whole run
    limit: Positive | None = None  # μ² that a record may spend over the whole run; a promise says it
    rank: Count = 128  # directions of shape=public
    alpha: Part = 0.5  # of shape=public: noise follows second moments to this power; 0: iso
    _measured: ClipMap | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what in (("z", "promise", "epsilon", "rho"), ("clip", "quantile")):
            if len(given := [name for name in what if getattr(self, name) is not None]) > 1:
                raise SpecError(f"{' and '.join(given)} say the same thing twice. Give one of them.")
        if self.shape not in ("iso", "public") and not self.shape.endswith(".safetensors"):
            raise SpecError(f"shape={self.shape!r} is not known. Give one of: iso, public, FILE.safetensors.")
        if self.clip is not None and self.clip < SHORTEST:
            raise SpecError(
                f"clip={self.clip} is less than single precision can hold to. Give a number from {SHORTEST}."
            )
        if not self.lost + self.colluding < 1:
            raise SpecError(f"lost={self.lost}, colluding={self.colluding}: give shares from 0, together below 1.")
        if self.cohort is not None and self.tier == "aggregate" and self.honest < 2:
            raise SpecError(
                f"tier=aggregate hides a client among others, and of a cohort of {self.cohort} with lost={self.lost} "
                f"and colluding={self.colluding} fewer than two are left. Use tier=local, or a larger cohort."
            )

    def for_run(self, run: PlannedRun) -> "Veil":
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
        return self.limit if (z_run := self._promised) is None else min(1 / z_run**2, self.limit or float("inf"))

    @property
    def honest(self) -> float:
        """The clients of a round whose noise is in the sum and secret."""
        return (self.cohort or 1) * (1 - self.lost - self.colluding)

    @property
    def min_clients(self) -> int:
        return ceil((self.cohort or 1) * (1 - self.lost) - 1e-9) if self.tier == "aggregate" else 0

    def check_steps(self, steps: int) -> None:
        if self.tier == "aggregate" and steps > 1:
            raise DefenseError(
                f"tier=aggregate splits the noise among the clients, which protects a single release a round; here a "
                f"client takes {steps} local steps. Take all records in one step of one epoch, or tier=local."
            )

    @property
    def multiplier(self) -> float:
        """z; raises where it follows from a run that nobody has planned."""
        if self._promised is not None:
            name = next(name for name in ("promise", "rho", "epsilon") if getattr(self, name) is not None)
            raise DefenseError(
                f"veil:{name}={getattr(self, name)} is a promise over a whole run, and nothing is known of the run "
                f"here. Give z, which gradveil plan works out."
            )
        return 1.0 if self.z is None else self.z

    @property
    def client_multiplier(self) -> float:
        """The multiplier of the noise that this client adds: z, or its part of it in the aggregate tier."""
        if self.tier == "local":
            return self.multiplier
        if self.cohort is None:
            raise DefenseError("tier=aggregate needs the number of clients in a round. Give cohort=K.")
        return self.multiplier / sqrt(self.honest)

    def cost(self, epochs: int) -> float:
        return epochs / self.multiplier**2

    def single_client(self) -> "Veil":
        return replace(self, tier="local", cohort=None)

    def mean_of(self, rounds: int) -> "Veil":
        return replace(self, z=self.multiplier / sqrt(rounds))

    # Public coordinates and clip.

    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> "Veil":
        if (self.shape == "iso" and self.quantile is None) or (public is None and self._measured is not None):
            return self
        settings = (self.shape, self.clip, self.quantile, self.rank, self.alpha)
        return replace(self, _measured=measure(model, public, loss, *settings))

    @property
    def measured(self) -> ClipMap:
        """Clip and coordinates of this round; raises where they follow from public data that nobody gave."""
        if self._measured is not None:
            return self._measured
        if self.shape != "iso" or self.quantile is not None:
            asks = f"quantile={self.quantile}" if self.quantile is not None else f"shape={self.shape}"
            raise DefenseError(
                f"veil:{asks} follows from public data at each round's weights, and none are given here. Give clip= "
                f"and shape=iso, or hand over public examples by for_round()."
            )
        return ClipMap(1.0 if self.clip is None else self.clip)

    # The mechanism.

    def begin(self, slots: int, rng: Source) -> "VeilStep":
        return VeilStep(self, slots, rng)

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        return self.begin(slots, rng).add(records)

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        sums, sizes = self.clipped_sum(records, present), [p.numel() for p in records.like.values()]
        noisy = [release(total, self._std, rng, sizes, STEPS[self.tier]) for total, rng in zip(sums, rngs, strict=True)]
        return self._sent(torch.stack(noisy), slots[:, None], records.like)

    def clipped_sum(self, records: Records, present: Tensor | None = None) -> Tensor:
        """Return Σ c_j P g_j (p,) over the records that are present: a slot moves it by C at most, as it is rounded."""
        return clipped_sum(records, self.measured.clip, self.measured.coordinates, present)

    @property
    def _std(self) -> float:
        return self.client_multiplier * self.measured.clip

    def _sent(self, noisy: Tensor, slots: int | Tensor, like: Params) -> Params:
        """Return what has its noise by name, out of P's coordinates, over the slots, in the weights' types."""
        now = self.measured
        flat = noisy if now.coordinates is None else now.coordinates.back(noisy.to(now.coordinates.directions))
        flat /= slots if isinstance(slots, int) else slots.to(flat)
        return {name: part.to(like[name].dtype) for name, part in split(flat, like).items()}

    # What a server that knows it does.

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = "Weighs what arrives by the known noise, clips its own trials alike; adds what public examples look like."
        return (Countermeasure("whiten", why, self._whitened, "newton"),)

    def _whitened(self, seen: Observation) -> Observation:
        update, now = seen.update, self.measured
        if update.rule.adaptive:  # Adam divides noise and gradient alike: no law is known of what is left
            return seen
        slots = min(update.batch_size or update.num_examples, update.num_examples)
        std = self.client_multiplier * now.clip / slots * update.rule.shares(update.num_steps)[1]
        known = replace(seen, noise=seen.noise | dict.fromkeys(update.gradient, std))
        if now.coordinates is None:
            return replace(known, simulate=self._clipped) if slots == 1 else known
        once = update.num_steps == 1 and update.rule.is_plain
        mapped = replace(update, gradient=self._mapped(update.gradient))
        trial = (lambda g: self._mapped(self._clipped(g))) if once and slots == 1 else self._mapped
        on: Literal["gradient", "update"] = "gradient" if once else "update"
        return replace(known, update=mapped, simulate=trial, simulate_on=on)

    def _mapped(self, gradient: Params) -> Params:
        coordinates = self.measured.coordinates
        return gradient if coordinates is None else split(coordinates.into(flatten(gradient)), gradient)

    def _clipped(self, gradient: Params) -> Params:
        """Return the gradient of a step with one record, clipped; differentiable."""
        length = flatten(self._mapped(gradient)).square().sum().clamp_min(1e-30).sqrt()
        factor = (self.measured.clip / (1 + SLACK) / length).clamp_max(1.0)
        return {name: g * factor for name, g in gradient.items()}


class VeilStep(RunningStep):
    """A step under way: the clean sum and the noise are kept apart, and rounded together for every batch that comes."""

    def __init__(self, veil: Veil, slots: int, rng: Source) -> None:
        self.veil, self.slots, self.rng = veil, slots, rng
        self.count = 0
        self.total: Tensor | None = None
        self.noise: Drawn | None = None

    def add(self, records: Records) -> Params:
        self.count += records.count
        if self.count > self.slots:
            raise DefenseError(
                f"A step has {self.count} records and {self.slots} slots. Give each record its own slot."
            )
        sizes, std, steps = [p.numel() for p in records.like.values()], self.veil._std, STEPS[self.veil.tier]
        found = self.veil.clipped_sum(records)
        if self.noise is None and self.count == self.slots:  # nothing can come after: in one pass
            return self.veil._sent(release(found, std, self.rng, sizes, steps), self.slots, records.like)
        self.total = found if self.total is None else self.total.double() + found
        if self.noise is None:
            self.noise = noise(sizes, std, self.rng, found.device, steps)
        return self.veil._sent(self.noise.on(self.total), self.slots, records.like)
