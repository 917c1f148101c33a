"""Servers that are informed or patient, on digits and LeNet: ``candidates`` among 100, and ``newton`` over rounds.

Each row names its setting, and stands beside what theory allows: reconstruction robustness for clipped updates, the
leak meter's figure over rounds for images. ``product`` is the rule of the public code of Hayes et al. 2023 (JAX),
written anew: the candidate whose clipped gradient has the largest inner product with what was sent, over all rounds.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from scipy.optimize import brentq
from scipy.stats import binomtest
from torch import Generator, nn

from gradveil.attacks.candidates import Candidates
from gradveil.attacks.newton import Newton
from gradveil.attacks.rounds import pooled
from gradveil.data.base import load
from gradveil.gradients.functional import trial_gradients
from gradveil.models import build
from gradveil.privacy.bounds import GaussianTraining
from gradveil.threats.meter import bayes_mse, equations, information
from gradveil.tree import Params, parameters
from gradveil.types import Batch, GaussianPrior, Observation, Update

CHOICES, CLASSES, SHAPE = 100, 10, (1, 8, 8)
Row = dict[str, object]


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def clipped(gradient: Params) -> Params:
    """Return the gradient scaled down to norm 1; a function that vmap can run."""
    size = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    return {n: g / size.clamp_min(1.0) for n, g in gradient.items()}


@cache
def network(seed: int) -> nn.Module:
    return build("lenet", SHAPE, CLASSES, seed)


@cache
def straight(seed: int) -> nn.Module:
    """Return a linear model without a bias: its gradients of inputs with a single one stand at right angles."""
    return seeded_model(lambda: nn.Sequential(nn.Linear(CHOICES, CLASSES, bias=False)), seed)


def seeded_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory()


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "same weights": lambda k, t: network(k),
    "new weights each round": lambda k, t: network(1000 * k + t),
}


def noisy(model: nn.Module, one: Batch, std: float, clip: bool, rng: Generator) -> Observation:
    """Return what a server sees of one example's gradient under noise whose law it knows."""
    y = torch.nn.functional.one_hot(one.labels, CLASSES).float()
    found = trial_gradients(model, parameters(model))(one.inputs[None], y[None])
    gradient = {n: g[0] for n, g in found.items()}
    gradient = clipped(gradient) if clip else gradient
    sent = {n: g + std * torch.randn(g.shape, generator=rng) for n, g in gradient.items()}
    noise = dict.fromkeys(sent, std) if std else {}
    shape = tuple(one.inputs.shape[1:])
    return Observation(model, Update(sent), shape, CLASSES, noise=noise, simulate=clipped if clip else None)


def patient(rounds: list[Observation], **more: object) -> Observation:
    first, *rest = rounds
    return replace(first, rounds=tuple(rest), **more)  # type: ignore[arg-type]


def product(rounds: list[Observation], listed: Batch) -> int:
    """Return the candidate with the largest inner product with what was sent."""
    y = torch.nn.functional.one_hot(listed.labels, CLASSES).float()
    total = torch.zeros(len(listed))
    for same in ([s for s in rounds if s.model is model] for model in {id(s.model): s.model for s in rounds}.values()):
        s = same[0]
        found = trial_gradients(s.model, tuple(s.update.gradient))(listed.inputs[:, None], y[:, None])
        each = torch.cat([g.flatten(1) for g in found.values()], 1)
        each = each / each.norm(dim=1, keepdim=True).clamp_min(1.0) if s.simulate else each
        total += each @ sum(torch.cat([g.flatten() for g in s.update.gradient.values()]) for s in same)
    return int(total.argmax())


def succeeded(
    std: float, count: int, clip: bool, trials: int, public: Batch, models: Callable[[int, int], nn.Module]
) -> tuple[int, int]:
    """Return how often the candidate and the product rule are right."""
    hits, products = 0, 0
    for k in range(trials):
        rng = seeded(1000 + k)
        order = torch.randperm(len(public), generator=rng)[:CHOICES]
        listed = Batch(public.inputs[order], public.labels[order])
        truth = int(torch.randint(CHOICES, (1,), generator=rng))
        rounds = [noisy(models(k, t), listed[truth : truth + 1], std, clip, rng) for t in range(count)]
        found = Candidates().reconstruct(patient(rounds, candidates=listed), rng)
        hits += bool(torch.equal(found.inputs[0], listed.inputs[truth]))
        products += product(rounds, listed) == truth
    return hits, products


def candidate_rows(trials: int, public: Batch) -> list[Row]:
    rows: list[Row] = []
    private = brentq(lambda s: GaussianTraining(s, 1.0, 1).epsilon(1e-5) - 8.0, 0.3, 3.0)
    ones = Batch(torch.eye(CHOICES), torch.arange(CHOICES) % CLASSES)

    def add(
        what: str, std: float, count: int, clip: bool, data: Batch, models: Callable[[int, int], nn.Module]
    ) -> None:
        hits, products = succeeded(std, count, clip, trials, data, models)
        bound = float(GaussianTraining(std, 1.0, count).reconstruction(1 / CHOICES)) if clip else None
        chance = None if bound is None else float(binomtest(hits, trials, min(bound, 1.0), "greater").pvalue)
        row = {"models": what, "noise": std, "rounds": count, "clip": clip, "trials": trials, "hits": hits}
        rows.append(row | {"product": products, "bound": bound, "p_above_bound": chance})
        print(json.dumps(rows[-1]), flush=True)

    noises = [(std, count) for std in (0.1, 0.3, 1.0, 3.0) for count in (1, 16)] + [(private, 1), (4 * private, 16)]
    for std, count in noises:
        add("right angles", std, count, True, ones, lambda k, t: straight(k))
    add("same weights", 0.0, 1, False, public, MODELS["same weights"])
    for clip in (False, True):
        for std, count in noises if clip else noises[:-2]:
            for name in MODELS if clip and count > 1 else ("same weights",):
                add(name, std, count, clip, public, MODELS[name])
    return rows


def newton_rows(images: int, public: Batch, private: Batch) -> list[Row]:
    prior = GaussianPrior.fit(public.inputs)
    rows: list[Row] = []
    for std in (0.1, 0.3):
        for name, models in MODELS.items():
            for count in (1, 4, 16, 64) if name == "same weights" else (4, 16):
                errors, figures = [], []
                for k in range(images):
                    one = private[k : k + 1]
                    rounds = [noisy(models(k, t), one, std, False, seeded(10**6 * k + t)) for t in range(count)]
                    seen = patient(rounds, prior=prior, labels=one.labels)
                    found = Newton().reconstruct(seen, seeded(k))
                    errors.append(float((found.inputs - one.inputs).square().mean()))
                    mean = pooled(seen)
                    told = [information(equations(s, one)) for s in (mean, *mean.rounds)]
                    figures.append(bayes_mse(torch.stack(told).sum(0), prior))
                error, figure = torch.tensor(errors).mean(), torch.tensor(figures).mean()
                spread = torch.tensor(errors).std() / math.sqrt(images)
                rows.append(
                    {"noise": std, "rounds": count, "models": name, "images": images, "mse": float(error),
                     "standard_error": float(spread), "meter": float(figure)}
                )  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200, help="of candidates, per row; 0: none")
    parser.add_argument("--images", type=int, default=20, help="of newton, per row; 0: none")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    data = load("digits")
    public, private = data.test.batch(), data.train.batch()
    rows = candidate_rows(settings.trials, public) if settings.trials else []
    rows += newton_rows(settings.images, public, private) if settings.images else []
    if settings.out:
        settings.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
