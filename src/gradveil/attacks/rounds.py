"""A client's updates of several rounds, from the same examples: those that were made at the same weights are one.

The sum of their log likelihoods hangs on them only by their mean, each entry weighed by how surely and how often it was
seen, so nothing is lost: R rounds with independent noise of standard deviation σ are one with σ/√R.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, pi

import torch
from torch import Tensor

from gradveil.errors import AttackError
from gradveil.tree import Params
from gradveil.types import Observation


def by_weights(seen: Observation) -> list[list[Observation]]:
    """Return all rounds, this one first, those together that were made in the same way at the same weights."""
    groups: list[list[Observation]] = []
    for s in (seen, *seen.rounds):
        if s.num_examples != seen.num_examples:
            raise AttackError(
                f"The rounds of a client must be of the same examples: one is of {s.num_examples}, another of "
                f"{seen.num_examples}."
            )
        alike = next((group for group in groups if _alike(group[0], s)), None)
        if alike is None:
            groups.append(alike := [])
        alike.append(replace(s, rounds=()))
    return groups


def pooled(seen: Observation) -> Observation:
    """Return the rounds with those at the same weights averaged; ``rounds`` holds those at other weights."""
    if not seen.rounds:
        return seen
    first, *rest = map(mean_round, by_weights(seen))
    return replace(first, rounds=tuple(rest))


def at_one_model(seen: Sequence[Observation]) -> list[Observation]:
    """Return the rounds of each client as one update; refuse where they were made at different weights."""
    found = [pooled(s) for s in seen]
    if any(s.rounds for s in found):
        raise AttackError("The rounds were made at different weights, and this attack fits one model. Use newton.")
    return found


def mean_round(rounds: Sequence[Observation]) -> Observation:
    """Return the first round with the mean update of all, and the noise and weights of that mean."""
    first = rounds[0]
    if len(rounds) == 1:
        return first
    gradient: Params = {}
    weights: Params = {}
    noise: dict[str, float] = {}
    for name in dict.fromkeys(name for s in rounds for name in s.update.gradient):
        have = [s for s in rounds if name in s.update.gradient]
        sure = [s for s in have if not s.noise.get(name)]  # beside these, the noisy ones say nothing
        told = torch.stack([s.update.gradient[name] for s in sure or have])
        sizes = torch.stack([entry_weights(s, name) / (s.noise.get(name) or 1.0) ** 2 for s in sure or have])
        total = sizes.sum(0)
        most = total.max().clamp_min(torch.finfo(total.dtype).tiny)
        gradient[name] = (sizes * told).sum(0) / total.where(total > 0, torch.ones_like(total))
        if any(name in s.weights for s in have):
            weights[name] = total / most
        if not sure:
            noise[name] = float(most) ** -0.5
    return replace(first, update=replace(first.update, gradient=gradient), weights=weights, noise=noise, rounds=())


def entry_weights(s: Observation, name: str) -> Tensor:
    """Return the weight of each entry of a tensor, shaped like it: 1 where none is given."""
    g = s.update.gradient[name]
    return s.weights[name].to(g).expand_as(g) if name in s.weights else torch.ones_like(g)


def _alike(a: Observation, b: Observation) -> bool:
    """Whether the client did the same in both rounds, save for random draws."""
    trained = [(s.update.num_steps, s.update.lr, s.update.batch_size, s.update.rule, s.loss) for s in (a, b)]
    if trained[0] != trained[1] or a.simulate is not b.simulate or a.simulate_on != b.simulate_on:
        return False
    if a.model is b.model:
        return True
    mine, other = a.model.state_dict(), b.model.state_dict()
    alike = type(a.model) is type(b.model) and a.model.training == b.model.training and mine.keys() == other.keys()
    return alike and all(torch.equal(value, other[n]) for n, value in mine.items())


FLOOR = 1e-3  # of a tensor's root mean square: closer than this nothing is told apart


@dataclass(frozen=True)
class SentRounds:
    """What was sent in T rounds at the same weights: R entries of K tensors, in float64."""

    names: tuple[str, ...]
    sizes: Tensor  # (K,) entries of each tensor
    seen: Tensor  # (T, R)
    weights: Tensor  # (T, R), 0 where an entry was not seen
    noise: Tensor  # (T, 1, K), known variance; 0: not known

    @classmethod
    def of(cls, rounds: Sequence[Observation]) -> "SentRounds":
        like = {n: s.update.gradient[n] for s in rounds for n in s.visible}
        seen = torch.stack(
            [flat({n: s.update.gradient.get(n, torch.zeros_like(g)) for n, g in like.items()}) for s in rounds]
        )
        weights = torch.stack([flat({n: _weight(s, n, g) for n, g in like.items()}) for s in rounds])
        noise = torch.tensor([[[s.noise.get(n, 0.0) ** 2 for n in like]] for s in rounds]).to(seen)
        return cls(tuple(like), torch.tensor([g.numel() for g in like.values()]).to(seen), seen, weights, noise)

    def by_tensor(self, entries: Tensor) -> Tensor:
        """Return the mean over each tensor (..., K) of numbers by entry (..., R)."""
        return torch.stack([part.mean(-1) for part in self._split(entries)], -1)

    def likelihood(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the log likelihood (m,) of all rounds for means (m, R) and variances by tensor; 0: what suits best."""
        apart, count = [], []  # by tensor
        for y, w, m in zip(self._split(self.seen), self._split(self.weights), self._split(mean), strict=True):
            apart.append(((w * y * y).sum(1, keepdim=True) - 2 * (w * y) @ m.T + w @ (m * m).T).clamp_min(0))  # (T, m)
            count.append(w.sum(1, keepdim=True))
        squares, n = torch.stack(apart, -1), torch.stack(count, -1)  # (T, m, K), (T, 1, K)
        least = self._least
        best = (squares.sum(0) / n.sum(0).clamp_min(1)).clamp_min(least)  # (m, K)
        v = torch.where(variance > 0, variance + least, best)
        return -(squares / v + n * (v.log() + log(2 * pi))).sum((0, 2)) / 2

    def drawn_likelihood(self, mean: Tensor, runs: Tensor) -> Tensor:
        """Return the log likelihood (m,) where draws change what is sent as they change these runs (r, R) of zero mean.

        A Gaussian: the runs' own covariance, and a share τ of each tensor's variance in every direction, the τ that
        suits a candidate best. What draws change alike for all (the order of batches, a scale) so counts for little.
        """
        level = (self.by_tensor(runs.square().mean(0)) + self._least).repeat_interleave(self.sizes.long())
        total = torch.zeros(len(mean), dtype=torch.float64, device=mean.device)
        shares = torch.logspace(-8, 4, 100, dtype=torch.float64, device=mean.device).view(-1, 1, 1)
        for w, seen in self._by_weights():
            scale = (w / level).sqrt()
            basis, size, _ = torch.linalg.svd((scale * runs).T / len(runs) ** 0.5, full_matrices=False)
            centre, own = mean.mean(0), size.square()
            y, m = scale * (seen - centre), scale * (mean - centre)  # (T, R), (m, R)
            along = ((y @ basis)[:, None] - m @ basis).square()  # (T, m, r)
            squares = y.square().sum(1, keepdim=True) - 2 * y @ m.T + m.square().sum(1)  # (T, m)
            across = (squares - along.sum(2)).clamp_min(0)
            value = across / shares + (w.sum() - len(own)) * shares.log()  # (shares, T, m)
            for part, of in zip(along.unbind(2), own, strict=True):
                value += part / (shares + of) + (shares + of).log()
            total -= (value.min(0).values + (w * (2 * pi * level).log()).sum()).sum(0) / 2
        return total

    def _by_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weights (R,) and the rounds (T, R) that have them."""
        left = torch.arange(len(self.seen), device=self.seen.device)
        while len(left):
            w = self.weights[left[0]]
            same = (self.weights[left] == w).all(1)
            yield w, self.seen[left[same]]
            left = left[~same]

    @property
    def _least(self) -> Tensor:
        """The variance (K,) below which nothing is told apart; tensors that are nearly zero say little."""
        size = (self.weights * self.seen.square()).mean(0)
        level = torch.maximum(self.by_tensor(size), FLOOR**2 * size.mean())
        return (FLOOR**2 * level).clamp_min(torch.finfo(torch.float32).tiny)

    def _split(self, entries: Tensor) -> tuple[Tensor, ...]:
        return torch.split(entries, [int(size) for size in self.sizes], -1)


def _weight(s: Observation, name: str, like: Tensor) -> Tensor:
    return entry_weights(s, name).to(like) if name in s.update.gradient else torch.zeros_like(like)


def flat(update: Params) -> Tensor:
    """Return all entries of an update, in float64."""
    return torch.cat([value.reshape(-1) for value in update.values()]).double()
