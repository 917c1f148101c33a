"""Rows of a table from several starts that are pooled cell by cell (TabLeak, Vero et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, in_groups
from gradveil.attacks.fedavg import local_training, ready_to_unroll, unrolled_stack
from gradveil.attacks.search.matching import Matching
from gradveil.attacks.search.restarts import adam_search, children_of
from gradveil.errors import AttackError
from gradveil.modalities.table import Table
from gradveil.ranges import Count, Order, Positive, Weight
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("tableak")
@dataclass(frozen=True)
class TabLeak(Attack):
    """Match the direction of the update from several starts, and pool their rows cell by cell (Vero et al. 2023).

    Categories are the softmax of free numbers, so that the search may pass between them; numbers stay in their
    column's range. The rows of each start are paired with those of the best one, which has the lowest distance; a
    number is the median over the starts, a category the one with the largest mean share. How many starts agree with
    the pooled cell is the attacker's own confidence in it. Local steps are unrolled, as in ``fedavg``. Departures:
    agreement in place of entropy; starts that end at more than ``within`` times the best one's distance are not pooled.
    """

    kind = "search"
    applies_to = (AppliesTo(("table",), signs=True, default="steps=400,starts=4", turn=-1),)

    steps: Count = 1000  # evaluations per start
    starts: Count = 8
    lr: Positive = 0.1  # in standard deviations of a column
    within: Order = 10.0  # times the best start's distance: what ends farther away is not pooled
    tol: Weight = 1e-4  # cosine distance at which the update counts as matched

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        refuse_all_but_tables(seen, "tableak")
        ready = ready_to_unroll(seen, rngs)
        found = in_groups(ready, rngs, lambda s: (local_training(s), s.modality), self._all_starts)
        return [self._pooled(s, its) for s, its in zip(ready, found, strict=True)]

    def _all_starts(self, seen: list[Observation], rngs: list[Generator]) -> list[list[Reconstruction]]:
        table = _table(seen[0])

        def stack(seen: Sequence[Observation]) -> Matching:  # what is searched for are free numbers behind the rows
            plain = unrolled_stack(seen)
            return replace(plain, trial=lambda x, y: plain.trial(in_range(table, x), y))

        start = "uniform" if table.scaling is None else "normal"
        search = adam_search(self.steps, self.lr, tol=self.tol, start=start, stack=stack)
        each = [child for rng in rngs for child in children_of(rng, self.starts)]
        found = search.run([s for s in seen for _ in range(self.starts)], each)
        return [found[i : i + self.starts] for i in range(0, len(found), self.starts)]

    def _pooled(self, seen: Observation, starts: Sequence[Reconstruction]) -> Reconstruction:
        table, ended = _table(seen), sorted(starts, key=lambda start: start.objective)
        best = ended[0]
        if best.raw is None:
            return best  # no start stayed finite
        most = max(self.within * best.objective, self.tol)
        held = [s for s in ended if s.raw is not None and s.objective <= most] or [best]
        rows = [in_range(table, s.raw).cpu() for s in held if s.raw is not None]  # (N, D) each
        first = table.unit(rows[0], seen.bounds)
        paired = torch.stack([x[table.order(table.unit(x, seen.bounds), first)] for x in rows])  # (S, N, D)
        numeric = table.numeric[table.owner]
        pooled = torch.where(numeric, paired.median(dim=0).values, paired.mean(dim=0))
        agree = table.right(table.unit(paired, seen.bounds), table.unit(pooled, seen.bounds)).float().mean(dim=0)
        details = best.details | {"starts": float(len(starts)), "pooled": float(len(held))}
        details["confidence"] = float(agree.mean())
        return replace(best, inputs=pooled.to(best.inputs), details=details, raw=None, confidence=agree)


def refuse_all_but_tables(seen: Sequence[Observation], attack: str) -> None:
    """Raise where an attack on tables is to find something else."""
    for s in seen:
        if not isinstance(s.modality, Table):
            raise AttackError(f"{attack} rebuilds rows of tables, and these are {s.modality.many}. Use dlg or gs.")


def _table(seen: Observation) -> Table:
    assert isinstance(seen.modality, Table)
    return seen.modality


def in_range(table: Table, free: Tensor) -> Tensor:
    """Return rows in the table's terms from free numbers (..., D): shares of categories, and numbers in their range.

    Numbers are sought in standard deviations from their column's mean, so that a step is as long in every column. One
    beyond its range counts as the end of it, but has its slope, so that it finds back.
    """
    if table.scaling is not None:
        mean, std = (torch.tensor(values).to(free) for values in table.scaling)
        free = mean + std * free
    kept = free + (free.clamp(0.0, 1.0) - free).detach()
    return table.relaxed(torch.where(table.numeric[table.owner].to(free.device), kept, free))
