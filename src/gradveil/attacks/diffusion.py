"""Posterior sampling with a diffusion prior that is trained on public images, and the exact law of known noise.

``newton`` takes images to be Gaussian. Here they are what a denoising network says, D(x; σ). The update is solved by
``newton`` first, and its equations are made linear at the answer x₀: the likelihood is then a quadratic form of the
image, with curvature H and slope b. Images are drawn from the posterior by going down the noise levels σ of the
network. What an image with noise of σ may come from is taken to have the mean D and, up to a factor, the precision P
that Gaussian images have (Peng et al. 2024), so that with the update it has the mean

    x₀ + (H + P)⁻¹ (b + P (D(x; σ) - x₀)),  P = (Σ⁻¹ + I/σ²) / width;

to a draw of it, noise of the next level is added. If D is that of Gaussian images, every draw is exact at width 1; as
draws come in pairs, with noise of either sign, their mean is newton's answer then. Other images leave more open in some
places and less in others: with a larger width the update is heard more there. The equations are made linear once more,
at the mean of the draws, for each width. How far to go is chosen on public images that were held out: the server makes
the updates that they would have sent, with noise of the same law, attacks these in the same way, and takes the level at
which the mean of draws errs least for updates that are about as large. Where none errs less than newton, or where there
are none, it is newton's answer.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from gradveil import pace
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, differentiating, in_groups, in_parts
from gradveil.attacks.gauss_newton.equations import TOGETHER, Prior, normal_equations
from gradveil.attacks.newton import Newton, Solved, problem_group, ready
from gradveil.errors import AttackError
from gradveil.gradients.functional import trial_updates
from gradveil.ranges import Count, Range
from gradveil.seeds import Seeds
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction

BATCH = 64
LR = 4e-3
WARM = 20  # steps until the rate is whole
AVERAGED = 0.998  # share of the averaged weights that a step keeps
HELD_OUT, MOST_HELD_OUT = 8, 250  # one in so many public images is not learned from, and no more than so many
TRIED = 4  # draws of noise for each image that was held out
LOOKS = 10  # times that the network is tried on them, in training
DENOISED = 1024  # images that are denoised at once
UNNAMED = 0.1  # share of images whose class is not told to the network


class Block(nn.Module):
    """Two convolutions beside the identity, shifted and scaled by the noise level."""

    def __init__(self, before: int, after: int, embedded: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.level = nn.Linear(embedded, 2 * after)
        self.beside = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        scale, shift = self.level(level)[:, :, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        out: Tensor = self.beside(x) + h
        return out


class Denoiser(nn.Module):
    """Images (B, C, H, W) down to a quarter of their size and up again, with what was lost beside it."""

    def __init__(self, shape: Sequence[int], classes: int, width: int, prior: Prior) -> None:
        super().__init__()
        self.shape, channels = tuple(shape), shape[0]
        self.wiener = Wiener(prior)
        self.named = nn.Embedding(classes + 1, 4 * width)  # the last: not known
        self.embed = nn.Sequential(nn.Linear(16, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width), nn.SiLU())
        wide = (width, 2 * width, 2 * width)
        self.first = nn.Conv2d(3 * channels, width, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b, 4 * width) for a, b in zip((width, *wide[:2]), wide, strict=True))
        self.up = nn.ModuleList(
            Block(a + b, c, 4 * width) for a, b, c in ((wide[2], wide[1], wide[1]), (wide[1], wide[0], wide[0]))
        )
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the Wiener filter makes of flat images x (B, d) with noise of sigma (B,), and what to add.

        ``classes`` (B,) are below zero where they are not known.
        """
        classes = torch.full_like(sigma, -1).long() if classes.ndim > 1 or classes.is_floating_point() else classes
        base, error = self.wiener(x, sigma), self.wiener.error(sigma)
        mean, spread = self.wiener.mean, self.wiener.spread
        waves = sigma.log()[:, None] / 4 * torch.arange(1, 9, device=x.device)
        level = self.embed(torch.cat([waves.sin(), waves.cos()], 1))
        level = level + self.named(torch.where(classes < 0, self.named.num_embeddings - 1, classes))
        given = [(x - mean) / (sigma.square() + spread**2).sqrt()[:, None], (base - mean) / spread, mean.expand_as(x)]
        h = self.first(torch.cat([part.reshape(-1, *self.shape) for part in given], 1))
        kept = []
        for i, block in enumerate(self.down):
            h = block(h if i == 0 else F.avg_pool2d(h, 2, ceil_mode=True), level)
            kept.append(h)
        for block, beside in zip(self.up, (kept[1], kept[0]), strict=True):
            h = block(torch.cat([F.interpolate(h, size=beside.shape[-2:]), beside], 1), level)
        return base, error[:, None] * self.last(F.silu(h)).flatten(1)


class Wiener(nn.Module):
    """The posterior mean of Gaussian images with white noise."""

    def __init__(self, prior: Prior) -> None:
        super().__init__()
        self.mean, self.basis, self.variances = (t.float() for t in (prior.mean, prior.basis, prior.variances))
        self.ridge = prior.ridge
        self.beyond = len(self.mean) - len(self.variances)  # directions of ridge alone
        self.spread = float((self.variances.sum() + self.beyond * self.ridge) / len(self.mean)) ** 0.5

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.square()[:, None]
        inside, outside = self.variances / (self.variances + s), self.ridge / (self.ridge + s)
        away = x - self.mean
        return self.mean + outside * away + ((away @ self.basis) * (inside - outside)) @ self.basis.T

    def error(self, sigma: Tensor) -> Tensor:
        s = sigma.square()[:, None]
        inside = (self.variances * s / (self.variances + s)).sum(1)
        return ((inside + self.beyond * self.ridge * s[:, 0] / (self.ridge + s[:, 0])) / len(self.mean)).sqrt()


@dataclass(frozen=True)
class TrainedDenoiser:
    """A denoiser, and what is known of it at each noise level that it is used at, from images that were held out."""

    network: Denoiser
    held: Batch  # flat images (M, d) that were held out
    sigmas: list[float]  # noise levels, falling
    shares: list[float]  # of what the network adds to the Wiener filter, that is taken
    errors: list[float]  # squared, in units of the Wiener filter's
    late: bool  # the time was over before

    def clean(self, x: Tensor, classes: Tensor, level: int) -> Tensor:
        """Return the mean of the images behind x (..., d) at one of the noise levels."""
        flat, found = x.reshape(-1, x.shape[-1]).float(), []
        for part, names in zip(flat.split(DENOISED), classes.flatten().split(DENOISED), strict=True):
            with torch.no_grad():
                base, more = self.network(part, part.new_full((len(part),), self.sigmas[level]), names)
            found.append(base + self.shares[level] * more)
        return torch.cat(found).reshape(x.shape).to(x)


def train(
    public: Batch, classes: int, prior: Prior, width: int, steps: int, levels: Sequence[float]
) -> TrainedDenoiser:
    """Return a denoiser of public images (M, C, H, W), its weights averaged; levels are in units of their spread."""
    rng, device = Seeds()("denoiser"), public.inputs.device
    order = torch.randperm(len(public), generator=rng).to(device)
    images, labels = public.inputs[order].float(), public.labels[order]
    count = min(MOST_HELD_OUT, len(images) // HELD_OUT)
    held, known = Batch(images[:count].flatten(1), labels[:count]), Batch(images[count:], labels[count:])
    with torch.random.fork_rng([device] if images.is_cuda else []):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=rng)))
        net = Denoiser(images.shape[1:], classes, width, prior).to(device)
    sigmas = [level * net.wiener.spread for level in levels]
    averaged = copy.deepcopy(net).eval().requires_grad_(False)
    optimiser = torch.optim.Adam(net.parameters(), LR, fused=True)
    best, late = (
        TrainedDenoiser(copy.deepcopy(averaged), held, sigmas, [0.0] * len(sigmas), [1.0] * len(sigmas), False),
        False,
    )
    pace.step(0, steps)
    for done in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, done / WARM) * (0.5 + 0.5 * math.cos(math.pi * done / (steps + 1)))
        optimiser.zero_grad()
        with torch.enable_grad():
            _loss(net, known, sigmas, rng).backward()
        optimiser.step()
        with torch.no_grad():
            kept = min(AVERAGED, 1 - 1 / (1 + done / 10))
            torch._foreach_lerp_(list(averaged.parameters()), list(net.parameters()), 1 - kept)
        late = pace.step(done, steps) and done < steps
        if done * LOOKS // steps > (done - 1) * LOOKS // steps or late:
            shares, errors = zip(*(_judged(averaged, held, sigma) for sigma in sigmas), strict=True)
            if sum(errors) < sum(best.errors):
                best = TrainedDenoiser(copy.deepcopy(averaged), held, sigmas, list(shares), list(errors), False)
        if late:
            break
    return replace(best, late=late)


def _loss(net: Denoiser, known: Batch, sigmas: list[float], rng: Generator) -> Tensor:
    chosen = torch.randint(len(known), (BATCH,), generator=rng).to(known.labels.device)
    down, right = (torch.randint(3, (2,), generator=rng) - 1).tolist()
    x, names = known.inputs[chosen].roll((down, right), (2, 3)).flatten(1), known.labels[chosen]
    names = (
        names if names.ndim > 1 else torch.where((torch.rand(BATCH, generator=rng) < UNNAMED).to(x.device), -1, names)
    )
    low, high = math.log(sigmas[-1]), math.log(sigmas[0])
    sigma = (low + (high - low) * torch.rand(BATCH, generator=rng)).exp().to(x)
    noise = torch.randn(x.shape, generator=rng).to(x)
    base, more = net(x + sigma[:, None] * noise, sigma, names)
    loss: Tensor = ((base + more - x).square().mean(1) / net.wiener.error(sigma).square()).mean()
    return loss


def _judged(net: Denoiser, held: Batch, sigma: float) -> tuple[float, float]:
    """Return the share of what the network adds that errs least on images that were held out, and the error left."""
    left = added = together = 0.0
    rng, x = Seeds()("held out"), held.inputs
    for _ in range(TRIED):
        noise = torch.randn(x.shape, generator=rng).to(x)
        with torch.no_grad():
            base, more = net(x + sigma * noise, x.new_full((len(x),), sigma), held.labels)
        missing = x - base
        left, added = left + float(missing.square().sum()), added + float(more.square().sum())
        together += float((missing * more).sum())
    share = min(1.0, max(0.0, together / added)) if added > 0 else 0.0
    return share, (left - 2 * share * together + share**2 * added) / left if left > 0 else 1.0


SIGMAS = [2.0 * 0.025 ** (k / 11) for k in range(12)]  # noise levels, in units of the spread of images
WIDTHS = (1.0, 4.0, 16.0)  # by which P is divided, one each time that the equations are made linear
STAND_INS = 16  # updates of held-out images, that the level is chosen with
LIKE, FEWEST = 2.0, 4  # those count that are as large up to this factor; fewer of them say nothing
SHARP = 1e-3  # to which share of their input ReLU kinks are rounded where equations are made linear
ROUNDING = 1e-13  # of a sum in double precision, with some room
MOST = 8192  # unknowns: their curvature is written out
MEMORY = 4e9  # bytes for the curvatures of problems that run together

_NETWORKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by public images, then by what else counts


@ATTACKS.register("diffusion")
@dataclass(frozen=True)
class Diffusion(Attack):
    """Draw images from the posterior under a diffusion prior trained on public images; the mean of draws is returned.

    For servers with public images and their labels (``seen.public``) and, to some use, a known noise (``seen.noise``).
    It begins where ``newton`` ends. A network is trained for each set of public images: meant for a GPU.
    """

    kind = "learned"
    applies_to = (AppliesTo(("image",)),)

    steps: Count = 2000  # of the network's training
    width: Annotated[int, Range(4, 1024)] = 32  # of the network
    pairs: Count = 4  # of draws from the posterior, averaged

    def __post_init__(self) -> None:
        if self.width % 4:
            raise ValueError("width must be a multiple of 4")

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        for s in seen:
            _check_public(s)
        fitted = {id(s.public): GaussianPrior.fit(s.public.inputs) for s in seen if s.public and s.prior is None}
        known = [replace(s, prior=s.prior or fitted[id(s.public)]) for s in seen]
        return in_groups(known, rngs, _group, self._rebuilt)

    def _rebuilt(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        trained = self._trained(seen[0])
        others, truth = _stand_ins(seen, trained.held)
        every = ready([*seen, *others], [*rngs, *(Seeds()("labels", k) for k in range(len(others)))], "diffusion")
        draws = [*rngs, *(Seeds()("draws", k) for k in range(len(others)))]
        way = in_groups(every, draws, problem_group, lambda group, own: self._in_parts(trained, group, own))
        error = torch.stack([w.error(x) for w, x in zip(way[len(seen) :], truth, strict=True)])  # (K, W)
        sizes = torch.tensor([_signal(s) for s in every]).log()
        found = []
        for b, s in enumerate(seen):
            near = (sizes[len(seen) :] - sizes[b]).abs() < math.log(LIKE)
            alike = error[near.to(error.device)] if int(near.sum()) >= FEWEST else error[:, :1]
            found.append(way[b].rebuilt(alike.mean(0), s, trained))
        return found

    def _trained(self, first: Observation) -> TrainedDenoiser:
        """Return the network of the public images; it is kept as long as they are."""
        assert first.public is not None
        device = next(first.model.parameters()).device
        kept = _NETWORKS.setdefault(first.public.inputs, {})
        key = (id(first.prior), first.num_classes, self.width, self.steps, device)
        if key in kept:
            found: TrainedDenoiser = kept[key][1]
            return found
        prior = replace(Prior.of(first, 0, device), examples=1)
        trained = train(first.public.to(device), first.num_classes, prior, self.width, self.steps, SIGMAS)
        if not trained.late:
            kept[key] = first.prior, trained  # the prior as well, so that its id stays its own
        return trained

    def _in_parts(
        self, trained: TrainedDenoiser, seen: Sequence[Observation], rngs: Sequence[Generator]
    ) -> "list[Way]":
        unknowns = seen[0].num_examples * int(torch.Size(seen[0].input_shape).numel())
        size = min(len(seen), max(1, int(MEMORY / (4 * 8 * unknowns**2))))
        return in_parts(seen, rngs, size, lambda part: self._ways(trained, seen[part], rngs[part]))

    def _ways(self, trained: TrainedDenoiser, seen: Sequence[Observation], rngs: Sequence[Generator]) -> "list[Way]":
        newton, first = Newton(), seen[0]
        solved = newton.solve(seen, rngs)
        n, z, late = solved.prior.pixels, solved.best.point, False
        classes = torch.stack([_classes(s) for s in seen]).to(z.device)
        levels = len(trained.sigmas)
        points = z[:, None, :n].repeat(1, 1 + len(WIDTHS) * levels, 1)
        total = len(WIDTHS) * levels
        pace.step(0, total)
        for i, width in enumerate(WIDTHS):
            with differentiating(first.model):
                form = Forms.at(solved, z)
            for done, mean in enumerate(self._means(trained, form, width, classes, rngs), 1 + i * levels):
                points[:, done] = torch.where(mean.isfinite().all(1, keepdim=True), mean, points[:, 0])
                if late := pace.step(done, total) and done < total:
                    break
            if late:
                break
            z = form.with_beside(points[:, done].clamp(*first.bounds))
        return [Way(newton.rebuilt(s, solved, b), points[b], s.bounds, late) for b, s in enumerate(seen)]

    def _means(
        self, trained: TrainedDenoiser, form: "Forms", width: float, classes: Tensor, rngs: Sequence[Generator]
    ) -> Iterator[Tensor]:
        """Yield the means of draws (B, n) from noise level to noise level."""
        prior, point = form.prior, form.point[:, None]
        (b, n), d = form.point.shape, len(form.prior.mean)
        signs = torch.tensor([1.0, -1.0]).to(point)[:, None]

        def noise() -> Tensor:
            white = [torch.randn(self.pairs, 1, n, generator=rng, device=rng.device) for rng in rngs]
            return (torch.stack(white).to(point) * signs).flatten(1, 2)  # (B, 2 pairs, n)

        precision = prior.precision()
        solve, root = form.solver(precision)
        middle = solve(form.pull[:, None] - (point - prior.center()) @ precision)  # of the Gaussian posterior
        x = point + middle + root(noise()) + trained.sigmas[0] * noise()
        for k, sigma in enumerate(trained.sigmas):
            names = classes[:, None].expand(b, x.shape[1], -1)
            told = trained.clean(x.reshape(*names.shape, d), names, k).reshape(x.shape)
            inner = (precision + torch.eye(n).to(precision) / sigma**2) / width
            solve, root = form.solver(inner)
            mean = point + solve(form.pull[:, None] + (told - point) @ inner)
            yield mean.mean(1)
            following = trained.sigmas[min(k + 1, len(trained.sigmas) - 1)]
            kept = following**2 / sigma**2
            clean = mean + root(noise())
            x = clean + kept * (x - clean) + following * (1 - kept) ** 0.5 * noise()


@dataclass(frozen=True)
class Way:
    """From newton's answer down the noise levels, for one update."""

    newton: Reconstruction
    points: Tensor  # (W, n): newton's, then the mean of draws at each level of each pass
    bounds: tuple[float, float]
    late: bool  # the time was over before

    def error(self, truth: Tensor) -> Tensor:
        return (self.points.clamp(*self.bounds) - truth).square().mean(1)

    def rebuilt(self, error: Tensor, s: Observation, trained: TrainedDenoiser) -> Reconstruction:
        """Return the point at which others err least; ``error`` (W,) is theirs, or that of the first points alone."""
        best = int(error.argmin())
        inputs = self.points[best].reshape(s.num_examples, *s.input_shape).float().clamp(*s.bounds)
        width, sigma = divmod(max(0, best - 1), len(trained.sigmas))
        details = {"held_out": float(error[best]), "newton": float(error[0])}
        details |= {"sigma": trained.sigmas[sigma], "width": WIDTHS[width]} if best else {}
        late = trained.late or self.late or "out_of_time" in self.newton.details
        details |= {"out_of_time": 1.0} if late else {}
        content = self.newton.converged and not late
        return Reconstruction(inputs, self.newton.labels, details["held_out"], content, details)


@dataclass(frozen=True)
class Forms:
    """What updates say of their examples x, made linear at a point: the likelihood is, with y = x - point,

    exp(pullᵀ y - yᵀ curvature y / 2).
    """

    prior: Prior  # without numbers beside the examples
    point: Tensor  # (B, n)
    curvature: Tensor  # (B, n, n)
    pull: Tensor  # (B, n)
    beside: Tensor  # (B, k), where the other unknowns are, at the point
    across: Tensor  # (B, k, n), how they go with the examples

    @classmethod
    def at(cls, solved: Solved, z: Tensor) -> "Forms":
        """Return the forms at z (B, n + k); what is unknown beside the examples is integrated out."""
        prior, rows, width = replace(solved.prior, extra=0), solved.rows, z.new_full((len(z),), SHARP)
        n, residual = prior.pixels, rows.residual(z, width)
        weights = rows.weights / (rows.noise.square() + (solved.best.floor[:, None] * rows.rms).square())
        parts = [
            normal_equations(rows.take(part), z[part], residual[part], weights[part], width[part])
            for part in torch.arange(len(z), device=z.device).split(max(1, TOGETHER // z.shape[1]))
        ]
        h, slope = (torch.cat(each) for each in zip(*parts, strict=True))
        inner = _above_rounding(h[:, n:, n:] + torch.eye(z.shape[1] - n).to(z))
        across = torch.linalg.solve_ex(inner, h[:, n:, :n])[0]
        away = torch.linalg.solve_ex(inner, slope[:, n:] + z[:, n:])[0]
        curvature = h[:, :n, :n] - h[:, :n, n:] @ across
        pull = (h[:, :n, n:] @ away[..., None])[..., 0] - slope[:, :n]
        curvature = _above_rounding((curvature + curvature.mT) / 2)
        return cls(prior, z[:, :n], curvature, pull, z[:, n:] - away, across)

    def with_beside(self, x: Tensor) -> Tensor:
        """Return examples x (B, n) with the other unknowns that go with them (B, n + k)."""
        return torch.cat([x, self.beside - (self.across @ (x - self.point)[..., None])[..., 0]], 1)

    def solver(self, precision: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Return v (B, S, n) -> (curvature + precision)⁻¹ v, and white noise (B, S, n) -> noise of that covariance."""
        factor, _ = torch.linalg.cholesky_ex(self.curvature + precision)
        return (
            lambda v: torch.cholesky_solve(v.mT, factor).mT,
            lambda v: torch.linalg.solve_triangular(factor.mT, v.mT, upper=True).mT,
        )


def _above_rounding(h: Tensor) -> Tensor:
    """Return matrices (B, m, m) with what rounding can take from their smallest eigenvalues added."""
    most = h.diagonal(dim1=1, dim2=2).amax(1) if h.shape[1] else h.new_zeros(len(h))
    return h + ROUNDING * most[:, None, None] * torch.eye(h.shape[1]).to(h)


def _stand_ins(seen: Sequence[Observation], held: Batch) -> tuple[list[Observation], list[Tensor]]:
    """Return what would have been seen of images that were held out, in place of some of the examples; and these."""
    made, truth, n = [], [], seen[0].num_examples
    for k in range(min(STAND_INS, len(held) // n)):
        batch, rng = held[k * n : (k + 1) * n], Seeds()("stand-in", k)
        made.append(_sent(seen[k % len(seen)], batch, rng))
        truth.append(batch.inputs.flatten())
    return made, truth


def _sent(s: Observation, batch: Batch, rng: Generator) -> Observation:
    like = next(s.model.parameters())
    y = s.loss.rows(batch.labels, s.num_classes).to(like)
    many = trial_updates(s, s.update.gradient)(batch.inputs.reshape(1, -1, *s.input_shape).to(like), y[None])
    sent = {
        name: g[0].detach() + s.noise.get(name, 0.0) * torch.randn(g.shape[1:], generator=rng).to(g)
        for name, g in many.items()
    }
    labels = None if s.labels is None else batch.labels
    rounds = tuple(_sent(r, batch, rng) for r in s.rounds)
    return replace(s, update=replace(s.update, gradient=sent), labels=labels, rounds=rounds)


def _signal(s: Observation) -> float:
    """Return the norm of an update without its noise, as far as that can be told from it."""
    given = [(s.update.gradient[name], s.noise.get(name, 0.0)) for name in s.visible]
    energy = sum(float(g.double().square().sum()) - std**2 * g.numel() for g, std in given)
    blur = math.sqrt(sum(2 * std**4 * g.numel() for g, std in given))
    return math.sqrt(max(energy, blur, 1e-30))


def _check_public(s: Observation) -> None:
    shape, least, public = s.input_shape, HELD_OUT * s.num_examples, s.public
    fits = public is not None and len(shape) == 3 and tuple(public.inputs.shape[1:]) == shape and public.labelled
    if public is None or not fits or len(public) < least:
        raise AttackError(f"diffusion learns what images look like: it needs {least} labelled public images or more.")
    unknowns = s.num_examples * int(torch.Size(shape).numel())
    if unknowns > MOST:
        raise AttackError(f"diffusion looks for at most {MOST} numbers; the images of this update have {unknowns}.")


def _group(s: Observation) -> tuple[object, ...]:
    return (id(s.public), problem_group(s), tuple(sorted(s.noise.items())), not s.weights)


def _classes(s: Observation) -> Tensor:
    if s.labels is None or s.labels.ndim > 1 or s.labels.is_floating_point():
        return torch.full((s.num_examples,), -1)
    return s.labels.cpu()
