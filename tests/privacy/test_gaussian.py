"""The noise of releases: its law, its error, its grid, and what a server makes of its last bits."""

from collections.abc import Callable
from ctypes import byref
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Generator, Tensor

from gradveil.errors import DefenseError
from gradveil.privacy import noise as gaussian
from gradveil.privacy.noise import (
    ERROR,
    Drawn,
    SecretDraws,
    delta_of,
    grid_of,
    noise,
    normals_of,
    release,
    secret_normals,
)

needs_kernel = pytest.mark.skipif(gaussian.library() is None, reason="the compiled kernel was not built")
EDGES = [0, 1, 2, 3, 2**10, 2**32 - 1, 2**53 + 1, 2**61, 2**62 - 1, 2**62, 2**63 - 2**40, 2**63 - 1]
WORDS = [*EDGES, *(2**64 - 1 - edge for edge in EDGES), int(0.29289 * 2**64), int(0.7071 * 2**64)]


def exact(one: int, other: int) -> tuple[float, float]:
    """The two normal numbers of two words, as docs/theory/noise.md defines them, with 60 digits."""
    with mpmath.workdps(60):
        u = (mpmath.mpf(one) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** 64
        radius = mpmath.sqrt(-2 * mpmath.log(u))
        quarter, rest = divmod(other, 2**62)
        rest = rest - 2**62 if rest >= 2**61 else rest
        angle = (mpmath.mpf(rest) + mpmath.mpf(1) / 2) * mpmath.pi / 2 / mpmath.mpf(2) ** 62
        far, near = radius * mpmath.cos(angle) * (-1 if quarter & 2 else 1), radius * mpmath.sin(angle)
        return (near, far) if quarter & 1 else (far, near)


def all_words(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Extreme words in all pairs, words near the ends, and words at random."""
    rng = np.random.default_rng(seed)
    ends = [int(x) >> k for k, x in enumerate(rng.integers(0, 2**64, 60, np.uint64))]
    one = [*(word for word in WORDS for _ in WORDS), *ends, *(2**64 - 1 - e for e in ends)]
    other = [*(WORDS * len(WORDS)), *ends[::-1], *ends]
    more = rng.integers(0, 2**64, (2, count), np.uint64)
    return np.array([*one, *more[0].tolist()], np.uint64), np.array([*other, *more[1].tolist()], np.uint64)


def test_computed_normals_are_within_the_error_of_the_proof() -> None:
    one, other = all_words(0, 1000)
    found, worst = normals_of(one, other), 0.0
    for i, (a, b) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        for k, truth in enumerate(exact(a, b)):
            worst = max(worst, float(abs(mpmath.mpf(float(found[k, i])) - truth)))
    assert worst <= ERROR / 4  # the other three quarters are for scaling, adding and dividing


@needs_kernel
@pytest.mark.parametrize("name", sorted(gaussian.variants()))
def test_compiled_normals_are_within_the_error_of_the_proof(name: str) -> None:
    compiled, (one, other) = gaussian.variants()[name], all_words(1, 1000)
    half = compiled.noise_block() // 2
    missing = -len(one) % half
    blocks = np.stack([np.pad(w, (0, missing)).reshape(-1, half) for w in (one, other)], 1).reshape(-1)
    found = np.empty(len(blocks))
    call = gaussian._Noise(blocks.ctypes.data, None, found.ctypes.data, len(blocks), 1.0, 1.0, 1)
    compiled.noise_run(byref(call))
    pairs = found.reshape(-1, 2, half)
    for k in range(2):
        truth = np.array([exact(*two)[k] for two in zip(one.tolist(), other.tolist(), strict=True)])
        assert np.abs(pairs[:, k].reshape(-1)[: len(one)] - truth).max() <= ERROR / 4  # truth is rounded: 2⁻⁵⁰ at most


@needs_kernel
@pytest.mark.parametrize("name", sorted(gaussian.variants()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_releases_round_as_torch_does(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words: a number of a thousand million lies so near a tie that another rounding moves it."""
    compiled, block, std = gaussian.variants()[name], gaussian.variants()[name].noise_block(), 0.37
    rng, count = np.random.default_rng(1), 5 * block - 7
    blocks = rng.integers(0, 2**64, 5 * block, np.uint64)
    total = torch.tensor(rng.normal(size=count) * 2.0 ** rng.integers(-40, 60, count), dtype=dtype)
    total[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    values, found = np.empty(count), torch.empty(count, dtype=dtype)
    compiled.noise_run(byref(gaussian._Noise(blocks.ctypes.data, None, values.ctypes.data, count, std, 1.0, 1)))
    last = (count, std, grid_of(std), dtype == torch.float64)
    compiled.noise_run(byref(gaussian._Noise(blocks.ctypes.data, total.data_ptr(), found.data_ptr(), *last)))
    drawn = Drawn(torch.from_numpy(values), grid_of(std))
    monkeypatch.setattr(gaussian, "library", lambda: compiled)
    assert torch.equal(found, drawn.on(total))
    monkeypatch.setattr(gaussian, "library", lambda: None)
    assert torch.equal(found, drawn.on(total))


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 511, 512, 513, 8191, 8192, 8193, 2**17 + 1, 2**18 + 300])
def test_every_number_of_a_vector_gets_its_own_noise(count: int) -> None:
    found = secret_normals(count, torch.device("cpu"))
    assert found.unique().numel() == count
    total = torch.arange(count, dtype=torch.float64) * 1000
    away = release(total, 1.0, SecretDraws()) - total
    assert count == 0 or away.abs().max() < 10
    assert count < 250 or 0.8 < away.std() < 1.2


@needs_kernel
def test_threads_share_a_long_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    total = torch.arange(10 * gaussian.PIECE + 5, dtype=torch.float64) * 1000
    away = release(total, 1.0, SecretDraws()) - total
    assert away.abs().max() < 10
    assert abs(away.std() - 1) < 0.01
    parts = away[: 10 * gaussian.PIECE].view(10, -1)
    assert (torch.corrcoef(parts) - torch.eye(10)).abs().max() < 0.02  # no two threads have one key


@pytest.mark.parametrize("compiled", [True, False])
def test_noise_is_normal_in_the_middle_and_in_the_tail(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(gaussian, "library", lambda: None)
    found = secret_normals(2_000_001, torch.device("cpu")).numpy()
    assert len(found) == 2_000_001
    assert stats.kstest(found, "norm").pvalue > 1e-6
    beyond = (np.abs(found) > 4).sum()
    assert stats.binomtest(int(beyond), len(found), 2 * stats.norm.sf(4)).pvalue > 1e-6
    half = gaussian.library().noise_block() // 2 if gaussian.library() else 2048
    two = found[: 4096 * 488].reshape(-1, 2, half)  # the two numbers of a pair
    assert abs((two[:, 0] * two[:, 1]).mean()) < 6 / np.sqrt(two[:, 0].size)
    assert abs(((two[:, 0] ** 2 - 1) * (two[:, 1] ** 2 - 1)).mean()) < 12 / np.sqrt(two[:, 0].size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_released_number_is_the_nearest_on_the_grid_whatever_the_size_of_the_sum(dtype: torch.dtype) -> None:
    rng, std = np.random.default_rng(1), 0.37
    total = torch.tensor(rng.normal(size=600) * 2.0 ** rng.integers(-40, 60, 600), dtype=dtype)
    drawn = noise([600], std, SecretDraws())
    assert drawn.grid is not None
    found, grid = drawn.on(total), Fraction(drawn.grid)
    assert found.dtype == dtype
    for y, s, n in zip(found.tolist(), total.tolist(), drawn.values.tolist(), strict=True):
        away = (Fraction(s) + Fraction(n)) / grid
        whole = Fraction(y) / grid
        assert whole.denominator == 1
        digits = 24 if dtype == torch.float32 else 53
        assert abs(whole - away) <= Fraction(1, 2) + Fraction(1, 2**40) + abs(away) / 2**digits


def test_grids_are_powers_of_two_between_a_32nd_and_a_16th_of_the_noise() -> None:
    for std in [*np.geomspace(1e-30, 1e30, 400).tolist(), 1.0, 16.0, 2.0**-40]:
        grid = grid_of(std)
        assert Fraction(grid).numerator == 1 or Fraction(grid).denominator == 1
        assert Fraction(std) / 32 < Fraction(grid) <= Fraction(std) / 16


@pytest.mark.parametrize("std", [0.0, -1.0, float("inf"), float("nan"), 1e-200])
def test_noise_of_no_size_is_refused(std: float) -> None:
    with pytest.raises(DefenseError, match=r"cannot be drawn\. Give a number"):
        release(torch.zeros(3), std, SecretDraws())


def test_what_is_not_finite_in_a_sum_counts_as_zero() -> None:
    found = release(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0] * 50), 1.0, SecretDraws())
    assert found.abs().max() < 10


def test_a_growing_sum_is_rounded_anew_with_the_same_noise() -> None:
    sums = [torch.randn(500, generator=Generator().manual_seed(k), dtype=torch.float64) for k in range(2)]
    drawn = noise([500], 1.0, SecretDraws())
    first, second = drawn.on(sums[0]), drawn.on(sums[0] + sums[1])
    assert ((first - sums[0]) - (second - sums[0] - sums[1])).abs().max() <= drawn.grid
    assert not torch.equal(second, first + sums[1])
    assert torch.equal((second / drawn.grid).round(), second / drawn.grid)


def test_a_generator_gives_the_noise_of_simulations() -> None:
    sizes, total = [20, 5, 100], torch.randn(125)
    rng = Generator().manual_seed(3)
    each = torch.cat([torch.empty(size).normal_(generator=rng) for size in sizes])
    assert torch.equal(release(total, 0.5, Generator().manual_seed(3), sizes), total + 0.5 * each)


def test_the_distance_to_the_ideal_mechanism_is_small_for_every_run_there_is() -> None:
    assert delta_of(0) == 0
    assert delta_of(10**9) < 2e-7  # a thousand steps of a million weights
    assert delta_of(10**12) < 1.1e-5
    assert delta_of(10**30) == 1


# A server with 100 candidates, one of which is the truth (BREACHES.md, section 1: grain).

CANDIDATES, WEIGHTS, TRIALS = 100, 20_000, 15
Released = Callable[[Tensor, float], Tensor]


def by_torch(total: Tensor, std: float) -> Tensor:
    return release(total, std, Generator().manual_seed(int(torch.randint(2**31, ()))))


def by_cipher(total: Tensor, std: float) -> Tensor:
    return release(total, std, SecretDraws())


def picked(released: Released, z: float, seed: int, half: int) -> bool:
    """Whether the candidate whose residual has the clearest grain is the truth.

    ``half``: how far the two numbers of a pair lie apart. Of pairs of small radius 1 - exp(-r²/2) is a multiple of
    2⁻²⁴ where normals were made of 24-bit uniforms, and the angle always is.
    """
    rng = Generator().manual_seed(seed)
    candidates = torch.randn(CANDIDATES, WEIGHTS, generator=rng)
    candidates /= candidates.norm(dim=1, keepdim=True)
    truth = seed % CANDIDATES
    y = released(candidates[truth], z).double()
    pairs = ((y - candidates.double()) / z)[:, : WEIGHTS // (2 * half) * 2 * half].unflatten(1, (-1, 2, half))
    one, other = pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)
    square = one.square() + other.square()
    whole = -torch.expm1(-square / 2) * 2**24
    grain = torch.where(square < 0.1, (2 * torch.pi * whole).cos(), 0.0).sum(1)
    return int(grain.argmax()) == truth


@pytest.mark.parametrize("z", [1.0, 10.0, 100.0])
def test_the_last_bits_tell_the_right_candidate_with_torchs_noise_and_not_with_ours(z: float) -> None:
    """Family: grain. Chance is 0.15 of 15; five or more would come once in 5e6 runs."""
    assert sum(picked(by_torch, z, seed, 8) for seed in range(TRIALS)) == TRIALS
    for half in (1, 8, 256, 2048):
        assert sum(picked(by_cipher, z, seed, half) for seed in range(TRIALS)) < 5


def test_what_is_released_lies_on_the_same_grid_whichever_candidate_it_was() -> None:
    """Family: grain. Division by the slots and the cast come after and see nothing but the grid."""
    for seed in range(5):
        total = torch.randn(1000, generator=Generator().manual_seed(seed))
        for released in (by_cipher(total, 1.3), by_cipher(total.double(), 1.3)):
            whole = released.double() / grid_of(1.3)
            assert torch.equal(whole, whole.round())


def test_noise_kept_apart_says_whether_it_is_rounded() -> None:
    secret, simulated = noise([3], 1.0, SecretDraws()), noise([3], 1.0, Generator())
    assert secret.values.dtype == torch.float64
    assert secret.grid == grid_of(1.0)
    assert isinstance(simulated, Drawn)
    assert simulated.grid is None
