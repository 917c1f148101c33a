"""What an update says about its input to first order: the Jacobian K of all that is seen, and its information."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Literal

import torch
from scipy.optimize import brentq
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from gradveil.errors import CertificateError
from gradveil.gradients.functional import quiet, trial_update, unroll
from gradveil.tree import Params
from gradveil.types import Batch, GaussianPrior, Observation

TANGENTS = 128  # of the Jacobian at once
PROBES = 32  # of products with the information at once
SETTLED = 1e-3  # conjugate gradients end where the last RISES steps added less than this share of the figure
RISES = 5


def nothing() -> None:
    """Do nothing before a step."""


@dataclass(frozen=True)
class SeenNumbers:
    """The numbers a server sees, as a smooth function of the unknown input, with their noise."""

    model: nn.Module
    function: Callable[[Tensor], Tensor]  # x (n,) -> (R,), n = N d unknowns
    x: Tensor  # (n,) float64, where the derivative is taken
    noise: Tensor  # (R,), standard deviation of each number; no less than the floor
    floor: float  # that stands for noise where none is known
    randomness: Literal["error", "same"] = "error"  # of the function, for vmap

    def floored(self, share: float) -> "SeenNumbers":
        """Return the same with so much of the floor."""
        rest = (self.noise.square() - self.floor**2).clamp_min(0) + (share * self.floor) ** 2
        return replace(self, noise=rest.sqrt().clamp_min(1e-30), floor=share * self.floor)

    def jacobian(self, each: Callable[[], None] = nothing) -> Tensor:
        """Return K (R, n), column by column in chunks, calling ``each`` before each of them."""
        unit = torch.eye(len(self.x), dtype=self.x.dtype, device=self.x.device)
        push = vmap(lambda v: jvp(self.function, (self.x,), (v,))[1], randomness=self.randomness)
        columns = []
        for some in unit.split(TANGENTS):
            each()
            with quiet(self.model), torch.no_grad():
                columns.append(push(some))
        return torch.cat(columns).T

    def information(self, v: Tensor) -> Tensor:
        """Return KᵀN⁻¹K v for rows v (M, n), without K."""

        def one(v: Tensor) -> Tensor:
            pushed = jvp(self.function, (self.x,), (v,))[1] / self.noise.square()
            pulled: Tensor = vjp(self.function, self.x)[1](pushed)[0]
            return pulled

        with quiet(self.model):
            return vmap(one, chunk_size=PROBES, randomness=self.randomness)(v).detach()


def equations(seen: Observation, truth: Batch, floor: float = 1e-3) -> SeenNumbers:
    """Return what the server sees as equations in the client's inputs, linearised where the truth is.

    Tensors that were dropped give none, entries of weight 0 give none, and each number carries its known noise and
    a floor of ``floor`` times the root mean square of the whole gradient beside it: the same for every view of one
    update, so that seeing less never looks like leaking more.
    """
    if seen.update.rule.adaptive:
        raise CertificateError(
            f"{seen.update.rule.optimizer} sends little more than the signs of gradients, which have no slope, and yet "
            f"give images away: the leak meter would read nothing where there is much. Look at the attacks."
        )
    names = list(seen.visible)
    held = {**dict(seen.model.named_parameters()), **dict(seen.model.named_buffers())}
    state = {n: v.detach().double() if v.is_floating_point() else v for n, v in held.items()}
    # in the model's order, not that of a set, which changes from process to process and with it the last digits of sums
    trainable = [n for n, p in seen.model.named_parameters() if p.requires_grad]
    moved = trainable if seen.needs_all_gradients else names
    free = {n: state[n] for n in moved}
    fixed = {n: v for n, v in state.items() if n not in moved}
    labels = seen.loss.rows(truth.labels, seen.num_classes).double()
    shape = truth.inputs.shape

    def step(weights: Params, x: Tensor, y: Tensor) -> Params:
        def loss(w: Params) -> Tensor:
            return seen.loss.soft(functional_call(seen.model, fixed | w, (x,)), y)

        found: Params = grad(loss)(weights)
        return found

    live = torch.cat([_live(seen, n, state[n]) for n in names]).nonzero()[:, 0]

    def function(x: Tensor) -> Tensor:
        sent = trial_update(seen, step, free, x.reshape(shape), labels)
        return torch.cat([sent[n].reshape(-1) for n in names])[live]

    x = truth.inputs.detach().double().reshape(-1)
    with quiet(seen.model):
        whole = unroll(step, {n: state[n] for n in trainable}, x.reshape(shape), labels, seen.update)
    rms = torch.cat([g.detach().reshape(-1) for g in whole.values()]).square().mean().sqrt()
    known = torch.cat([state[n].new_full((state[n].numel(),), seen.noise.get(n, 0.0)) for n in names])
    noise = (known[live].square() + (floor * rms).square()).sqrt()
    return SeenNumbers(seen.model, function, x, noise.clamp_min(1e-30), float(floor * rms), seen.randomness)


def _live(seen: Observation, name: str, like: Tensor) -> Tensor:
    given = seen.weights.get(name)
    return torch.ones_like(like, dtype=torch.bool).reshape(-1) if given is None else (given != 0).reshape(-1)


def bayes_mse(information: Tensor, prior: GaussianPrior) -> float:
    """Return tr((F + Λ)⁻¹) / n for the information F (n, n) and a Gaussian prior of precision Λ = Σ⁻¹ per example.

    (F + Λ)⁻¹ is Σ^½ (I + Σ^½ F Σ^½)⁻¹ Σ^½, which stays well conditioned where F is nearly singular.
    """
    values, vectors = torch.linalg.eigh(prior.covariance().to(information))
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    n, d = len(information), len(root)
    roots = torch.block_diag(*[root] * (n // d))
    factor = torch.linalg.cholesky(torch.eye(n).to(information) + roots @ information @ roots)
    return float(torch.linalg.solve_triangular(factor, roots, upper=False).square().sum() / n)


def probed_mse(
    information: Callable[[Tensor], Tensor],
    prior: GaussianPrior,
    x: Tensor,
    probes: int,
    steps: int,
    rng: Generator,
    each: Callable[[], None] = nothing,
) -> float:
    """Return the same trace by Hutchinson probes and conjugate gradients, without forming any matrix.

    Preconditioned by Σ and started at 0, zᵀx_k rises to zᵀ(F + Λ)⁻¹z: stopped early each probe errs low. The mean of
    few probes is an estimate all the same, too high by up to ``overstated``. ``information`` maps rows (M, n) to F v,
    for the unknowns x (n,). ``each`` is called before each step.
    """
    d = len(prior.mean)
    factor = prior.factor.to(x)
    double = GaussianPrior(prior.mean.to(x), factor, prior.ridge)

    def per_example(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        return f(v.reshape(-1, d)).reshape(v.shape)

    def covary(v: Tensor) -> Tensor:
        return (v @ factor) @ factor.T + prior.ridge * v

    z = torch.randint(0, 2, (probes, len(x)), generator=rng, device=rng.device).to(x) * 2 - 1
    found, residual = torch.zeros_like(z), z
    ahead = per_example(covary, residual)
    direction, size2 = ahead, (residual * ahead).sum(1)
    start, rises = size2, []
    for _ in range(steps):
        each()
        applied = information(direction) + per_example(double.whiten, direction)
        pace = size2 / (direction * applied).sum(1).clamp_min(1e-300)
        found, residual = found + pace[:, None] * direction, residual - pace[:, None] * applied
        ahead = per_example(covary, residual)
        new = (residual * ahead).sum(1)
        rises.append(float((pace * size2).sum()))  # of zᵀx, summed over the probes
        settled = len(rises) > RISES and sum(rises[-RISES:]) < SETTLED * sum(rises)
        if settled or bool((new <= 1e-16 * start).all()):
            break
        direction, size2 = ahead + (new / size2.clamp_min(1e-300))[:, None] * direction, new
    return float((z * found).sum(1).mean() / len(x))


def overstated(probes: int, chance: float = 0.05) -> float:
    """Return the factor by which the mean of so many probes exceeds the trace with no more than the given chance.

    For A >= 0 and random signs z, E exp(s zᵀAz) is at most what it is for Gaussian z, and that at most
    (1 - 2 s tr A)^(-1/2); by Chernoff the mean of m probes is above c tr A with a chance of at most
    exp(-(m/2) (c - 1 - log c)). No assumption on A.
    """
    wanted = 2 * log(1 / chance) / probes
    return float(brentq(lambda c: c - 1 - log(c) - wanted, 1.0, 3 + 2 * wanted))


EXACT = 1024  # unknowns up to which the Jacobian is written out
ENTRIES = 2**28  # of a Jacobian that is written out: 2 GiB
ASSUMPTIONS = (
    "The update is replaced by its linearisation at the true input.",
    "Inputs are drawn from a Gaussian fitted to public data; an average over it, no promise for one image.",
    "Noise is Gaussian and independent; where the update has none, a floor relative to its size stands for it.",
    "The server knows the model, the labels and the defence; it sees only the tensors and entries of this observation.",
)
LESS = 0.1  # of the floor: where the figure then falls to less than HALF of it, it hangs on the floor
HALF = 0.5
FEW = 2  # probes to find that out
RANK = 1e-7  # singular values below this share of the largest count as zero


@dataclass(frozen=True)
class Leak:
    """What an update gives away, to first order."""

    mse: float  # Bayesian Cramér-Rao: below it no server gets, on average, under the assumptions
    prior_mse: float  # the same before anything was sent: never less
    unknowns: int
    low: float | None = None  # where ``mse`` is an estimate by probes: at 95 % the true figure is at least this
    rank: int | None = None  # of K; None where only products with K were formed
    influence: float | None = None  # mean squared error of the least-squares server, no prior; inf below full rank
    how: str = ""
    at_floor: bool = False  # it hangs on the floor that stands for noise: there is no such limit, and it says nothing
    assumptions: tuple[str, ...] = ASSUMPTIONS


def leak_meter(
    seen: Observation,
    truth: Batch,
    prior: GaussianPrior | None = None,
    *,
    floor: float = 1e-3,
    exact_limit: int = EXACT,
    probes: int = 8,
    steps: int = 60,
    rng: Generator | None = None,
    each: Callable[[], None] = nothing,
) -> Leak:
    """Return how much of the true inputs the observed update gives away.

    ``prior`` defaults to the observation's own, else to independent pixels with the variance of a uniform draw from
    the data range. Above ``exact_limit`` unknowns, or where the Jacobian has more than ``ENTRIES`` numbers, the trace
    comes from Hutchinson probes and conjugate gradients. ``each`` is called before each step of the work: it may show
    progress, or raise to end the reading.
    """
    system = equations(seen, truth, floor)
    prior = prior or seen.prior or flat_prior(seen)
    before = float(prior.factor.double().square().sum()) / len(prior.mean) + prior.ridge
    n = len(system.x)
    if n > exact_limit or n * len(system.noise) > ENTRIES:
        rng = rng or torch.Generator().manual_seed(0)
        mse = probed_mse(system.information, prior, system.x, probes, steps, rng, each)
        factor = overstated(probes)
        how = (
            f"estimate: Hutchinson with {probes} probes, conjugate gradients with up to {steps} steps; at 95 % between "
            f"{mse / factor:.3g} (a factor of {factor:.2f}) and {before:.3g}, the figure before anything was sent"
        )
        lower = system.floored(LESS)
        at_floor = mse > probed_mse(lower.information, prior, system.x, FEW, steps, rng, each) / HALF
        return Leak(mse, before, n, mse / factor, how=how, at_floor=at_floor)
    jacobian = system.jacobian(each)
    return _exact(system, jacobian, prior, before)


def information(system: SeenNumbers) -> Tensor:
    """Return the Fisher information KᵀN⁻¹K (n, n) of the inputs."""
    scaled = system.jacobian() / system.noise[:, None]
    return scaled.T @ scaled


def flat_prior(seen: Observation) -> GaussianPrior:
    """Return independent pixels around mid-grey with the variance of a uniform draw from the data range."""
    low, high = seen.bounds
    mean = torch.full((int(torch.Size(seen.input_shape).numel()),), (low + high) / 2)
    return GaussianPrior.white(mean, (high - low) / 12**0.5)


def _exact(system: SeenNumbers, jacobian: Tensor, prior: GaussianPrior, before: float) -> Leak:
    n = len(system.x)
    scaled = jacobian / system.noise[:, None]
    mse = bayes_mse(scaled.T @ scaled, prior)
    triangle = torch.linalg.qr(jacobian, mode="r").R
    _, sizes, turned = torch.linalg.svd(triangle, full_matrices=False)
    rank = int((sizes > RANK * sizes[0]).sum()) if sizes[0] > 0 else 0
    # Kᵀ n along each singular direction has this variance:
    pushed = (system.noise[:, None] * (jacobian @ turned.T)).square().sum(0)
    influence = float((pushed / sizes**4).sum() / n) if rank == n else float("inf")
    how = f"exact Jacobian, {len(jacobian)} numbers seen for {n} unknowns"
    lower = jacobian / system.floored(LESS).noise[:, None]
    at_floor = bayes_mse(lower.T @ lower, prior) < HALF * mse
    return Leak(mse, before, n, None, rank, influence, how, at_floor)
