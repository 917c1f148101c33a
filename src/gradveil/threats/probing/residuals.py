"""What a defence with a secret leaves of each tensor: found by running it, tensor by tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from gradveil.threats.probing.affine_fit import FAITHFUL, FORMS, OF_LENGTH, Form, aligned, line, with_label
from gradveil.threats.probing.function import DefenseFunction, Secret, Where, close
from gradveil.tree import Params
from gradveil.types import Observation

KEPT = 4096  # entries of a tensor that statistics are taken of
LITTLE = 0.5  # what rounding may change, relative to the tensor
LOUD = 3.0  # noise, relative to a tensor, beyond which it is left out where others are quieter


@dataclass(frozen=True)
class Draws:
    """Runs on one gradient with many secrets: some entries of each tensor, as (secrets, entries)."""

    sent: dict[str, Tensor]
    true: dict[str, Tensor]  # (entries,)

    def noise(self, name: str) -> Tensor:
        """Return what was added (secrets, entries)."""
        return self.sent[name] - self.true[name]

    def std(self, name: str) -> float:
        """Return the standard deviation over secrets, all entries together."""
        return float(self.sent[name].var(0).mean().sqrt())


def draw(
    channel: DefenseFunction,
    secrets: Sequence[Secret],
    vector: Tensor,
    shown: Callable[[Tensor], Tensor] = lambda v: v,
    before: Tensor | None = None,
) -> Draws | None:
    """Run a defence with each secret on one gradient; None where it fails.

    ``shown``: what arrives, as a server looks at it; ``before``: what it takes the noise to be added to.
    """
    outs = (channel.run(vector, secret) for secret in secrets)
    kept = []
    for out in outs:
        if out is None:
            return None
        kept.append(sampled(channel, [shown(out)], vector if before is None else before))
    return Draws({name: torch.cat([one.sent[name] for one in kept]) for name in channel.parts}, kept[0].true)


def sampled(channel: DefenseFunction, outs: Sequence[Tensor], vector: Tensor) -> Draws:
    """Return some entries of each tensor of what was sent, and of the gradient."""
    some = {name: _some(part) for name, part in channel.parts.items()}
    sent = {name: torch.stack([out[where] for out in outs]) for name, where in some.items()}
    return Draws(sent, {name: vector[where] for name, where in some.items()})


def _some(part: slice) -> Tensor:
    count = part.stop - part.start
    some: Tensor = part.start + torch.arange(min(count, KEPT)) * count // min(count, KEPT)
    return some


@dataclass(frozen=True)
class Left:
    """What is left of one tensor, and how a server matches it."""

    what: str = ""  # in words; empty: all of it
    form: Form | None = None  # what is compared, of the update and of trials
    trial: Form | None = None  # of trials, where that is not the same
    bound: Callable[[Tensor], Form] | None = None  # the form, where it hangs on what was sent
    std: Callable[[Tensor], float] | None = None  # the noise in it, given what was sent
    weight: Callable[[Tensor], Tensor] | None = None  # which entries count, given what was sent
    noisy: float = 0.0  # the noise, relative to the tensor
    lost: bool = False

    @property
    def changed(self) -> bool:
        """Whether the defence does anything to it."""
        return bool(self.what)


Runs = Sequence[tuple[Tensor, Tensor]]  # (the true tensor, what was sent), for several gradients and secrets


def left_of(name: str, runs: Runs, draws: Sequence[Draws] | None) -> Left:
    """Return what is left of a tensor.

    ``draws`` are of a gradient, and of it three times as large; empty where the defence draws nothing; None: of what
    may be left, only the forms are looked for that are the same for all secrets.
    """
    if all(close(sent, true) for true, sent in runs):
        return Left()
    longer = any(not close(sent.norm(), true.norm()) for true, sent in runs)
    for what, form in FORMS.items():
        if longer and what in OF_LENGTH:
            continue
        if all(close(form(sent), form(true)) for true, sent in runs) and runs[0][0].numel() > 1:
            return Left(what, bound=aligned) if form is line else Left(what, form)
    if draws is None:
        return Left("nothing", lost=True)
    if draws and (unit := _lattice(noise := draws[0].noise(name))):
        some = noise[noise != 0]
        offset = float(some[0] - unit * (some[0] / unit).round())
        return Left(
            f"remainders of divisions by {unit:.4g}",
            lambda t: _remainder(t - offset, unit),
            lambda t: _remainder(t, unit),
        )
    return _entries(runs) or (_noise(name, runs, draws) if draws else _rounded(runs)) or Left("nothing", lost=True)


def _remainder(t: Tensor, unit: float) -> Tensor:
    return t - unit * (t / unit).round()


def _entries(runs: Runs) -> Left | None:
    """Return the entries that are sent as they are: those that are not zero, always the same, or the small ones."""
    step = max(1, runs[0][0].numel() // KEPT)
    if step > 1 and _entries([(true.flatten()[::step], sent.flatten()[::step]) for true, sent in runs]) is None:
        return None
    if all(bool((sent != 0).any()) for _, sent in runs):
        ratios = torch.cat([(sent / true)[(sent != 0) & (true != 0)] for true, sent in runs])
        factor = float(ratios.median())
        if len(ratios) and bool((ratios - factor).abs().max() <= 1e-3 * abs(factor)):  # none: of a tensor of zeros
            what = f"{factor:.3g} times the entries that are not zero"
            return Left(what, lambda t: t / factor, as_is, weight=_not_zero)
    same = torch.stack([(sent - true).abs() <= 1e-5 * true.abs() for true, sent in runs])
    always = same.all(0) & torch.stack([true != 0 for true, _ in runs]).any(0)
    if float(always.double().mean()) > 0.05:
        weight = always.to(runs[0][0])
        return Left(f"{float(weight.mean()):.0%} of the entries", weight=lambda sent: weight.to(sent))
    share = float(same.double().mean())
    if share > 0.1:  # others at each draw, and much larger then
        return Left(f"{share:.0%} of the entries", weight=lambda sent: small(sent, share, 6))
    return None


def small(sent: Tensor, share: float, times: float) -> Tensor:
    """Return which entries are at most so many times the median of this share of them, the smallest."""
    middle = sent.abs().flatten().kthvalue(max(1, int(share / 2 * sent.numel()))).values
    return (sent.abs() <= times * middle).to(sent)


def _not_zero(sent: Tensor) -> Tensor:
    return (sent != 0).to(sent)


def as_is(t: Tensor) -> Tensor:
    """Return a tensor unchanged."""
    return t


def _noise(name: str, runs: Runs, draws: Sequence[Draws]) -> Left | None:
    """Return the tensor without what can be taken off the noise, or with noise of a measured strength."""
    noise, other, true = draws[0].noise(name), draws[-1].noise(name), draws[0].true[name]
    whole = noise.shape[1] == runs[0][0].numel()
    basis = directions(noise)
    if whole and basis is not None and close(other @ basis.T @ basis, other):
        held = basis
        return Left(f"all but {len(held)} of its {noise.shape[1]} directions", lambda t: _without(t, held))
    if (rank := _rank(runs)) is not None:
        return Left(f"all but the {rank} largest parts of it as a matrix", bound=lambda sent: _peeled(sent, rank))
    mean, once, thrice = noise.mean(0), draws[0].std(name), draws[-1].std(name)
    size = float(true.square().mean().sqrt())
    unsure = once / sqrt(len(noise))  # of an entry's mean
    if float(mean.square().mean().sqrt()) > 4 * unsure and whole and close(other.mean(0), mean, unsure * 1e6 * mean):
        shift = mean.reshape(runs[0][0].shape)
        what = f"its entries with noise of {once:.3g} after taking off its mean"
        return Left(what, lambda t: t - shift.to(t), as_is, std=lambda sent: once, noisy=once / max(size, 1e-37))
    slope = float(mean @ true) / max(float(true @ true), 1e-37)
    if once == 0 or abs(slope) > 0.05 + 8 * unsure / max(size * sqrt(true.numel()), 1e-37):
        return None
    share = once / max(size, 1e-37)
    if thrice < 2 * once:
        return Left(f"its entries with noise of {once:.3g}", std=lambda sent: once, noisy=share)
    kept = share / sqrt(1 + share**2)
    what = f"its entries with noise of {share:.3g} of their size"
    return Left(what, std=lambda sent: kept * float(sent.square().mean().sqrt()), noisy=share)


def directions(noise: Tensor) -> Tensor | None:
    """Return an orthonormal basis (r, n) of the few directions that noise (secrets, n) lies in; None: of all."""
    noise = noise[noise.any(1)]
    if min(noise.shape) < 3:
        return None
    _, sizes, right = torch.linalg.svd(noise, full_matrices=False)
    rank = int((sizes > 1e-4 * sizes[0]).sum())
    return right[:rank] if rank < min(noise.shape) - 1 else None


def _without(t: Tensor, basis: Tensor) -> Tensor:
    held = basis.to(t)
    return t - ((t.reshape(-1) @ held.T) @ held).reshape(t.shape)


def _lattice(noise: Tensor) -> float:
    """Return the number that differences of noise are whole multiples of; 0: there is none, or it is very small."""
    values = noise.flatten().double()
    values = values[values != 0].sort().values
    if len(values) < 100:
        return 0.0
    gaps = values.diff()
    large = gaps[gaps > max(1e-5 * float(values.abs().max()), 1e-3 * float(gaps.max()))]
    if not 8 <= len(large) < len(gaps) / 8:
        return 0.0
    step = float(large.median())
    wholes = (large / step).round().clamp_min(1)
    step = float(large.sum() / wholes.sum())
    away = ((values - values[0]) / step - ((values - values[0]) / step).round()).abs().max()
    return step if float(away) < 0.02 else 0.0


def _rank(runs: Runs) -> int | None:
    """Return the rank of the noise as a matrix, where that is low at every draw."""
    noise = [(sent - true).reshape(len(true), -1)[:64, :256] for true, sent in runs if true.ndim > 1]
    if not noise or min(noise[0].shape) < 4:
        return None
    sizes = torch.stack([torch.linalg.svdvals(n) for n in noise])
    rank = int((sizes > 1e-4 * sizes[:, :1]).sum(1).max())
    return rank if rank <= min(noise[0].shape) // 4 else None


def _peeled(sent: Tensor, rank: int) -> Form:
    """Return: take off the rows and columns that the largest parts of what was sent lie in."""
    left, _, right = torch.linalg.svd(sent.reshape(len(sent), -1).double(), full_matrices=False)
    rows, columns = left[:, :rank], right[:rank]

    def form(t: Tensor) -> Tensor:
        matrix = t.reshape(len(t), -1)
        matrix = matrix - rows.to(t) @ (rows.T.to(t) @ matrix)
        rest: Tensor = matrix - (matrix @ columns.T.to(t)) @ columns.to(t)
        return rest.reshape(t.shape)

    return form


def _rounded(runs: Runs) -> Left | None:
    """Return the tensor with what rounding makes of it as noise, or its signs."""
    signs = all(bool((sent.sign() == true.sign()).all()) and len(sent.abs().unique()) <= 2 for true, sent in runs)
    if signs and runs[0][0].numel() > 2:
        return Left("its signs", torch.sign, _soft_sign)
    share = max(float((sent - true).norm() / true.norm().clamp_min(1e-37)) for true, sent in runs)
    if share > LITTLE:
        return None
    what = f"its entries, rounded by {share:.2g}"
    return Left(what, std=lambda sent: share * float(sent.square().mean().sqrt()), noisy=share)


def _soft_sign(t: Tensor) -> Tensor:
    return t / (t.square() + 0.01 * t.square().mean() + 1e-37).sqrt()


def view_of(left: Mapping[str, Left], where: Where) -> Callable[[Observation], Observation]:
    """Return the view of a server that matches what is left of each tensor."""
    noise_free = [name for name, one in left.items() if not one.lost and one.noisy < LOUD]
    gone = [n for n, one in left.items() if one.lost or (one.noisy >= LOUD and noise_free)]
    of_trials = {n: one.trial or one.form for n, one in left.items() if one.trial is not as_is}

    def fixed(tree: Params) -> Params:
        return {n: form(t) if (form := of_trials.get(n)) is not None else t for n, t in tree.items()}

    unsafe = [n for n, one in left.items() if of_trials.get(n) is not None and one.what not in FAITHFUL]
    unsafe += [n for n, one in left.items() if one.bound is not None and one.bound is not aligned]

    def view(seen: Observation) -> Observation:
        if where == "gradient" and seen.update.num_steps == 1:
            seen = seen.as_one_step()
        sent = seen.update.gradient
        bound = {n: one.bound(sent[n]) for n, one in left.items() if one.bound is not None and n in sent}
        forms = {n: form for n, one in left.items() if n in sent and (form := bound.get(n, one.form)) is not None}

        def trial(tree: Params) -> Params:
            return {n: bound[n](t) if n in bound else t for n, t in fixed(tree).items()}

        weights = {n: one.weight(sent[n]) for n, one in left.items() if one.weight is not None and n in sent}
        noise = {n: one.std(sent[n]) for n, one in left.items() if one.std is not None and n in sent}
        changed = {n: form(sent[n]) for n, form in forms.items()}
        seen = replace(seen, weights=seen.weights | weights, noise=seen.noise | noise)
        seen = replace(seen, update=replace(seen.update, gradient=sent | changed))
        seen = seen.without(*gone) if gone else seen
        if any(of_trials.values()) or bound:
            seen = replace(seen, simulate=trial if bound else fixed, simulate_on=where)
        return with_label(seen, unsafe)

    return view
