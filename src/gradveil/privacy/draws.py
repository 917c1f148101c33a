"""Random numbers of a defence: secret ones from a cipher, or simulated ones from a seeded generator.

A defence takes a ``Source`` and draws by the functions here. Secret numbers are those of ChaCha20 under a key of 256
bits that the operating system gives for each draw: nobody, the client included, can draw them again.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.special import betaincinv
from torch import Generator, Tensor

from gradveil.errors import DefenseError

CHUNK = 2**16  # bytes of a stream that are made at once, so that they stay near the processor
_ZEROS = bytes(CHUNK)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SecretDraws:
    """Randomness that nobody can draw again: it has no state, and every draw has a key of its own.

    So a copy, a pickle, a thread or a forked process never repeats it.
    """

    device: torch.device = _CPU  # where what is drawn lies


Source = Generator | SecretDraws
NoiseKind = Literal["secret", "simulated", "none"]


def is_secret(rng: Source) -> bool:
    """Whether what is drawn is secret; a generator's numbers can be drawn again from its seed."""
    return isinstance(rng, SecretDraws)


def noise_kind(rng: Source) -> NoiseKind:
    """Return what rows, reports and accounts call noise from this source."""
    return "secret" if is_secret(rng) else "simulated"


@contextmanager
def own_draws(defense: object) -> Iterator[None]:
    """Say it in one line where a defence hands secret draws to a function of torch that wants a generator."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if SecretDraws.__name__ not in str(error):
            raise
        name = getattr(defense, "spec_name", type(defense).__name__)
        raise DefenseError(
            f"{name} draws from rng by torch itself, and what rng draws here is secret, which torch cannot. Draw by "
            f"gradveil.draws, for example draws.normal(shape, rng), or say protect(..., simulated=generator)."
        ) from error


class Stream:
    """The numbers of one key, 64 bits each; of a fresh one where none is given."""

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = Cipher(ChaCha20(os.urandom(32) if key is None else key, bytes(16)), mode=None).encryptor()

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
        """Write the next words of the stream."""
        view = words.view(np.uint8).data
        for at in range(0, len(view), CHUNK):
            part = view[at : at + CHUNK]
            self._cipher.update_into(memoryview(_ZEROS)[: len(part)], part)


def words(count: int) -> npt.NDArray[np.uint64]:
    """Return secret numbers of 64 bits."""
    found = np.empty(count, np.uint64)
    if count:
        Stream().fill(found)
    return found


def normal(shape: Sequence[int], rng: Source) -> Tensor:
    """Return standard normal noise in float32, where the source lies."""
    if isinstance(rng, Generator):
        return torch.randn(torch.Size(shape), generator=rng, device=rng.device)
    from gradveil.privacy.gaussian import secret_normals

    return secret_normals(prod(shape), rng.device).float().reshape(tuple(shape))


def uniform(shape: Sequence[int], rng: Source) -> Tensor:
    """Return numbers in [0, 1) in float32, multiples of 2⁻²⁴, where the source lies."""
    if isinstance(rng, Generator):
        return torch.rand(torch.Size(shape), generator=rng, device=rng.device)
    found = (words(prod(shape)) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return torch.from_numpy(found).reshape(tuple(shape)).to(rng.device)


def laplace(shape: Sequence[int], rng: Source) -> Tensor:
    """Return Laplace noise of mean 0 and std 1, as a difference of two exponentials; in float64 where secret."""
    if isinstance(rng, Generator):
        logs = torch.rand((2, *shape), generator=rng, device=rng.device).neg_().log1p_()  # of numbers in (0, 1]
    else:
        logs = torch.from_numpy(np.log(words(2 * prod(shape)) * 2.0**-64 + 2.0**-65)).reshape(2, *shape).to(rng.device)
    return (logs[1] - logs[0]).div_(2**0.5)


def integers(high: int, shape: Sequence[int], rng: Source) -> Tensor:
    """Return whole numbers from 0 to high - 1, on the CPU as torch draws them there."""
    if isinstance(rng, Generator):
        return torch.randint(high, torch.Size(shape), generator=rng, device=rng.device)
    if not 0 < high < 2**32:
        raise DefenseError(f"integers(high={high}): give a number from 1 to 2**32 - 1.")
    drawn, factor, half = words(prod(shape)), np.uint64(high), np.uint64(32)
    low = (drawn & np.uint64(2**32 - 1)) * factor >> half
    found = (drawn >> half) * factor + low >> half  # the upper 64 bits of the product
    return torch.from_numpy(found.astype(np.int64)).reshape(tuple(shape)).to(rng.device)


def permutation(count: int, rng: Source) -> Tensor:
    """Return the numbers from 0 to count - 1 in random order."""
    if isinstance(rng, Generator):
        return torch.randperm(count, generator=rng, device=rng.device)
    return torch.from_numpy(words(count).argsort(kind="stable")).to(rng.device)


def beta(alpha: float, rng: Source) -> float:
    """Return one number of Beta(alpha, alpha)."""
    if isinstance(rng, Generator):
        gammas: Any = torch._standard_gamma(torch.full((2,), alpha), generator=rng)
        one, other = gammas.clamp_min(1e-30).tolist()
        return float(one / (one + other))
    return float(betaincinv(alpha, alpha, words(1)[0] * 2.0**-64 + 2.0**-65))
