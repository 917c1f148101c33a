"""Structure of noise: directions, entries, runs and rounds that carry less of it than the rest.

A server has the defence's code, so it can hand it normal numbers of its own. Where what is sent is linear in them,
y = f(g) + M z, products with M and its transpose show which directions z does not reach, whatever the size of M. Where
it is not, samples show entries that move together, sums that stand still, and entries or runs that are nearly silent.
"""

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from gradveil.countermeasures import Tier
from gradveil.threats.probing.affine_fit import matched, one_step, onto, with_label
from gradveil.threats.probing.function import DefenseFunction, Secret, Tried, close
from gradveil.threats.probing.noise_tests import odd_law, tied
from gradveil.threats.probing.residuals import small
from gradveil.types import Observation

QUIET = 1e-4  # of the mean variance: a direction below it carries no noise to speak of
STILL = 1e-11  # the same: where the search for it ends
GONE = 1e-7  # of a random vector's square: what is left of it where noise goes in all directions
STEPS = 60  # of conjugate gradients
KEPT = 320  # quiet directions that a server matches
HELD = 3e7  # numbers that these may hold
SMALL = 0.05  # of the standard deviation: entries below it are nearly silent
MANY = 0.15  # share of such entries; Gaussian noise has 0.04, Laplace's 0.07
ROUNDS = 16  # of one client, one after the other
CALLS = 160  # of one client, where a run takes little time
DRAWS = 256  # of clients, for a small model
WORK = 2e6  # numbers that all of them send
BITS = 16  # runs whose bits are compared
AGAIN = 6e6  # numbers in which noise is looked for that comes up again
MANTISSA = 20  # bits of a number that are looked at

View = Callable[[Observation], Observation]


@dataclass(frozen=True)
class Flaw:
    """Why noise is not what independent noise is, and what a server does about it."""

    what: str  # goes on after "Independent noise is declared, and"
    view: View | None = None
    tier: Tier = "adaptive"


class _Injected(TorchFunctionMode):
    """Within, normal numbers come from a vector, but for calls that are public; without one they are counted."""

    def __init__(self, given: Tensor | None = None, public: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.given, self.public, self.used, self.calls = given, public, 0, list[tuple[float, ...]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))  # so that a generator moves on as it does otherwise
        if func not in (torch.randn, torch.randn_like, torch.normal, torch.Tensor.normal_):
            return made
        self.calls.append(tuple(made.detach().flatten()[:4].tolist()))
        if len(self.calls) - 1 in self.public:
            return made
        mean, std = 0.0, 1.0
        if func in (torch.normal, torch.Tensor.normal_):
            given = dict(zip(("mean", "std"), args if func is torch.normal else args[1:], strict=False)) | (
                kwargs or {}
            )
            mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        begun, self.used = self.used, self.used + made.numel()
        drawn = torch.zeros(made.shape) if self.given is None else self.given[begun : self.used].reshape(made.shape)
        found = mean + std * drawn.to(made)
        return made.copy_(found) if func is torch.Tensor.normal_ else found


@dataclass(frozen=True)
class NoiseMap:
    """M of y = f(g) + M z: how normal numbers come into what is sent of one gradient, for one secret."""

    trials: Tried
    number: int  # of the client
    vector: Tensor
    count: int  # of normal numbers
    base: Tensor  # f(g)
    public: frozenset[int] = frozenset()  # calls that draw the same whatever the secret is

    @classmethod
    def of(cls, trials: Tried, number: int, vector: Tensor) -> "NoiseMap | None":
        """Return the map; None where normal numbers come in otherwise, or none do."""
        try:
            runs = [_Injected(), _Injected()]
            for i, mode in enumerate(runs):
                with mode:
                    trials.sent(vector, number + i)
            same = zip(*(run.calls for run in runs), strict=False)
            mode = _Injected(public=frozenset(i for i, (one, other) in enumerate(same) if one == other))
            with mode:
                base = trials.sent(vector, number).detach()
            found = cls(trials, number, vector, mode.used, base, mode.public)
            if not mode.used:
                return None
            a, b = (torch.randn(mode.used, generator=Generator().manual_seed(i)).to(vector) for i in (1, 2))
            of_a, of_b, of_both = found(a), found(b), found(a - 2 * b)
            straight = close(of_both, of_a - 2 * of_b, base) and bool(of_a.any())
            back = found.back(of_a)
            return found if straight and abs(float(back @ b) / float(of_a @ of_b) - 1) < 1e-2 else None
        except Exception:  # whatever the defence's code makes of numbers that are not its own
            return None

    def __call__(self, z: Tensor) -> Tensor:
        """Return M z."""
        with _Injected(z, self.public):
            return self.trials.sent(self.vector, self.number).detach() - self.base

    def back(self, v: Tensor) -> Tensor:
        """Return Mᵀ v."""
        z = torch.zeros(self.count, dtype=v.dtype, device=v.device, requires_grad=True)
        with torch.enable_grad(), _Injected(z, self.public):
            out = self.trials.sent(self.vector, self.number)
        return torch.autograd.grad(out @ v, z)[0]

    def variance(self) -> float:
        """Return the mean variance of an entry."""
        z = torch.randn(2, self.count, generator=Generator().manual_seed(3)).to(self.base)
        return sum(float(self(one).square().mean()) for one in z) / 2

    def unreached(self, start: Tensor, variance: float) -> Tensor | None:
        """Return what is left of a vector when all that noise reaches is taken off; None: nothing, or too slow."""
        rest, whole = start.clone(), float(start @ start)
        slope = self.back(rest)
        step, size = slope, float(slope @ slope)
        for _ in range(STEPS):
            left = float(rest @ rest)
            if left <= GONE * whole:
                return None
            if size <= STILL * variance * left:
                break
            pushed = self(step)
            rest = rest - size / float(pushed @ pushed) * pushed
            slope = self.back(rest)
            before, size = size, float(slope @ slope)
            step = slope + size / before * step
        return rest if size <= QUIET * variance * float(rest @ rest) else None


def quiet_directions(trials: Tried) -> Flaw | None:
    """Return that noise leaves directions alone, with the view that matches these where they are always the same."""
    examples, noise = trials.examples, NoiseMap.of(trials, 0, trials.examples[0])
    if noise is None:
        return None
    variance, n = noise.variance(), len(examples[0])
    live = trials.sent(examples[0]).ne(0).to(examples[0])  # others are not sent
    rng = Generator().manual_seed(4)
    starts = [live * torch.randn(n, generator=rng).to(live) for _ in range(3)]
    found = [rest for start in starts if (rest := noise.unreached(start, variance)) is not None]
    if len(found) < 2:
        return None
    share = sum(float(r @ r) / n for r in found) / len(found)
    said = f"about {max(1, round(share * n))} of {n} directions carry none"
    along = examples[0] * live
    part = noise.unreached(along, variance)
    if part is not None and share * n < 200 and float(part @ part) > 0.99 * float(along @ along):
        return Flaw(f"{said}, among them that of the gradient itself, which tells candidates apart")
    for number, example in ((0, examples[1]), (1, examples[0])):
        there = NoiseMap.of(trials, number, example)
        if there is None or any(float(there.back(r).square().sum()) > 1e-2 * variance * float(r @ r) for r in found):
            return Flaw(f"{said}, others for other gradients or draws")
    count = int(min(KEPT, HELD / n, 0.8 * share * n + 1))
    while len(found) < count:
        rest = noise.unreached(live * torch.randn(n, generator=rng).to(live), variance)
        if rest is None:
            break
        found.append(rest)
    return _matched(f"{said}, always the same ones", trials, torch.stack(found))


def _matched(what: str, trials: Tried, rows: Tensor) -> Flaw:
    """Return the flaw with the view that matches what an update is along these rows, if it is the gradient's there."""
    function, examples = trials.function, trials.examples
    _, sizes, basis = torch.linalg.svd(rows.double(), full_matrices=False)
    basis = basis[sizes > 1e-4 * sizes[0]].to(examples[0])
    noise = 0.0  # that is left along the rows
    for number, vector in ((1, examples[1]), (2, examples[0])):
        out = function.run(vector, trials.secrets[number])
        if out is None or (away := float((basis @ (out - vector)).norm())) > float((basis @ vector).norm()):
            return Flaw(what)
        noise = max(noise, away / sqrt(len(vector)))
    along = onto(function, basis)
    return Flaw(what, lambda seen: matched(seen, function, along, noise))


def sampled_flaws(trials: Tried, sent: Tensor, middle: Tensor) -> list[Flaw]:
    """Return what draws (K, n) at one gradient show: entries that move together, sums that stand still, silence."""
    tests = (_silent_runs,) if _rounded(sent) else (_silent_runs, _silent_entries, _together, _still_sums)
    return [flaw for test in tests if (flaw := test(trials, sent - middle, sent)) is not None]


def _rounded(sent: Tensor) -> bool:
    return len(sent[:, :256].unique()) < 0.1 * sent[:, :256].numel()


def _silent_runs(trials: Tried, noise: Tensor, sent: Tensor) -> Flaw | None:
    sizes = noise.square().mean(1).sqrt()
    silent = sizes < 0.1 * sizes.median()
    if not bool(silent.any()) or bool(silent.all()):
        return None

    def view(seen: Observation) -> Observation:
        """Take the quietest round."""
        rounds = [seen, *seen.rounds]
        sizes = [sum(float(g.square().sum()) for g in one.update.gradient.values()) for one in rounds]
        return replace(rounds[sizes.index(min(sizes))], rounds=())

    return Flaw(f"in {float(silent.double().mean()):.1%} of all draws there is hardly any", view, "multi-round")


def _silent_entries(trials: Tried, noise: Tensor, sent: Tensor) -> Flaw | None:
    shares: dict[str, float] = {}
    quiet: dict[str, float] = {}
    for name, part in trials.function.parts.items():
        moved = noise[:, part][:, (sent[:, part] != 0).any(0)]
        std = float(moved.square().mean().sqrt()) if moved.numel() else 0.0
        tiny = moved.abs() < SMALL * std
        share = float(tiny.double().mean()) if moved.numel() else 0.0
        if moved.numel() >= 1000 and share > MANY:
            shares[name], quiet[name] = share, float(moved[tiny].square().mean().sqrt())
    if not shares:
        return None
    name = max(shares, key=lambda n: shares[n])
    what = f"{shares[name]:.0%} of the numbers of {name} carry less than a twentieth of it"

    def view(seen: Observation) -> Observation:
        """Match the entries that are small: where noise is loud they would not be."""
        seen = one_step(seen)
        weights = {n: small(seen.update.gradient[n], share, 4) for n, share in shares.items()}
        others = {n: torch.zeros_like(g) for n, g in seen.update.gradient.items() if n not in shares}
        seen = replace(seen, weights=seen.weights | weights | others, noise=seen.noise | quiet)
        return with_label(seen, list(trials.function.parts))

    return Flaw(what, view)


def _together(trials: Tried, noise: Tensor, sent: Tensor) -> Flaw | None:
    """Entries with the same signature over all draws, up to a factor."""
    sizes = noise.norm(dim=0)
    live = (sizes > 1e-3 * sizes.median()).nonzero().flatten()
    unit = (noise[:, live] / sizes[live]).T.double()  # (entries, draws)
    keys = torch.randn(unit.shape[1], 2, generator=Generator().manual_seed(5), dtype=torch.float64)
    unit = unit * (unit @ keys[:, :1]).sign()
    order = (unit @ keys[:, 1]).argsort()
    alike = (unit[order[1:]] * unit[order[:-1]]).sum(1) > 0.999
    if int(alike.sum()) < max(2, 0.002 * len(live)):
        return None
    group = torch.cat([torch.zeros(1, dtype=torch.long), (~alike).long().cumsum(0)])
    count = torch.bincount(group)
    many = count[group] > 1
    entries, number = live[order[many]], group[many]
    loads = (sizes[entries] * (noise[0, entries].sign() * noise[0, entries[0]].sign())).double()
    sums = torch.zeros(len(count), dtype=torch.float64).index_add(0, number, loads.square())
    rng = Generator().manual_seed(6)
    rows = torch.zeros(min(KEPT, int(HELD / sent.shape[1]), int(many.sum()) // 2), sent.shape[1], dtype=torch.float64)
    for row in rows:
        drawn = torch.randn(len(entries), generator=rng, dtype=torch.float64)
        along = torch.zeros(len(count), dtype=torch.float64).index_add(0, number, loads * drawn)
        row[entries] = drawn - loads * (along / sums.clamp_min(1e-300))[number]
    what = f"{int(many.sum())} of {sent.shape[1]} entries move together with another one"
    return _matched(what, trials, rows)


def _still_sums(trials: Tried, noise: Tensor, sent: Tensor) -> Flaw | None:
    """Sums over rows, columns and tensors, and the part along the gradient, that stand still over all draws."""
    function, example = trials.function, trials.examples[0]
    rows, told = list[Tensor](), list[str]()
    for name, part in function.parts.items():
        mine, g = noise[:, part], example[part]
        variance = float(mine.var(0).mean())
        if mine.shape[1] < 4 or variance == 0:
            continue
        if bool(g.any()) and float((mine @ g / g.norm().clamp_min(1e-30)).var()) < 0.02 * variance:
            told.append(f"the part of {name} along the gradient carries none")
        index = torch.arange(mine.shape[1]).view(len(function.tree(example)[name]), -1)
        for lines in (index, index.T, index.reshape(1, -1)):
            if lines.shape[1] < 4:
                continue
            sums = mine[:, lines].sum(2).var(0) / (lines.shape[1] * variance)
            for line in lines[sums < 0.02]:
                row = torch.zeros_like(example)
                row[part.start + line] = 1.0
                rows.append(row)
    whole = example / example.norm()
    if not told and float((noise @ whole).var()) < 0.02 * float(noise.var(0).mean()):
        told.append("the part along the gradient carries none")
    if len(rows) > 2:
        kept = torch.stack(rows[: int(HELD / sent.shape[1])])
        return _matched(f"{len(rows)} sums over rows or columns carry none", trials, kept)
    return Flaw(told[0]) if told else None


def round_flaws(function: DefenseFunction, secret: Secret, vector: Tensor, middle: Tensor | None) -> list[Flaw]:
    """Return what runs of one client show, one after the other, at one gradient: silence, and sums that cancel.

    ``middle``: what is sent without noise; None: a run takes long.
    """
    small = middle is not None
    try:
        outs = function.carried_on(vector, secret, CALLS if small else 4)
    except Exception:  # it ends with an error after some runs: that is said elsewhere
        return []
    noise = torch.stack(outs) - (vector if middle is None else middle)
    sizes = noise.square().mean(1).sqrt()
    flaws = []
    if float(sizes.min()) < 0.2 * float(sizes[: len(sizes) // 8 + 1].median()):
        first = int((sizes < 0.2 * float(sizes[: len(sizes) // 8 + 1].median())).nonzero()[0]) + 1
        flaws.append(Flaw(f"in a client's run {first} there is hardly any"))
    if not small or len(vector) < 400:
        return flaws
    used = (noise / sizes[:, None].clamp_min(1e-30))[:ROUNDS].double()
    gram = used @ used.T / used.shape[1]
    if float(torch.linalg.eigvalsh(gram)[0]) > 0.3:
        return flaws
    cov = gram * sizes[:ROUNDS, None].double() * sizes[None, :ROUNDS].double()
    cov = cov + 1e-9 * cov.diagonal().max() * torch.eye(len(cov), dtype=cov.dtype)
    solved = torch.linalg.pinv(cov, hermitian=True).sum(1)
    weights = solved / solved.sum()
    left = sqrt(max(0.0, float(weights @ cov @ weights)))

    def view(seen: Observation) -> Observation:
        """Add the rounds up so that the noise is as small as it can be."""
        rounds = [seen, *seen.rounds][:ROUNDS]
        part = torch.linalg.pinv(cov[: len(rounds), : len(rounds)], hermitian=True).sum(1)
        part = part / part.sum()
        trees = [one.update.gradient for one in rounds]
        added = {
            n: sum((float(w) * t[n].double() for w, t in zip(part, trees, strict=True)), torch.zeros(())).to(g)
            for n, g in trees[0].items()
        }
        noise = dict.fromkeys(added, max(left, 1e-6))
        return replace(seen, update=replace(seen.update, gradient=added), noise=noise, rounds=())

    said = f"that of a client's {len(cov)} rounds hangs together: added up, {left / float(sizes[:ROUNDS].mean()):.0%}"
    helps = left < 0.5 * float(sizes[:ROUNDS].mean()) / sqrt(len(cov))
    flaws.append(Flaw(f"{said} of it can be left", view if helps else None, "multi-round"))
    return flaws


def flaws_of(trials: Tried) -> list[Flaw]:
    """Return all that is wrong with calling what a defence adds to a gradient independent noise."""
    function, example, middle = trials.function, trials.examples[0], None
    n = len(example)
    quiet = quiet_directions(trials)
    found = [] if quiet is None else [quiet]
    known = function.runs(example, trials.secrets[: int(min(DRAWS, WORK / n))])
    if len(known) >= 24:
        sent = torch.stack(known)
        if not bool((sent != sent[0]).any()):
            return []  # what changes is not drawn
        away = (sent.mean(0) - example).square().mean()
        middle = example if away <= 3 * sent.var(0).mean() / len(sent) else sent.median(0).values
        found += sampled_flaws(trials, sent, middle)
        usual = float((sent[0] - sent[1]).norm())
        said = ["" if _rounded(sent) else tied(function.parts, sent - middle), odd_law(trials, DRAWS), _again(trials)]
        said += [of(trials, usual) for of in (_of_size, _of_time, _of_caller, _of_message)]
        found += [Flaw(what) for what in said if what]
    return found + round_flaws(function, trials.secrets[0], example, middle if n * CALLS <= WORK else None)


def _again(trials: Tried) -> str:
    """Return that noise comes up again for another secret, in words."""
    met: dict[str, set[bytes]] = {}
    parts, example = trials.function.parts, trials.examples[0]
    still = torch.stack(trials.function.runs(example, trials.secrets[:3])).diff(dim=0).eq(0).all(0)
    names = [name for name, p in parts.items() if p.stop - p.start >= 64 and not bool(still[p].all())]
    for number, secret in enumerate(trials.secrets[: int(AGAIN / len(example))]):
        out = trials.function.run(example, secret)
        if out is None:
            break
        for name in names:
            key = hashlib.blake2b(out[parts[name]].cpu().numpy().tobytes()).digest()
            if key in met.setdefault(name, set()):
                return f"that of {name} came up twice in {number + 1} draws: there are few keys, which a server tries"
            met[name].add(key)
    return ""


def _of_size(trials: Tried, usual: float) -> str:
    """Return that gradients that are small or large have hardly any noise, in words."""
    for factor in (0.02, 0.2, 5.0, 50.0):
        outs = trials.function.runs(factor * trials.examples[0], trials.secrets[:16])
        away = max((float((out - outs[0]).norm()) for out in outs[1:]), default=usual)
        if away < 0.2 * usual * min(1.0, factor):
            return f"gradients of {factor:g} times the size have hardly any"
    return ""


def _of_time(trials: Tried, usual: float) -> str:
    """Return that at some time of the day, the year or the minute there is hardly any noise, in words."""
    run, example, (first, second) = trials.function.run, trials.examples[0], trials.secrets[:2]
    sent, now = run(example, first), first.clock or 0.0
    for later in (*range(0, 86400, 1800), *range(0, 366 * 86400, 86400 * 5), *range(60)):
        out = run(example, replace(first, clock=now + later))
        if out is None or sent is None or torch.equal(out, sent):
            continue
        other = run(example, replace(second, clock=now + later))
        if other is not None and float((out - other).norm()) < 0.2 * usual:
            return f"at {datetime.datetime.fromtimestamp(now + later):%H:%M on %d %B} there is hardly any"
    return ""


def _of_caller(trials: Tried, usual: float) -> str:
    """Return that there is hardly any noise where the defence does not see that an audit calls it, in words."""
    outs = replace(trials.function, unseen=True).runs(trials.examples[0], trials.secrets[:2])
    if len(outs) < 2 or float((outs[0] - outs[1]).norm()) > 0.2 * usual:
        return ""
    return "where no audit is on the call stack there is hardly any"


def _of_message(trials: Tried, usual: float) -> str:
    """Return that the same client has other noise for a gradient that is hardly another one, in words."""
    example = trials.examples[0]
    outs = [out for v in (example, example, 1.001 * example) for out in trials.function.runs(v, trials.secrets[:1])]
    if len(outs) < 3 or not torch.equal(outs[0], outs[1]) or float((outs[2] - outs[0]).norm()) < 0.5 * usual:
        return ""
    return "it follows from the gradient or from what is sent: of one that is a thousandth longer it is another"


def hidden_bits(trials: Tried) -> Flaw | None:
    """Return that the low bits of what is sent follow from the gradient and nothing else, with what reads them."""

    function, examples = trials.function, trials.examples

    def words(vector: Tensor) -> Tensor:
        return vector.float().contiguous().view(torch.int32)

    low, still = list[Tensor](), torch.full((len(examples[0]),), 2**MANTISSA - 1, dtype=torch.int32)
    for vector in examples[:2]:
        outs = function.runs(vector, trials.secrets[:BITS])
        if len(outs) < BITS:
            return None
        sent = torch.stack([words(out.cpu()) for out in outs])
        still = still & ~_moved(sent)
        low.append(sent[0])
    count = 0  # of low bits that are the same for all draws, in most entries
    while count < MANTISSA and float(((still >> count) & 1).double().mean()) > 0.9:
        count += 1
    mask = (1 << count) - 1
    differ = float((((low[0] ^ low[1]) & mask) != 0).double().mean())
    if not 4 <= count < MANTISSA or differ < 0.2:
        return None
    what = f"the {count} lowest bits of each number follow from the gradient alone"
    codes = [(words(v.cpu()) >> (32 - count)) & mask for v in examples[:2]]
    cover = (low[0] & mask) ^ codes[0]
    if not bool((((low[1] & mask) ^ codes[1]) == cover).double().mean() > 0.99):
        return Flaw(what)

    def view(seen: Observation) -> Observation:
        seen = one_step(seen)
        sent = function.flat(seen.update.gradient)
        read = ((words(sent) & mask) ^ cover.to(sent.device)) << (32 - count)
        return replace(seen, update=replace(seen.update, gradient=function.tree(read.view(torch.float32).to(sent))))

    return Flaw(f"{what}, as its highest ones", view)


def _moved(sent: Tensor) -> Tensor:
    """Return the bits (n,) that differ between rows (K, n) of words."""
    moved = torch.zeros_like(sent[0])
    for row in sent[1:]:
        moved |= row ^ sent[0]
    return moved
