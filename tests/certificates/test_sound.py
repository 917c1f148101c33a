"""A sound bound is never violated: random networks and odd ones, in float32 and float64, every norm.

A trial is one (network, X, X′, kind, norm, type): r′ is what the model computes for X′, so that a bound above
‖X - X′‖ is a violation. ``GRADVEIL_TRIPLES=3000`` (`make faults`) sets how many trials each test makes per kind, norm
and type; a tenth of it for the kinds that search for a radius anew for every X.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from math import inf
from zlib import crc32

import pytest
import torch
from torch import Generator, Tensor, nn

from certificates.odd_models import MODES, ODD, mode_model, odd_model
from certificates.random_networks import pairs, random_network
from gradveil.errors import CertificateError
from gradveil.modules import find_layer, representation
from gradveil.representation.certify import certify
from gradveil.representation.norms import norm

TRIPLES = int(os.environ.get("GRADVEIL_TRIPLES", "60"))
NORMS = (1, 2, inf)
TYPES = {"float32": torch.float32, "float64": torch.float64}
QUICK, SEARCHED = ("global", "box", "residual"), ("reach", "reach, residual")
CASES = [(kind, p) for kind in ("global", "box", "reach") for p in NORMS]
CASES = CASES if TRIPLES >= 1000 else CASES[::4]  # one of each kind, one in each norm
ONE_LINE = r"\A[^\n]+\Z"
RIGHT = {
    "a no_grad block", "detached", "strided", "selu", "elu, negative", "softplus, low threshold",
    "weight norm", "a hook", "batch norm", "dropout", "spectral norm",
}  # fmt: skip


def triples(seed: int, count: int, each: int) -> Iterator[tuple[nn.Sequential, Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(-(-count // each)):
        model, shape = random_network(rng)
        yield model, *pairs(model, shape, each, rng)


def check(kind: str, p: float, model: nn.Module, x: Tensor, other: Tensor, rng: Generator) -> Tensor:
    """Certify r′ = f(X′), or for a residual an r′ that f(X′) misses by a known one; return distance / bound."""
    target = representation(model, find_layer(model), other).flatten(1)
    tau = None
    if "residual" in kind:
        noise = torch.randn(target.shape, generator=rng, dtype=torch.float64)
        noise = noise * target.norm(dim=1, keepdim=True) * torch.rand(len(x), 1, generator=rng, dtype=torch.float64)
        tau, target = norm(noise, p) * (1 + 1e-9), target.double() + noise
    certificate = certify(model, None, x, target, p, kind.split(",")[0], residual=tau)
    distance = norm(x.double() - other.double(), p)
    assert certificate.sound
    assert (distance * (1 + 1e-9) >= certificate.bound).all(), (kind, p, model, certificate.bound, distance)
    return distance / certificate.bound.clamp_min(1e-300)


def seed_of(*words: object) -> int:
    return crc32(" ".join(map(str, words)).encode())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("kind", [*QUICK, *SEARCHED])
def test_no_bound_exceeds_the_distance_to_a_preimage(kind: str, p: float, dtype: str) -> None:
    count = trials(kind)
    each = 4 if kind in SEARCHED else max(10, TRIPLES // 100)
    seed = seed_of(kind, p, dtype)
    rng = torch.Generator().manual_seed(seed)
    made = TYPES[dtype]
    slack = torch.cat(
        [check(kind, p, m.to(made), x.to(made), y.to(made), rng) for m, x, y in triples(seed, count, each)]
    )
    assert len(slack) >= count
    if "residual" not in kind:  # the pairs do come close: a bound of zero would not pass
        assert slack.min() < (100 if TRIPLES < 1000 else 3 if kind in SEARCHED else 1.3)


def trials(kind: str, triples: int = TRIPLES) -> int:
    return triples // 10 if kind in SEARCHED else triples


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_certified_rightly_or_refused(name: str, dtype: str) -> None:
    right_or_refused(odd_model(name, TYPES[dtype]), name, seed_of(name, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_a_model_in_another_mode_is_certified_rightly_or_refused(name: str, training: bool, dtype: str) -> None:
    model = mode_model(name, TYPES[dtype], training)
    right_or_refused(model, f"{name}, training" if training and name not in ("weight norm", "a hook") else name, 0)


def right_or_refused(model: nn.Module, name: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    count = max(8, TRIPLES // 50)
    x = torch.rand(count, 6, generator=rng)
    other = torch.where(torch.rand(count, 1, generator=rng) < 0.5, torch.rand(count, 6, generator=rng).round(), x)
    other = (other + 0.05 * torch.randn(count, 6, generator=rng)).clamp(0, 1)
    for kind, p in CASES:
        with nullcontext() if name in RIGHT else pytest.raises(CertificateError, match=ONE_LINE):
            check(kind, p, model, x.to(dtype), other.to(dtype), rng)


def test_a_corner_that_a_float32_model_reaches_is_never_called_out_of_reach() -> None:
    # The largest value that a unit can take over the box, as the model rounds it.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    rng = torch.Generator().manual_seed(0)
    corners = (model[0].weight > 0).float()
    x = torch.rand(8, 16, generator=rng)
    other = corners
    for p in NORMS:
        found = certify(model, None, x, model[:2](other).detach(), p, "reach")
        assert found.details["unreachable"].sum() == 0
        assert (norm(x.double() - other.double(), p) >= found.bound).all()


def test_the_long_form_makes_more_than_fifty_thousand_trials() -> None:
    assert sum(trials(kind, 3000) for kind in (*QUICK, *SEARCHED)) * len(NORMS) * len(TYPES) >= 50_000
