"""Whole batches, exactly, from a first fully connected layer with ReLU behind it (Dimitrov et al. 2024, SPEAR).

dW = D X, and D, the slopes of the loss by the layer's outputs, is 0 wherever a unit is off: about half of it. So each
column of D is a vector of the column space of dW that is far sparser than a mixture. The paper draws N - 1 rows,
takes the one direction that vanishes on them, and keeps it where many other rows vanish as well: one draw in 2^(N-1)
hits. Here a draw is a point among the examples, whose units that are off give the first direction, and then

- it is pulled towards sparsity: reweighted least squares, minimising Σ log(a_j² + ε²) with falling ε;
- it climbs: along lines on which its zeros stay (all, or all but one that nothing else speaks for) it goes to where
  most rows vanish at once. A mixture of two or three examples so falls apart into them.

The N sparsest independent directions are the columns of D up to scale, which db = D 1 gives.
"""

import math
from dataclasses import dataclass
from math import inf

import torch
from torch import Generator, Tensor

from gradveil.attacks.analytic import Mixture, behind, mixture_of
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack
from gradveil.errors import AttackError
from gradveil.ranges import Count, Weight
from gradveil.types import Observation, Reconstruction

AT_ONCE = 128  # draws that are worked on together
PULLS = 40  # of reweighted least squares
CLIMBS = 32  # at most
EDGES = 4  # lines of each kind that are looked along
ZERO = 1e-6  # of a unit row times a unit direction, without noise
SOLE = 1 - 1e-4  # leverage of a row whose zero nothing else speaks for
LIKELY = 0.85  # share of units that an example may have off and on so
MANY = 0.6  # of the most zeros: above it a direction is likely to be an example's
AGREE = 0.999  # share of units that must be on and off as the examples found say


@dataclass(frozen=True)
class _Space:
    """Unit rows whose sparse combinations are looked for."""

    rows: Tensor  # (m, N), of length 1
    white: Tensor  # (m, N): the same column space, orthonormal
    back: Tensor  # (N, N): rows = white back
    units: Tensor  # (m,) of the layer, whose rows they are
    gates: Tensor  # (m, N + 1): what the unit gives for an example (y, 1)
    zero: float  # below it an entry is rounding

    @classmethod
    def of(cls, mixture: Mixture) -> "_Space":
        size = mixture.rows.norm(dim=1)
        units = (size > max(1e-9 * float(size.max()), 20 * mixture.noise)).nonzero()[:, 0]
        if len(units) < mixture.rank:  # noise all over
            units = size.topk(mixture.rank).indices
        rows = mixture.rows[units] / size[units, None].clamp_min(1e-30)
        white, back = torch.linalg.qr(rows)
        gates = torch.cat([mixture.weight @ mixture.basis.T, mixture.bias[:, None]], 1)[units]
        gates = gates / gates.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return cls(rows, white, back, units, gates, max(ZERO, 5 * mixture.noise / float(size[units].median())))

    def unwhitened(self, q: Tensor) -> Tensor:
        """Return unit directions (K, N) of the rows that do what q does with the white ones."""
        v = torch.linalg.solve_triangular(self.back, q.T, upper=True).T
        unit: Tensor = v / v.norm(dim=1, keepdim=True)
        return unit

    def vanish(self, v: Tensor) -> Tensor:
        return (v @ self.rows.T).abs() < self.zero

    def pulled(self, q: Tensor) -> Tensor:
        """Return directions of the white rows (K, N), pulled towards sparsity."""
        eps = 0.1 / math.sqrt(len(self.white))
        for _ in range(PULLS):
            w = 1 / ((q @ self.white.T).square() + eps**2)
            factor, _ = torch.linalg.cholesky_ex((self.white.T * w[:, None]) @ self.white)
            solved = torch.cholesky_solve(q[..., None], factor)[..., 0]
            solved = solved / solved.norm(dim=1, keepdim=True)
            q = solved.where(solved.isfinite().all(1, keepdim=True), q)
            eps = max(eps * 0.85, 1e-8)
        return q

    def held(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return of the rows on which v vanishes: which (K, m), null directions (K, N, N), their count (K,), and the
        pseudo-inverse (K, N, N) of their squares."""
        zero = self.vanish(v)
        values, vectors = torch.linalg.eigh((self.rows.T * zero[:, None]) @ self.rows)
        null = values < (10 * self.zero) ** 2
        inverse = (vectors / values.masked_fill(null, math.inf)[:, None]) @ vectors.mT
        return zero, vectors.mT * null[..., None], null.sum(1), inverse

    def climbed(self, v: Tensor, rng: Generator) -> Tensor:
        """Return directions (K, N), each gone to where more rows vanish, for as long as there is such a way."""
        v, moving = v.clone(), torch.arange(len(v), device=v.device)
        for _ in range(CLIMBS):
            moved, gains = self._step(v[moving], rng)
            moving = moving[gains]
            if not len(moving):
                break
            v[moving] = moved[gains]
        return v

    def _step(self, v: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return directions v (K, N) one step on, and whether more rows vanish there (K,)."""
        zero, null, free, inverse = self.held(v)
        spread = self.rows @ inverse  # (K, m, N)
        sole = ((spread * self.rows).sum(2) * zero).topk(min(EDGES, len(self.rows)), dim=1)
        off = spread.gather(1, sole.indices[..., None].expand(-1, -1, v.shape[1]))
        null = null[:, : EDGES + 1]
        ways = torch.cat([null, off], 1)  # (K, E, N)
        ways = ways - (ways @ v[..., None]) * v[:, None]
        size = ways.norm(dim=2)
        stays = (size[:, : null.shape[1]] > 1e-3) & (free > 1)[:, None]
        ways = ways / size.clamp_min(1e-30)[..., None]
        angle, count = self._meeting(v, ways, zero, rng)
        count[:, null.shape[1] :] -= 1
        gain, way = count.masked_fill(~torch.cat([stays, sole.values > SOLE], 1), -1.0).max(1)
        t, d = angle.gather(1, way[:, None]), ways[torch.arange(len(v), device=v.device), way]
        moved = v * t.cos() - d * t.sin()
        return moved / moved.norm(dim=1, keepdim=True), gain > 0

    def sharpest(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the directions of v (K, N) that the rows on which they vanish determine, made exact, the likeliest
        first, and whether they are firm (K,): many rows, any one of which may go.

        Likely: some example, in least squares, has these units off and the others on; then, by how many are off.
        (Where there are fewer classes than examples, mixtures vanish on units that are on for all of them.)
        """
        zero, null, free, inverse = self.held(v)
        there = (zero.sum(1) > v.shape[1]) & (free == 1)
        leverage = ((self.rows @ inverse * self.rows).sum(2) * zero).amax(1)[there]
        v, zero = null[there, 0], zero[there]
        on = torch.where(zero, -1.0, 1.0).to(v)
        likely = ((on @ torch.linalg.pinv(self.gates).T @ self.gates.T > 0) == (on > 0)).double().mean(1) > LIKELY
        zeros = zero.sum(1) * likely
        firm = (leverage < SOLE) & (zeros > MANY * zeros.max()) if len(v) else likely
        order = (zeros + len(self.rows) * firm).argsort(descending=True, stable=True)[: 4 * v.shape[1]]
        return v[order], firm[order]

    def _meeting(self, v: Tensor, ways: Tensor, zero: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return the angle (K, E) on each line v cos t - d sin t at which many further rows vanish, and how many."""
        along = ways @ self.rows.T  # (K, E, m)
        angle = torch.atan2((v @ self.rows.T)[:, None].expand_as(along), along) % math.pi
        apart = 10.0 + torch.arange(len(self.rows), device=v.device)
        ordered = torch.where(zero[:, None], apart.to(angle), angle).sort(dim=2).values
        group = torch.nn.functional.pad((ordered.diff(dim=2) > self.zero).long(), (1, 0)).cumsum(2)
        many = torch.zeros_like(ordered).scatter_add_(2, group, torch.ones_like(ordered))
        mean = torch.zeros_like(ordered).scatter_add_(2, group, ordered) / many.clamp_min(1)
        luck = 0.25 + 0.75 * torch.rand(many.shape, generator=rng, device=rng.device).to(many)
        best = ((many - 1) * luck).argmax(2, keepdim=True)  # not always the most: a mixture has several ends
        return mean.gather(2, best)[..., 0], many.gather(2, best)[..., 0]


def _drawn(mixture: Mixture, found: Tensor, rng: Generator, by_rows: int) -> Tensor:
    """Return points y (K, N) among the examples that are not found: on the plane, where found directions vanish.

    Mixtures of ``by_rows`` rows of dW; 0: random points.
    """
    n = mixture.rank
    within = torch.eye(n).to(found) - (found.T @ torch.linalg.pinv(found.T) if len(found) else 0.0)
    plane = within @ mixture.plane
    center = plane / plane.square().sum().clamp_min(1e-30)
    few = torch.randint(len(mixture.rows), (AT_ONCE, by_rows), generator=rng, device=rng.device)
    shape = (AT_ONCE, n) if by_rows == 0 else few.shape
    y = torch.randn(shape, generator=rng, device=rng.device).to(found)
    if by_rows:
        rows = mixture.rows / mixture.rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
        y = (y[..., None] * rows[few.to(found.device)]).sum(1) @ within
        over = (y @ plane)[:, None]
        away, far = y / over.where(over != 0, torch.ones_like(over)) - center, 3.0
    else:
        y = y @ within
        away, far = y - (y @ plane)[:, None] * center, 2.0
    shrink = far * center.norm() / away.norm(dim=1, keepdim=True).clamp_min(1e-30)
    drawn: Tensor = center + away * shrink.clamp_max(1 if by_rows else math.inf)
    return drawn


def _starts(
    mixture: Mixture, space: _Space, found: Tensor, ends: tuple[Tensor, Tensor], rng: Generator, turn: int
) -> Tensor:
    """Return (K, m): how much a first direction is to vanish on a row: where an example would be off; by turns, on
    N - 1 random ones."""
    if turn % 3 == 2:
        order = torch.rand(AT_ONCE, len(space.rows), generator=rng, device=rng.device).argsort(1).argsort(1)
        return (order < mixture.rank - 1).to(found)
    y = _drawn(mixture, found, rng, 0 if turn % 3 else (3 if turn else 1))
    z = (y @ mixture.basis).clamp(*ends) @ mixture.weight[space.units].T + mixture.bias[space.units]
    sharp = torch.tensor([4.0, 1000.0]).to(z).repeat(AT_ONCE // 2)[:, None]
    return (-sharp * z / z.std(dim=1, keepdim=True).clamp_min(1e-30)).sigmoid()


def _independent(v: Tensor) -> Tensor:
    """Return the first directions of v (K, N) that are independent, at most N of them."""
    chosen: list[Tensor] = []
    left = v.clone()
    for i in range(len(v)):
        size = left[i].norm()
        if size > 1e-4:
            chosen.append(v[i])
            unit = left[i] / size
            left = left - (left @ unit)[:, None] * unit
        if len(chosen) == v.shape[1]:
            break
    return torch.stack(chosen) if chosen else v[:0]


def _distinct(v: Tensor) -> Tensor:
    """Return the first of each direction of v (K, N) that comes several times."""
    same = (v @ v.T).abs() > 1 - 1e-6
    return v[same.double().argmax(1) == torch.arange(len(v), device=v.device)]


def _check_relu(mixture: Mixture, rng: Generator) -> None:
    """Raise unless what lies behind the layer does not see its units that are below 0."""
    seen, (low, high) = mixture.seen, mixture.seen.bounds
    x = low + (high - low) * torch.rand(8, *seen.input_shape, generator=rng, device=rng.device).to(mixture.basis)
    z, _, slopes = behind(seen.model, mixture.layer, x)
    if bool(slopes[z < 0].any()):
        raise AttackError(
            f"spear needs a ReLU behind {mixture.layer!r}: units below 0 must get no gradient, and here they do. "
            "Use cocktail or gs."
        )


@ATTACKS.register("spear")
@dataclass(frozen=True)
class Spear(Attack):
    """Unmix the batch behind a first fully connected layer with ReLU, exactly: find the sparse columns of dL/dZ.

    Any number of examples below the layer's width may come out; up to some tens it takes seconds. Inputs and targets
    come in no order. Several steps of plain SGD mix the same examples, and are unmixed alike.
    """

    kind = "closed form"
    applies_to = (AppliesTo(model="dense with ReLU", examples=(2, inf), default=""),)

    draws: Count = 4096  # at most
    tol: Weight = 1e-3  # of the gradient that the examples found have, relative, below which they are right

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        mixture = mixture_of(seen, "spear")
        _check_relu(mixture, rng)
        y, agree, draws = self._unmixed(mixture, rng)
        x, targets, residual = mixture.explained(y)
        sure = residual < self.tol or (seen.update.num_steps > 1 and agree > AGREE)
        details = {"draws": float(draws), "agree": agree, "rank": float(mixture.rank)}
        return Reconstruction(x.float(), targets, residual, sure and mixture.rank == seen.num_examples, details)

    def _unmixed(self, mixture: Mixture, rng: Generator) -> tuple[Tensor, float, int]:
        """Return Y (N, N), the share of units that are on and off as it says, and how many draws it took."""
        space, ends, n = _Space.of(mixture), mixture.range(), mixture.rank
        pool = sure = mixture.basis.new_zeros(0, n)
        best, draws = (mixture.on_plane(torch.eye(n).to(pool)), float(n == 1)), 0
        for turn in range(math.ceil(self.draws / AT_ONCE) if n > 1 else 0):
            off = _starts(mixture, space, sure[: n - 1], ends, rng, turn)
            start = torch.linalg.eigh((space.white.T * off[:, None]) @ space.white).eigenvectors[..., 0]
            new = _distinct(space.unwhitened(torch.cat([space.pulled(start), start[1::2]])))
            pool, firm = space.sharpest(_distinct(space.climbed(torch.cat([pool, new]), rng)))
            found, draws = _independent(pool), draws + AT_ONCE
            sure = _independent(pool[firm])
            if len(found) == n:
                y = mixture.on_plane(torch.linalg.pinv(found).T)  # dual to the columns of D
                on = (y @ mixture.basis) @ mixture.weight[space.units].T + mixture.bias[space.units] > 0
                agree = float((on == ~space.vanish(found)).double().mean())
                best = max(best, (y, agree), key=lambda pair: pair[1])
                if agree > AGREE:
                    break
        return *best, draws
