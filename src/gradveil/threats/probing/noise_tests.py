"""Whether what is declared of a defence is so: what a view takes for granted, and the law of its noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt

import torch
from torch import Generator, Tensor

from gradveil.countermeasures import Countermeasure
from gradveil.errors import GradveilError
from gradveil.metrics import chance_of
from gradveil.threats.probing.affine_fit import Form
from gradveil.threats.probing.function import DefenseFunction, Secret, Tried, close
from gradveil.threats.probing.residuals import Draws, as_is, directions
from gradveil.tree import Params, flatten
from gradveil.types import Observation

SIGMAS = 8.0  # by which a figure must miss: of a sound defence, fewer than one in a million does in any of the tests
TAILS = 6.0  # the kurtosis that noise may have: Laplace's
FEW = 0.05  # of the entries, below which those that are never zero are no sample
CLOSE = 1.25  # a standard deviation within this factor is as declared


def contradictions(draws: Draws, declared: Mapping[str, float], rounds: Sequence[Draws]) -> list[str]:
    """Return what samples of the noise say against the declared standard deviations.

    ``rounds``: two runs of one client, one after the other.
    """
    noisy = [name for name, std in declared.items() if std > 0 and name in draws.sent]
    if not noisy:
        return []
    if all(draws.std(name) <= 1e-3 * declared[name] for name in noisy):
        name = noisy[0]
        return [f"Noise of standard deviation {declared[name]:.3g} is declared, and none is drawn."]
    for test in (_strength, _everywhere, _mean, _independent):
        found = next(filter(None, (test(name, draws, declared[name]) for name in noisy)), None)
        if found is not None:
            return [found]
    return list(filter(None, [_rounds(draws, rounds, noisy)]))


def _entries(name: str, draws: Draws) -> Tensor:
    """Return the noise (K, n) of the entries that are never zero: others may have been left out, or rounded away.

    None where those are few: the largest, of which noise says nothing about the rest.
    """
    kept = (draws.sent[name] != 0).all(0)
    enough = bool(kept.all()) or int(kept.sum()) >= max(8, FEW * len(kept))
    return draws.noise(name)[:, kept if enough else torch.zeros_like(kept)]


def _strength(name: str, draws: Draws, declared: float) -> str | None:
    noise = _entries(name, draws)
    if noise.shape[1] == 0:
        return None
    measured = float(noise.var(0).mean().sqrt())
    unsure = SIGMAS * sqrt(TAILS / max(noise.numel() - noise.shape[1], 1)) / 2
    if unsure > 1 or declared / CLOSE / (1 + unsure) <= measured <= declared * CLOSE * (1 + unsure):
        return None
    return f"Noise of standard deviation {declared:.3g} is declared for {name}, and {measured:.3g} is measured."


def _everywhere(name: str, draws: Draws, declared: float) -> str | None:
    noise = _entries(name, draws)
    if noise.shape[1] == 0:
        return None
    still = float((noise.abs() <= 1e-5 * declared).double().mean())
    if still <= 0.05 + SIGMAS * sqrt(0.05 / noise.numel()):
        return None
    return f"Noise is declared for all of {name}, and {still:.0%} of its entries are sent without."


def _mean(name: str, draws: Draws, declared: float) -> str | None:
    noise = _entries(name, draws)
    count, entries = noise.shape
    if entries < 8:
        return None
    true = draws.true[name][(draws.sent[name] != 0).all(0)]
    mean = noise.mean(0)
    mean = mean - float(mean @ true) / max(float(true @ true), 1e-37) * true  # clipping makes all of it shorter
    excess = float(mean.square().mean()) / max(float(noise.var(0).mean()) / count, 1e-37)
    if excess <= 2 + SIGMAS * sqrt(2 * TAILS / entries):
        return None
    size = float(mean.square().mean().sqrt())
    return (
        f"The noise of {name} is declared to have mean zero, and a part of size {size:.2g} is the same in every draw."
    )


def _independent(name: str, draws: Draws, declared: float) -> str | None:
    noise = _entries(name, draws)
    noise = noise[0::2] - noise[1::2] if len(noise) % 2 == 0 else noise[0:-1:2] - noise[1::2]  # whatever the mean
    entries = noise.shape[1]
    if entries < 16 or len(noise) < 12:
        return None
    basis = directions(noise)
    few = float(len(basis)) if basis is not None else effective(noise)
    if few >= entries / 4:
        return None
    return f"The noise of {name} is declared to be independent, and only about {few:.0f} of its {entries} entries are."


def effective(noise: Tensor) -> float:
    """Return how many entries of noise (K, n) move by themselves: (tr Σ)² / tr Σ², outliers held back."""
    scaled = noise / noise.square().mean(0).sqrt().clamp_min(1e-37)
    scaled = scaled.clamp(-3, 3).double()
    gram = scaled @ scaled.T
    count = len(gram)
    off = (gram.square().sum() - gram.diagonal().square().sum()) / (count * (count - 1))
    return float(gram.diagonal().mean() ** 2 / off.clamp_min(1e-37))


def _rounds(draws: Draws, rounds: Sequence[Draws], names: Sequence[str]) -> str | None:
    """Return how alike the noise of two rounds of one client is; other clients' is taken off, and with it the mean."""
    first, second = rounds
    if all(not bool(second.noise(name).any()) for name in names):
        return "Noise is declared for every run, and in the second run of a client none is drawn."
    away = [torch.cat([(run.sent[n][0] - draws.sent[n][-i]) for n in names]) for i, run in ((1, first), (2, second))]
    clipped = [noise.clamp(-3 * noise.std(), 3 * noise.std()) for noise in away]
    alike = 2 * float(torch.nn.functional.cosine_similarity(clipped[0], clipped[1], dim=0))
    if abs(alike) <= 0.05 + 2 * SIGMAS / sqrt(len(clipped[0])):
        return None
    return f"The noise of a client's rounds is declared to be independent, and that of two has correlation {alike:.1f}."


def viewed(server: Countermeasure, seen: Observation) -> Observation | None:
    """Return a declared view; None where it comes with an attack of its own that sees no noise, or fails."""
    try:
        view = server.view(seen)
    except GradveilError:
        return None
    return view if server.attack is None or view.noise else None


def distance(view: Observation, true: Params) -> float:
    """Return how far what is matched is from the gradient, relative to it."""
    weigh = {n: view.weights[n].to(g) if n in view.weights else 1.0 for n, g in true.items()}
    names = [n for n in view.visible if n in true]
    away = sum(float((weigh[n] * (view.update.gradient[n] - true[n])).square().sum()) for n in names)
    whole = sum(float((weigh[n] * true[n]).square().sum()) for n in names)
    return sqrt(away / max(whole, 1e-37))


def reproduces(view: Observation, true: Params, seen: Observation) -> bool:
    """Return whether a declared simulation makes of the gradient what was sent."""
    try:
        made = view.sent(true)
    except Exception:  # it cannot be run on this: an attack says so
        return True
    return close(flatten({n: made[n] for n in seen.update.gradient}), flatten(seen.update.gradient))


def claims(view: Observation, seen: Observation) -> bool:
    """Return whether a view takes what is matched to be the gradient itself."""
    same = view.model is seen.model and view.simulate is None and not view.noise
    return same and all(view.update.gradient[n] is seen.update.gradient[n] for n in view.update.gradient)


Look = Callable[[Tensor], Tensor]  # of a vector over all tensors


def looked_at(declared: Sequence[Countermeasure], seen: Observation, channel: DefenseFunction) -> tuple[Look, Look]:
    """Return what a view with declared noise makes of a vector that arrives, and of a gradient before the noise.

    The first has coordinates in which the noise is plain; the second also what the server simulates.
    """

    def shown(server: Countermeasure, vector: Tensor) -> Tensor:
        arrived = replace(seen, update=replace(seen.update, gradient=channel.tree(vector)))
        return flatten(server.view(arrived).update.gradient)

    def simulated(view: Observation, vector: Tensor) -> Tensor:
        return flatten(view.simulated(channel.tree(vector), view.simulate_on))

    for server in declared:
        view = viewed(server, seen)
        if view is None or not view.noise:
            continue
        plain = claims(replace(view, noise={}, simulate=None), seen)
        arrives = _as_it_is if plain else partial(shown, server)
        if view.simulate is not None:
            return arrives, partial(simulated, view)
        if not plain:
            return arrives, arrives
    return _as_it_is, _as_it_is


def is_plain(declared: Sequence[Countermeasure], seen: Observation, function: DefenseFunction) -> bool:
    """Return whether noise is declared of all numbers as they arrive, not of other coordinates or of some."""
    views = [view for server in declared if (view := viewed(server, seen)) is not None and view.noise]
    return looked_at(declared, seen, function)[0] is _as_it_is and not any(view.weights for view in views)


def _as_it_is(vector: Tensor) -> Tensor:
    return vector


def declared_noise(declared: Sequence[Countermeasure], seen: Sequence[Observation]) -> dict[str, float]:
    """Return the declared standard deviations by name: root mean squares over the updates."""
    squares: dict[str, list[float]] = {}
    for one in seen:
        known: dict[str, float] = {}
        for server in declared:
            view = viewed(server, one)
            known |= {} if view is None else view.noise
        for name, std in known.items():
            squares.setdefault(name, []).append(std**2)
    return {name: sqrt(sum(values) / len(values)) for name, values in squares.items()}


def tied(parts: Mapping[str, slice], noise: Tensor) -> str:
    """Return that noise (K, n) of some entries tells that of others, or its size, in words."""
    n = noise.shape[1]
    unit = torch.cat([(mine := noise[:, p]) / mine.square().mean(1, keepdim=True).sqrt() for p in parts.values()], 1)
    unit = unit[unit.isfinite().all(1)].clamp(-3, 3)  # a draw without noise is another matter
    if (count := len(unit)) < 24:
        return ""
    mixed = unit.gather(0, torch.rand(unit.shape, generator=Generator().manual_seed(7)).argsort(0))

    def apart(form: Form) -> float:
        rows, others = (form(one) - form(one).mean(0) for one in (unit, mixed))
        return effective(rows) / effective(others)

    share = min(apart(form) for form in (as_is, torch.abs, lambda t: torch.cat([t - t.mean(0), t.abs()], 1)))
    if share > 0.8 - 8 * sqrt(8 / (count * (count - 1))):
        return ""
    return f"only about {share:.0%} of {n} entries are drawn by themselves: the others, or their sizes, follow"


def odd_law(trials: Tried, count: int) -> str:
    """Return that the noise's law has edges, peaks or gaps that show a small shift, in words.

    What is sent of two constant gradients, a tenth of a standard deviation apart, is compared in Hellinger's distance.
    """
    function, secrets = trials.function, trials.secrets[:count]
    runs = function.runs(0 * trials.examples[0], secrets)
    if len(runs) < len(secrets):
        return ""
    zero = torch.stack(runs)
    scale = torch.cat([zero[:, p].std().expand(p.stop - p.start) for p in function.parts.values()])
    if not bool((scale > 0).all()):
        return ""
    counts = []
    for sign in (-0.05, 0.05):
        sent = torch.stack([out / scale for out in function.runs(sign * scale, secrets)])
        counts.append(torch.histc(sent.clamp(-6, 6), 240, -6, 6).double() / sent.numel())
    most = float((counts[0].sqrt() - counts[1].sqrt()).square().sum()) - 240 / zero.numel()
    times = most / 0.0025  # of normal noise
    if times < CLEARER:
        return ""
    return f"its law has edges, peaks or gaps: a small shift shows {times:.0f} times as clearly as under normal noise"


CLEARER = 4.0  # times as a shift shows under normal noise; under Laplace's it shows twice as clearly
CHOICES = 6  # candidates that one is picked from
MOMENTS = 48  # runs on each of them
AGAIN = 8  # times that noise is simulated for each


def told_apart(
    sent: Sequence[tuple[int, Tensor]],
    gradients: Sequence[Tensor],
    parts: Mapping[str, slice],
    std: Mapping[str, float],
) -> str:
    """Return that candidates are told apart better than declared noise allows, as a sentence; empty: they are not.

    ``sent``: which candidate, and what was sent of it. Half of the candidates train a linear rule (LDA) on what of a
    pair (sent, gradient) shows whether it belongs together; of the others it picks one among a few.
    """
    half = len(gradients) // 2
    learn, held = ([pair for pair in sent if (pair[0] < half) is first] for first in (True, False))

    def others(i: int, among: range) -> list[int]:
        return [among[(i - among.start + k) % len(among)] for k in range(1, CHOICES)]

    right = torch.stack([_signs(y, gradients[i], parts) for i, y in learn])
    wrong = torch.stack([_signs(y, gradients[j], parts) for i, y in learn for j in others(i, range(half))])
    usual = right.mean(0)

    def lifted(signs: Tensor) -> Tensor:
        return torch.cat([signs, ((signs - usual).abs() + 1e-9).log()], -1)  # what is the same in every pair

    right, wrong = lifted(right), lifted(wrong)
    inside = torch.cat([right - right.mean(0), wrong - wrong.mean(0)])
    scale = inside.std(0).clamp_min(1e-12)
    cov = (inside / scale).T @ (inside / scale) / len(inside)
    cov = cov + 1e-2 * torch.eye(len(cov), dtype=cov.dtype)
    rule = torch.linalg.solve(cov, (right.mean(0) - wrong.mean(0)) / scale) / scale
    rng, hits, best = Generator().manual_seed(0), 0, 0
    spread = torch.cat([torch.full((p.stop - p.start,), std[name]) for name, p in parts.items()]).to(sent[0][1])
    for i, y in held:
        listed = [i, *others(i, range(half, len(gradients)))]
        hits += int(torch.stack([lifted(_signs(y, gradients[j], parts)) @ rule for j in listed]).argmax()) == 0
        for _ in range(AGAIN):  # what the likeliest of them is under noise as declared: no rule is right more often
            noisy = gradients[i] + spread * torch.randn(len(spread), generator=rng).to(spread)
            best += int(torch.stack([((noisy - gradients[j]) / spread).square().sum() for j in listed]).argmin()) == 0
    share, runs = best / (AGAIN * len(held)), AGAIN * len(held)
    if chance_of(hits, len(held), min(1.0, share + 4 * sqrt((share * (1 - share) + 1 / runs) / runs))) > 1e-6:
        return ""
    best //= AGAIN
    return f"{hits} of {len(held)} are picked out of {CHOICES} by what is sent, where such noise allows about {best}"


def picked_by_moments(
    runs: Callable[[Tensor, Sequence[Secret]], list[Tensor]], secrets: Sequence[Secret], gradients: Sequence[Tensor]
) -> str:
    """Return that candidates are told apart by what is sent of each on average, as a sentence; empty: they are not.

    A server runs the defence on each of them: the mean and the variance of every number, and of its logarithm.
    """
    laws, hits = [], 0
    for gradient in gradients:
        made = torch.stack([_with_logs(out) for out in runs(gradient, secrets[:MOMENTS])])
        laws.append((made.mean(0), made.var(0) + 1e-3 * made.var(0).mean(1, keepdim=True) + 1e-30))
    for i, gradient in enumerate(gradients):
        for y in map(_with_logs, runs(gradient, secrets[MOMENTS + i : MOMENTS + i + 1])):
            listed = [laws[(i + k) % len(laws)] for k in range(CHOICES)]
            scores = [float(((y - mean).square() / var + var.log()).sum()) for mean, var in listed]
            hits += scores.index(min(scores)) == 0
    if hits < 0.9 * len(gradients):
        return ""
    return f"Whoever runs it on {CHOICES} candidates picks the right one in {hits} of {len(gradients)} cases."


def _with_logs(y: Tensor) -> Tensor:
    return torch.stack([y, (y.abs() + 1e-30).log()])


def _signs(y: Tensor, g: Tensor, parts: Mapping[str, slice]) -> Tensor:
    """Return what tells whether an update and a gradient belong together, tensor by tensor and of all."""
    found = []
    for part in (*parts.values(), slice(0, len(y))):
        sent, true = y[part].double(), g[part].double()
        away, size = sent - true, true.norm().clamp_min(1e-30)
        length = away.norm().clamp_min(1e-30)
        across = (away @ true).abs() / (length * size)
        cosine = sent @ true / (sent.norm().clamp_min(1e-30) * size)
        found += [(across + 1e-7).log(), length.log(), cosine]
    return torch.stack(found)
