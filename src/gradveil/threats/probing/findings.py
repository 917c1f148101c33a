"""What a defence does to gradients, as a server finds out by running it, and what undoes that."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from gradveil.countermeasures import Countermeasure
from gradveil.protection.defense import Defense
from gradveil.threats.probing.affine_fit import (
    FAITHFUL,
    AffineFit,
    affine,
    likeliest,
    matched,
    one_step,
    onto,
    with_label,
)
from gradveil.threats.probing.function import DefenseFunction, Secret, close, has_slopes, repeated
from gradveil.threats.probing.noise_tests import effective
from gradveil.threats.probing.residuals import Draws, directions, draw, left_of, view_of
from gradveil.tree import Params, map_values
from gradveil.types import GaussianPrior, Observation, Update

DRAWS = 64  # secrets that are drawn, for a small model
WORK = 2e6  # numbers that all of them send, beyond which fewer are drawn
MOST = 1500  # secrets that are drawn to meet all there are, where there are few
STATES = 1024  # runs of a defence that counts them, and seconds of one that looks at the clock, that a server tries
KEPT = 3e7  # numbers that all tried maps may hold
JOINT = 700  # directions of noise that are told from others
HELD = 16  # runs that a finding is held to
WATCHED = 12  # runs whose seeds are looked at
SEARCH = 60.0  # seconds of trying seeds, beyond which it is said that they can be tried
MOST_BITS = 18  # of seeds that are tried

ROUNDS = "It rounds numbers."

View = Callable[[Observation], Observation]


@dataclass(frozen=True)
class Found:
    """What a defence does in one place."""

    what: str = ""  # in words; empty: nothing
    view: View | None = None  # of a server that undoes it
    simulate: Countermeasure | None = None
    explained: bool = True  # whether a server can do all that can be done about it
    drawn: bool = False  # whether it does something else at each run
    silent: bool = False  # nothing of the gradient is sent
    only_noise: bool = False  # the view knows of noise and nothing else
    error: str = ""  # what is wrong with calling it independent noise
    keyed: bool = False  # whether that is so whatever is declared
    changed: tuple[str, ...] = ()  # the tensors that it reaches


@dataclass(frozen=True)
class Explorer:
    """Finds out what a defence does in one place."""

    original: Defense  # that clients run meanwhile
    channel: DefenseFunction
    secrets: tuple[Secret, ...]  # of fresh clients
    examples: tuple[Tensor, ...]  # gradients of public examples, at least two
    prior: Callable[[], GaussianPrior]  # over gradients of public examples
    _maps: dict[object, list[AffineFit]] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        """Whether many runs take little time."""
        return len(self.examples[0]) * DRAWS <= WORK

    def find(self) -> Found:
        """Return what it does."""
        channel, first = self.channel, self.secrets[0]
        outs = [[channel.run(v, s) for s in self.secrets[: 4 if self.small else 2]] for v in self.examples[:2]]
        if any(out is None for row in outs for out in row):
            return Found("It fails on gradients of public examples.", explained=False)
        known = [[out for out in row if out is not None] for row in outs]
        if all(torch.equal(out, v) for v, row in zip(self.examples, known, strict=False) for out in row):
            return Found()
        if any(not torch.equal(row[0], out) for row in known for out in row[1:]):
            return self._secret()
        later = channel.run(self.examples[0], channel.after(first))
        if later is None or not torch.equal(later, known[0][0]):
            said = "It draws nothing secret, and another number of runs changes what it does"
            return self._listed(said, self._states(), first)
        sooner = channel.run(self.examples[0], replace(first, clock=(first.clock or 0.0) - 1000))
        if sooner is None or not torch.equal(sooner, known[0][0]):
            return self._listed("It draws nothing secret, and looks at the clock", self._seconds(), first)
        return self._open()

    def _open(self) -> Found:
        """Nothing secret is drawn: the server can do all that the client did."""
        first = self.secrets[0]
        known = affine(self.channel, first, self.examples)
        simulated = self._simulate(first)
        if known is not None and known.known is not None and not bool(known.known.any()):
            return Found(f"It draws nothing secret: {known.what}.", silent=True)
        if known is not None:
            return Found(f"It draws nothing secret: {known.what}.", self._undo(lambda: [first]), simulated)
        what, view, explained, _ = self._remains(self.secrets[:1], ())
        return Found(f"It draws nothing secret. {what}", view, simulated, explained or self._has_slopes(first))

    def _listed(self, said: str, tried: Callable[[], Iterable[Secret]], first: Secret) -> Found:
        """What changes can be listed: a server tries all of it."""
        known = affine(self.channel, first, self.examples)
        if known is None:
            return Found(f"{said}.", explained=False, drawn=True)
        return Found(f"{said}: {known.what}. A server tries them all.", self._undo(tried), drawn=True)

    def _states(self) -> Callable[[], Iterable[Secret]]:
        most = max(64, min(STATES, int(KEPT / len(self.examples[0]))))
        met = [self.secrets[0]]

        def states() -> Iterator[Secret]:
            while len(met) < most and vars(met[-1].state) != vars(self.original):
                met.append(self.channel.after(met[-1]))
            return iter(met)

        return states

    def _seconds(self) -> Callable[[], Iterable[Secret]]:
        first = self.secrets[0]
        begun = int(first.clock or 0.0) - 5

        def seconds() -> Iterator[Secret]:
            return (replace(first, clock=float(t)) for t in range(begun, min(int(time.time()) + 2, begun + STATES)))

        return seconds

    def _secret(self) -> Found:
        what, view, explained, faithful = self._remains(self.secrets[:3], None)
        if faithful:
            return Found(what, view, drawn=True)
        v, count = self.examples[0], int(max(6, min(DRAWS, WORK / len(self.examples[0]))))
        others = self.secrets[-min(count // 2, 16) :]
        drawn = [draw(self.channel, some, g) for some, g in ((self.secrets[:count], v), (others, 3 * v))]
        draws = tuple(d for d in drawn if d is not None)
        few, share = self._few(draws)
        known = affine(self.channel, few[0], self.examples) if few else None
        if known is not None and share > 0.9:
            silent = known.known is not None and not bool(known.known.any())
            said = f"only about {len(few)} different ones ever occur, and a server can try them all"
            what = f"Its secret is one of about {len(few)}: {known.what}, in another way for each."
            return Found(what, None if silent else self._undo(lambda: few), drawn=True, silent=silent, error=said)
        keyed = self._keyed() if self.small else None
        if keyed is not None and keyed.what:
            return keyed
        said = "" if keyed is None else keyed.error
        joint = self._jointly(draws[0]) if self.small and draws else None
        if joint is not None:
            return Found(*joint, drawn=True, error=said, keyed=bool(said))
        what, view, explained, _ = self._remains(self.secrets[: 12 if self.small else 3], draws)
        only = view is not None and (" noise of " in what or what == ROUNDS)
        error = said or (f"in {share:.0%} of all draws it is one of {len(few)}" if few else "")
        explained = explained and not (said and only)  # the noise can be taken off, and was not
        return Found(what, view, None, explained, True, only_noise=only, error=error, keyed=bool(said))

    def _keyed(self) -> Found | None:
        """Return that all generators are seeded with small numbers, which a server tries; None where they are not."""
        v, first = self.examples[0], self.secrets[0]
        seeds = [self.channel.seeds(v, secret) for secret in self.secrets[:WATCHED]]
        used = {seed for row in seeds for seed in row}
        if not all(seeds) or len(used) < 2 or not 0 <= min(used) <= max(used) < 2**32:
            return None
        moved = [max(place) for place in zip(*seeds, strict=False) if len(set(place)) > 1]
        bits = max(sum(most.bit_length() for most in moved) if len({*map(len, seeds)}) == 1 else 0, 1)
        forced = [replace(first, forced=row) for row in seeds[1:3]]
        again = [
            (self.channel.run(v, a), self.channel.run(v, b)) for a, b in zip(forced, self.secrets[1:], strict=False)
        ]
        if any(a is None or b is None or not torch.equal(a, b) for a, b in again):
            return None  # the seed is not all there is
        if bits > 32:
            return None
        said = f"its seeds have no more than {bits} bits, which a server tries"
        what = f"All that it draws follows from a seed of {bits} bits"
        if any(len({*row}) > 1 for row in seeds):
            return Found(error=said)  # of several generators: what they draw is looked at, too
        known = affine(self.channel, forced[0], self.examples)
        began = time.process_time()
        affine(self.channel, forced[1], self.examples, known)
        cost = (time.process_time() - began) * 2**bits
        if known is None or cost > SEARCH:
            return Found(f"{what}.", None, None, False, True, error=said, keyed=True)
        view: View | None
        if 2**bits <= KEPT / (3 * len(v)):
            view = self._undo(lambda: (replace(first, forced=(i,)) for i in range(2**bits)))
            return Found(f"{what}: {known.what}.", view, drawn=True, error=said, keyed=True)
        view = self._searched(bits) if known.adds and bits <= MOST_BITS else None
        return Found(f"{what}: {known.what}.", view, None, view is not None, True, error=said, keyed=True)

    def _searched(self, bits: int) -> View:
        """Return the view that takes off what the seed adds under which an update looks most like public ones."""
        zeros, prior, first = torch.zeros_like(self.examples[0]), self.prior(), self.secrets[0]
        some = torch.linspace(0, len(zeros) - 1, min(48, len(zeros))).long()
        spread = (prior.factor[some].square().sum(1) + prior.ridge).sqrt()

        def added(seed: int) -> Tensor:
            out = self.channel.run(zeros, replace(first, forced=(seed,)))
            return zeros if out is None else out

        table = lru_cache(maxsize=1)(lambda: torch.stack([added(seed)[some] for seed in range(2**bits)]))

        def view(seen: Observation) -> Observation:
            shown = one_step(seen)
            y = self.channel.flat(shown.update.gradient)
            away = (y[some] - table() - prior.mean[some]) / spread
            found = y - added(int(away.square().sum(1).argmin()))
            return replace(shown, update=replace(shown.update, gradient=self.channel.tree(found)))

        return view

    def _few(self, draws: Sequence[Draws]) -> tuple[list[Secret], float]:
        """Return the secrets that occur more than once, and how often one of them does; nothing where none does."""
        if not any(len(rows.unique(dim=0)) < len(rows) for one in draws[:1] for rows in list(one.sent.values())[:1]):
            return [], 0.0
        return repeated(
            lambda s: self.channel.run(self.examples[0], s), self.secrets if self.small else self.secrets[:64]
        )

    def _remains(self, tried: Sequence[Secret], draws: tuple[Draws, ...] | None) -> tuple[str, View | None, bool, bool]:
        """Return in words what is left of the gradient, the view that matches it, whether that is all there is, and
        whether it is all but a few numbers."""
        pairs = [(v, out) for v in self.examples[:2] for out in self.channel.runs(v, tried)]
        if pairs and all(close(_unit(sent), _unit(true)) for true, sent in pairs):
            return "It changes the length of the gradient and nothing else.", self._direction, True, True
        runs = [(self.channel.tree(true), self.channel.tree(sent)) for true, sent in pairs]
        left = {n: left_of(n, [(true[n], sent[n]) for true, sent in runs], draws) for n in self.channel.parts}
        if all(one.lost for one in left.values()):
            return "What it leaves of the gradient was not found out.", None, False, False
        said = [f"of {name} it leaves {one.what}" for name, one in left.items() if one.changed]
        more = f", and so on for {len(said) - 1} more tensors" if len(said) > 1 else ""
        what = f"{said[0][0].upper()}{said[0][1:]}{more}." if said else ROUNDS
        faithful = all(not one.changed or one.what in FAITHFUL for one in left.values())
        return what, view_of(left, self.channel.where), True, faithful

    def _jointly(self, draws: Draws) -> tuple[str, View] | None:
        """Return the view that takes off the few directions in which all noise lies, over all tensors together."""
        noise = torch.cat([draws.noise(name) for name in draws.sent], 1)
        pairs = len(noise) // 2
        few, n = effective(noise[:pairs] - noise[pairs : 2 * pairs]), len(self.examples[0])
        if not few < min(noise.shape[1] / 4, JOINT):
            return None
        count = min(int(2 * few) + 64, len(self.secrets) - HELD, int(KEPT / n))
        more = self.channel.runs(self.examples[0], self.secrets[:count])
        basis = directions(torch.stack(more) - self.examples[0])
        others = self.channel.runs(self.examples[1], self.secrets[-HELD:])
        if basis is None or not all(_inside(out - self.examples[1], basis) for out in others):
            return None
        without = onto(self.channel, basis, off=True)
        what = f"What it adds lies in {len(basis)} directions of {n}, which a server takes off."
        return what, lambda seen: matched(seen, self.channel, without)

    def _direction(self, seen: Observation) -> Observation:
        seen = one_step(seen)
        update = replace(seen.update, gradient=_unit_tree(seen.update.gradient))
        return replace(seen, update=update, simulate=_unit_tree, simulate_on="update")

    def _undo(self, tried: Callable[[], Iterable[Secret]]) -> View:
        """Return the view of a server that inverts the likeliest of the maps which these secrets give."""
        where = self.channel.where
        forward = lru_cache(maxsize=16)(lambda known: _forward(self.channel, known))

        def view(seen: Observation) -> Observation:
            once = where == "update" or (seen.update.num_steps == 1 and seen.update.rule.bare.is_plain)
            shown = seen.as_one_step() if where == "gradient" and once else seen
            y = self.channel.flat(shown.update.gradient)
            maps = self._fitted(shown.update, tried())
            known = maps[0] if len(maps) == 1 else likeliest(y, maps, self.prior())
            if not once:  # the steps after the first hang on what the defence made of those before
                return replace(seen, simulate=forward(known), simulate_on=where)
            seen = replace(shown, update=replace(shown.update, gradient=self.channel.tree(known.undone(y))))
            if known.known is None:
                return seen
            return with_label(replace(seen, weights=seen.weights | self.channel.tree(known.known)))

        return view

    def _fitted(self, update: Update, tried: Iterable[Secret]) -> list[AffineFit]:
        """Return the map of each secret for clients of this kind; each is worked out once."""
        told = (update.lr, update.num_examples, update.num_steps, update.batch_size)
        maps = self._maps.setdefault(told, [])
        channel = replace(self.channel, like=_told(self.channel.like, told))
        for i, secret in enumerate(tried):
            if i >= len(maps):
                maps.append(affine(channel, secret, self.examples, maps[0] if maps else None) or maps[0])
        return maps

    def _simulate(self, secret: Secret) -> Countermeasure:
        """Return the server that runs the defence on its own trials."""
        channel = self.channel

        @lru_cache(maxsize=16)
        def transform(told: tuple[float, int, int, int | None]) -> Callable[[Params], Params]:
            return lambda tree: replace(channel, like=_told(channel.like, told)).sent(tree, secret)

        def view(seen: Observation) -> Observation:
            u = seen.update
            run = transform((u.lr, u.num_examples, u.num_steps, u.batch_size))
            return replace(seen, simulate=run, simulate_on=channel.where)

        why = "Runs the defence on its own trials inside the objective: it draws nothing that the server does not know."
        return Countermeasure("simulate", why, view)

    def _has_slopes(self, secret: Secret) -> bool:
        """Return whether torch's derivative of the defence says how it moves."""
        point, step = self.examples[0].double(), 1e-3 * self.examples[1].double()

        def run(v: Tensor) -> Tensor:
            return self.channel.flat(self.channel.sent(self.channel.tree(v), secret)).to(v)

        return has_slopes(run, point, step)


def _told(like: Update, told: tuple[float, int, int, int | None]) -> Update:
    lr, examples, steps, size = told
    return replace(like, lr=lr, num_examples=examples, num_steps=steps, batch_size=size)


def _inside(noise: Tensor, basis: Tensor) -> bool:
    return close(noise @ basis.T @ basis, noise)


def _forward(channel: DefenseFunction, known: AffineFit) -> Callable[[Params], Params]:
    def forward(tree: Params) -> Params:
        flat = channel.flat(tree)
        return channel.tree(known.forward(flat) + known.constant.to(flat))

    return forward


def _unit(v: Tensor) -> Tensor:
    unit: Tensor = v / v.norm().clamp_min(1e-37)
    return unit


def _unit_tree(tree: Params) -> Params:
    size = torch.stack([value.square().sum() for value in tree.values()]).sum().clamp_min(1e-37).sqrt()
    return map_values(lambda value: value / size, tree)
