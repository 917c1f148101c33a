"""A sound bound is never violated: random networks, random pairs of images, every norm.

``GRADVEIL_TRIPLES=10000`` (`make faults`) sets how many (network, X, X′) triples each test draws per norm; a tenth of
it for the kinds that search for a radius anew for every X.
"""

import os
from collections.abc import Iterator
from math import inf

import pytest
import torch
from torch import Generator, Tensor, nn

from certificates.random_networks import pairs, random_network
from gradveil.certificates.base import norm
from gradveil.certificates.certify import certify

TRIPLES = int(os.environ.get("GRADVEIL_TRIPLES", "400"))
SEARCHES = TRIPLES // 10  # of the kinds that search for a radius
EACH = max(10, TRIPLES // 200)  # of one network: at least 200 networks in a long run
NORMS = (1, 2, inf)


def triples(seed: int, count: int, each: int) -> Iterator[tuple[nn.Sequential, Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(-(-count // each)):
        model, shape = random_network(rng)
        yield model, *pairs(model, shape, each, rng)


def representation(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model[:-1].double()(x.double()).flatten(1)


def check(kind: str, p: float, model: nn.Sequential, x: Tensor, other: Tensor, rng: Generator | None = None) -> Tensor:
    """Certify r′ = f(X′), or with ``rng`` an r′ that f(X′) misses by a known residual; return distance / bound."""
    target = representation(model, other)
    tau = None
    if rng is not None:
        noise = torch.randn(target.shape, generator=rng, dtype=torch.float64)
        noise = noise * target.norm(dim=1, keepdim=True) * torch.rand(len(x), 1, generator=rng, dtype=torch.float64)
        tau, target = norm(noise, p) * (1 + 1e-9), target + noise
    certificate = certify(model, None, x.double(), target, p, kind, residual=tau)
    distance = norm((x - other).double(), p)
    assert certificate.sound
    assert certificate.holds(distance * (1 + 1e-9)).all(), (kind, p, model, certificate.bound, distance)
    return distance / certificate.bound.clamp_min(1e-300)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("kind", ["global", "box"])
def test_lipschitz_bounds_hold_for_every_preimage(kind: str, p: float) -> None:
    slack = torch.cat([check(kind, p, *triple) for triple in triples(1, TRIPLES, EACH)])
    assert len(slack) >= TRIPLES
    assert slack.min() < 1.2  # the pairs do come close to the bound: a bound of zero would not pass


@pytest.mark.parametrize("p", NORMS)
def test_the_residual_bound_holds_for_answers_that_miss_r(p: float) -> None:
    rng = torch.Generator().manual_seed(2)
    for triple in triples(3, TRIPLES, EACH):
        check("residual", p, *triple, rng=rng)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("kind", ["radius", "reach"])
def test_search_bounds_hold_for_every_preimage(kind: str, p: float) -> None:
    slack = torch.cat([check(kind, p, *triple) for triple in triples(4, SEARCHES, each=4)])
    assert slack.min() < 3


@pytest.mark.parametrize("p", NORMS)
def test_reach_never_calls_an_answer_within_the_residual_unreachable(p: float) -> None:
    rng = torch.Generator().manual_seed(5)
    for triple in triples(6, SEARCHES, each=4):
        check("reach", p, *triple, rng=rng)
