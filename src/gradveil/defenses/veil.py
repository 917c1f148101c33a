"""Clip each record's gradient, add Gaussian noise scaled to one record among a step's, and account for it over the run.

With P a public linear map, C a public clip, B the fixed number of slots of a batch and g_j the gradient of record j:

    c_j  = min(1, C' / ||P g_j||), 0 where g_j is not finite; C' is C less the room that rounding takes
    sent = (Σ_j c_j g_j + z C P⁻¹ n) / B,  n ~ N(0, I)

Zeroing one record slot moves the sum by at most C in the coordinates of P, so a round of E local epochs is √E/z
Gaussian-DP, and R of them √(E R)/z, against any server that chooses the weights and knows all other records.

In public coordinates noise is stronger along R orthonormal directions U of public gradients: P = A^(-1/2) with
A = U diag(s) Uᵀ + (I - U Uᵀ).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil, sqrt
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.errors import DefenseError, SpecError
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.noise import Drawn, Source, noise, release
from gradveil.privacy.plan import PlannedRun, Tier, z_run_of
from gradveil.protection.capture import records_of
from gradveil.protection.defense import DEFENSES, PUBLIC, Accounted, PerRound, RunningStep
from gradveil.protection.records import SLACK, Records, clip_factors, clipped_sum, products_error, split, wide
from gradveil.ranges import Count, Part, Positive, Share
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Batch, Observation

SHORTEST = 1e-12  # clip: far above what float32 loses of products of large and small numbers

# of the grid in a standard deviation: a secure sum rounds each client's numbers again (how-to/secure-aggregation.md)
STEPS: dict[Tier, int] = {"local": 16, "aggregate": 4096}


LARGEST = 2**32  # bytes that public gradients may take
FEWEST = 16  # that say anything
AT_ONCE = 2**14  # columns of the directions that are made float64 at once
VALUES, CLIPS = (1.0, 1e4), (1e-6, 1e6)  # that are taken from others: eigenvalues and clips


@dataclass(frozen=True, eq=False)
class Coordinates:
    """P, by its directions U (R, p) over all parameters in order, and the eigenvalues s (R,) of A there."""

    directions: Tensor
    values: Tensor

    @cached_property
    def stretch(self) -> Tensor:
        """D = s^(-½) - 1 in float64: P is 1 + Uᵀ D U, for any U that is held."""
        return self.values.double().rsqrt() - 1

    @cached_property
    def products(self) -> Tensor:
        parts = [u @ u.T for u in map(Tensor.double, self.directions.split(AT_ONCE, 1))]
        return torch.stack(parts).sum(0)

    @cached_property
    def longest(self) -> float:
        return float(self.products.diagonal().max().sqrt()) if len(self.values) else 1.0

    def mapped(self, records: Records) -> tuple[Tensor, Tensor]:
        """Return D U g_j (..., N, R) as it is computed, and upper bounds of ||g_j + Uᵀ D U g_j||² (..., N)."""
        lengths, masses = records.square_norms(), records.square_masses()
        along = records.along(split(self.directions, records.like))
        error = products_error(lengths, masses, along.shape[-1], records.formed, self.directions.dtype) * self.longest
        beside = along * self.stretch
        found = lengths + 2 * (along * beside).sum(-1) + ((beside @ self.products) * beside).sum(-1)
        found += 2 * error * torch.linalg.vector_norm(beside, dim=-1)
        return beside, found.clamp_min(0) + 1e-9 * lengths

    def spread(self, along: Tensor) -> Tensor:
        """Return Uᵀ v for vectors (..., R) in float64."""
        parts = self.directions.split(AT_ONCE, 1)
        return torch.cat([along @ u.to(along) for u in parts], -1)

    def back(self, flat: Tensor) -> Tensor:
        """Return P⁻¹ n for vectors (..., p)."""
        return self._stretched(flat, self.values.sqrt() - 1)

    def into(self, flat: Tensor) -> Tensor:
        """Return P g for vectors (..., p)."""
        return self._stretched(flat, 1 / self.values.sqrt() - 1)

    def _stretched(self, flat: Tensor, by: Tensor) -> Tensor:
        u = self.directions.to(flat)
        return flat + (flat @ u.T * by.to(flat)) @ u

    def __getstate__(self) -> dict[str, Any]:
        """Between processes, plain arrays travel."""
        return {name: getattr(self, name).cpu().numpy() for name in ("directions", "values")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, torch.from_numpy(value))


def fit(
    first: Records, second: Records, like: Params, clip: Callable[[Tensor], Tensor], rank: int, alpha: float
) -> Coordinates:
    """Return the coordinates that public gradients ask for.

    The first half gives the directions, the second their second moments λ and the mean τ of those beside, so that
    what is chance in the first counts as such: s = (λ/τ)^α. ``clip``: square norms -> how much each record counts.
    """
    size = sum(p.numel() for p in like.values())
    rank = min(rank, first.count, size - 1)
    if 4 * size * first.count > LARGEST:
        raise DefenseError(
            f"Public coordinates of {size:,} parameters would take {4 * size * first.count / 2**30:.0f} GiB. Use "
            f"shape=iso, or train fewer parameters."
        )
    counts = clip(first.square_norms()).double()
    rows = torch.cat([g.flatten(1) for g in first.each().values()], 1)[counts > 0].double() * counts[counts > 0, None]
    lengths, vectors = torch.linalg.eigh(rows @ rows.T)  # rising
    rank = min(rank, int((lengths > 1e-10 * lengths[-1]).sum()))
    directions = (vectors[:, -rank:].T @ rows / lengths[-rank:, None].sqrt()).to(wide(next(iter(like.values()))))
    weights = clip(second.square_norms()).double()
    along = torch.where(weights[:, None] > 0, second.along(split(directions, like)).double() * weights[:, None], 0.0)
    energy = torch.where(weights > 0, second.square_norms().double() * weights.square(), 0.0).mean()
    moments = along.square().mean(0)
    beside = ((energy - moments.sum()) / (size - rank)).clamp_min(1e-12 * moments.max())
    return Coordinates(directions, (moments / beside).clamp_min(1.0).pow(alpha).clamp_max(VALUES[1]).to(directions))


def save(coordinates: Coordinates, like: Params, path: str | Path, clip: float | None = None) -> None:
    """Write coordinates for a model with these parameters to a file that a server can send, with a clip in it."""
    tensors = {f"directions/{n}": v.contiguous() for n, v in split(coordinates.directions.cpu(), like).items()}
    tensors["values"] = coordinates.values.cpu()
    if clip is not None:
        tensors["clip"] = torch.tensor(clip, dtype=torch.float64)
    write_atomically(Path(path), to_bytes(tensors))


def load(path: str, like: Params) -> tuple[Coordinates, float | None]:
    """Read what ``save`` wrote, for a model with these parameters; what is no pair of P and P⁻¹ is refused."""
    advice = "They are no public coordinates of this model: write them with gradveil.defenses.veil.save."
    with wrap_parse_errors(repr(path), DefenseError, advice):
        tensors = _read(path, Path(path).stat().st_mtime_ns)
        parts = [tensors[f"directions/{name}"] for name in like]
        values = tensors["values"].double()
        if any(part.shape[1:] != p.shape for part, p in zip(parts, like.values(), strict=True)):
            raise DefenseError(f"The public coordinates {path!r} are of a model with other parameters.")
        flat = torch.cat([part.flatten(1) for part in parts], 1).double()
        apart = float((flat @ flat.T - torch.eye(len(flat), dtype=flat.dtype)).abs().max()) if len(flat) else 0.0
        if not apart < 1e-3 or len(values) != len(flat):
            raise DefenseError(f"The directions in {path!r} are not orthonormal, or not as many as their values.")
        if not bool(((values >= VALUES[0]) & (values <= VALUES[1])).all()):
            raise DefenseError(f"The values in {path!r} are not all from {VALUES[0]:g} to {VALUES[1]:g}.")
        first = wide(next(iter(like.values())))
        directions = torch.linalg.qr(flat.T).Q.T  # the same but for signs, and orthonormal to rounding
        clip = check_clip(float(tensors["clip"]), f"in {path!r}") if "clip" in tensors else None
        return Coordinates(directions.to(first), values.to(first)), clip


def check_clip(clip: float, where: str) -> float:
    """Return a clip that somebody else sent; raise where it is no length that a gradient may have."""
    if not CLIPS[0] <= clip <= CLIPS[1]:
        raise DefenseError(f"The clip {where} is {clip:g}; it must be from {CLIPS[0]:g} to {CLIPS[1]:g}.")
    return clip


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> Params:
    return read_safetensors(Path(path))[0]


@dataclass(frozen=True, eq=False)
class ClipMap:
    """What follows from public data at a round's weights: the clip, and the coordinates; None: plain ones."""

    clip: float
    coordinates: Coordinates | None = None

    def save(self, model: nn.Module, path: str) -> None:
        """Write it to a file that a server can send."""
        if self.coordinates is None:
            raise DefenseError("There are no coordinates to write: give the shape public.")
        save(self.coordinates, parameters(model), path, self.clip)


def _enough(public: Batch | None, asks: str) -> Batch:
    if public is None or len(public) < FEWEST:
        raise DefenseError(
            f"veil:{asks} needs public examples, at least {FEWEST} that are no client's, and there are "
            f"{0 if public is None else len(public)}. Leave some records undealt, or give clip= and shape=iso."
        )
    return public[:PUBLIC]


def _quantile(square_norms: Tensor, quantile: float) -> float:
    finite = square_norms[square_norms.isfinite()].double().clamp_min(0).sqrt()
    found = float(finite.quantile(quantile)) if len(finite) else 0.0
    if not found > 0:
        raise DefenseError("The gradients of all public examples are zero or not finite: no clip follows from them.")
    return check_clip(found, "that follows from public gradients")


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
        return replace(self, _measured=self._measure(model, public, loss))

    def _measure(self, model: nn.Module, public: Batch | None, loss: Loss) -> ClipMap:
        """Return clip and coordinates at the model's weights."""
        like, quantile = parameters(model), self.quantile
        coordinates, sent = load(self.shape, like) if self.shape.endswith(".safetensors") else (None, None)
        fixed = next(value for value in (self.clip, sent, 1.0) if value is not None)
        if coordinates is not None and quantile is None:
            return ClipMap(fixed, coordinates)
        few = _enough(public, f"shape={self.shape}" if quantile is None else f"quantile={quantile}")
        if self.shape == "iso" and quantile is not None:
            return ClipMap(_quantile(records_of(model, few, loss).square_norms(), quantile))
        first, second = (records_of(model, half, loss) for half in (few[: len(few) // 2], few[len(few) // 2 :]))
        if self.shape == "public":
            limit = self.clip or _quantile(torch.cat([first.square_norms(), second.square_norms()]), quantile or 1.0)
            coordinates = fit(first, second, like, lambda norms: clip_factors(norms, limit), self.rank, self.alpha)
        if quantile is None or coordinates is None:
            return ClipMap(fixed, coordinates)
        return ClipMap(_quantile(coordinates.mapped(second)[1], quantile), coordinates)

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
