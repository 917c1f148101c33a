"""Random numbers of a defence: the laws of secret ones, and the very numbers of simulations."""

import threading

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Generator

from gradveil.errors import DefenseError
from gradveil.privacy import noise as draws
from gradveil.privacy.noise import SecretDraws, Stream, is_secret, noise_kind
from gradveil.protection.defense import own_draws

SECRET = SecretDraws()
RARE = 1e-7  # a test of a law fails by chance as often


def seeded() -> Generator:
    return Generator().manual_seed(3)


def test_simulated_numbers_are_those_of_torch() -> None:
    assert torch.equal(draws.normal((3, 2), seeded()), torch.randn(3, 2, generator=seeded()))
    assert torch.equal(draws.uniform((3, 2), seeded()), torch.rand(3, 2, generator=seeded()))
    assert torch.equal(draws.integers(7, (5,), seeded()), torch.randint(7, (5,), generator=seeded()))
    assert torch.equal(draws.permutation(9, seeded()), torch.randperm(9, generator=seeded()))
    one, other = torch._standard_gamma(torch.full((2,), 0.4), generator=seeded()).tolist()
    assert draws.beta(0.4, seeded()) == one / (one + other)
    logs = torch.rand((2, 5), generator=seeded()).neg_().log1p_()
    assert torch.equal(draws.laplace((5,), seeded()), (logs[1] - logs[0]).div_(2**0.5))


def test_secret_numbers_have_their_laws() -> None:
    count = 100_000
    assert stats.kstest(draws.normal((count,), SECRET).numpy(), "norm").pvalue > RARE
    uniform = draws.uniform((count,), SECRET)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > RARE
    assert uniform.max() < 1
    assert uniform.min() >= 0
    assert stats.kstest(draws.laplace((count,), SECRET).numpy(), "laplace", (0, 0.5**0.5)).pvalue > RARE
    for high in (2, 7, 2**31 + 11):
        whole = draws.integers(high, (count,), SECRET)
        assert whole.min() >= 0
        assert whole.max() < high
        assert stats.chisquare(np.bincount((whole * 7 // high).numpy(), minlength=7)).pvalue > RARE or high == 2
    assert stats.binomtest(int(draws.integers(2, (count,), SECRET).sum()), count).pvalue > RARE
    orders = torch.stack([draws.permutation(4, SECRET) for _ in range(6000)])
    assert torch.equal(orders.sort().values, torch.arange(4).expand(6000, 4))
    counts = np.unique((orders * torch.tensor([64, 16, 4, 1])).sum(1).numpy(), return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > RARE
    betas = np.array([draws.beta(0.4, SECRET) for _ in range(3000)])
    assert stats.kstest(betas, stats.beta(0.4, 0.4).cdf).pvalue > RARE


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_secret_numbers_have_the_shape_that_is_asked_for(shape: tuple[int, ...]) -> None:
    for drawn in (draws.normal, draws.uniform, draws.laplace):
        assert drawn(shape, SECRET).shape == shape
    assert draws.integers(5, shape, SECRET).shape == shape
    assert draws.normal(torch.Size(shape), SECRET).dtype == draws.uniform(shape, SECRET).dtype == torch.float32


@pytest.mark.parametrize("high", [0, -1, 2**32])
def test_whole_numbers_have_a_range(high: int) -> None:
    with pytest.raises(DefenseError, match=r"give a number from 1 to"):
        draws.integers(high, (3,), SECRET)


def test_no_two_draws_are_alike_in_any_thread() -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(draws.words(64).tolist())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 1280


def test_a_stream_does_not_hang_on_how_it_is_read() -> None:
    key, whole, parts = bytes(range(32)), np.empty(5000, np.uint64), np.empty(5000, np.uint64)
    Stream(key).fill(whole)
    stream = Stream(key)
    for part in np.split(parts, [1, 8, 500, 4999]):
        stream.fill(part)
    assert np.array_equal(whole, parts)


def test_a_source_says_what_it_is() -> None:
    assert is_secret(SECRET)
    assert not is_secret(Generator())
    assert (noise_kind(SECRET), noise_kind(Generator())) == ("secret", "simulated")


def test_other_errors_of_a_defence_are_its_own() -> None:
    with pytest.raises(TypeError, match="has no len"), own_draws(SECRET):
        len(3)  # type: ignore[arg-type]
    with pytest.raises(DefenseError, match=r"^SecretDraws draws from rng by torch itself"), own_draws(SECRET):
        SECRET.manual_seed(0)  # type: ignore[attr-defined]
