"""Secret random numbers from a cipher, or simulated ones from a generator; Gaussian noise of them on a public grid.

A defence takes a ``Source`` and draws by the functions here. Secret numbers are those of ChaCha20 under a key of 256
bits that the operating system gives for each draw: nobody, the client included, can draw them again.

    released = g · round((total + std · n) / g),  g the largest power of two up to std / 16

Were n exactly normal, the rounding would be post-processing. It is computed in float64 from 128 bits for each pair
(Box and Muller), within ``ERROR`` of the exact map; ``delta_of`` bounds what that changes. The proof is in
docs/theory/noise.md.
"""

import os
from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from math import floor, isfinite, log2, pi, prod, sqrt
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.special import betaincinv
from torch import Generator, Tensor

from gradveil.errors import DefenseError
from gradveil.imports import on_threads, variants_of

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


CHUNK = 2**16  # bytes of a stream that are made at once, so that they stay near the processor
_ZEROS = bytes(CHUNK)
ABI = 2
WORDS = 16384  # made and used at once, so that they stay near the processor; whole blocks
PIECE = 2**17  # numbers of a thread's turn


class _Noise(Structure):
    """One call, as ``gaussian.c`` has it."""

    _fields_ = (
        ("words", c_void_p), ("sum", c_void_p), ("out", c_void_p), ("count", c_int64), ("std", c_double),
        ("grid", c_double), ("is_double", c_int32),
    )  # fmt: skip


class Stream:
    """The numbers of one key, 64 bits each; of a fresh one where none is given."""

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = Cipher(ChaCha20(os.urandom(32) if key is None else key, bytes(16)), mode=None).encryptor()

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
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


ERROR = 2.0**-46  # of a computed normal number, where it is below 6.7
PAIRS = CHUNK // 16  # made at once by numpy
_STEP = np.float64(pi / 4 * 2.0**-63)


def delta_of(numbers: int, steps: int = 16) -> float:
    """Return how far the released numbers of a whole run are, in total variation, from the ideal mechanism's."""
    return min(1.0, numbers * 2.0**-57 + sqrt(numbers) * steps / 16 * 2.0**-38)


def grid_of(std: float, steps: int = 16) -> float:
    """Return the public grid for noise of a standard deviation: the largest power of two with so many steps in it."""
    if not (isfinite(std) and 1e-100 < std < 1e100):
        raise DefenseError(f"Noise of standard deviation {std} cannot be drawn. Give a number from 1e-100 to 1e100.")
    return 2.0 ** floor(log2(std / steps))


@dataclass(frozen=True, eq=False)
class Drawn:
    """Noise kept apart from what it is added to, for a step whose sum grows: every sum is rounded with it anew."""

    values: Tensor  # (p,), float64 where secret
    grid: float | None  # of what is released; None: simulated noise, which is not rounded

    def on(self, total: Tensor) -> Tensor:
        """Return a sum (p,) with this noise, in the sum's type; what is not finite in the sum counts as zero."""
        if self.grid is None:
            return total + self.values.to(total)
        if _by_kernel(total) and self.values.device.type == "cpu":
            return _added(total, self.values, self.grid)
        exact = (total.double() / self.grid).nan_to_num_(0.0, 0.0, 0.0)
        whole = exact.round()
        left = exact.sub_(whole).add_(self.values.to(exact) / self.grid)  # exact before the noise, whatever the sum
        return whole.add_(left.round_()).mul_(self.grid).to(total.dtype)


def noise(sizes: Sequence[int], std: float, rng: Source, device: torch.device | str = "cpu", steps: int = 16) -> Drawn:
    """Return Gaussian noise for tensors of these sizes as one vector: secret, or as the generator gives it.

    ``steps`` of the grid in a standard deviation: more where what is released is summed and rounded again.
    """
    if isinstance(rng, Generator):
        flat = torch.empty(sum(sizes), device=rng.device)
        for part in flat.split(list(sizes)) if rng.device.type == "cpu" else (flat,):
            part.normal_(generator=rng)
        return Drawn(flat.mul_(std).to(device), None)
    return Drawn(secret_normals(sum(sizes), torch.device(device), std), grid_of(std, steps))


def release(total: Tensor, std: float, rng: Source, sizes: Sequence[int] | None = None, steps: int = 16) -> Tensor:
    """Return a sum (p,) with Gaussian noise, in its own type; with a generator the numbers of tensors of such sizes."""
    if isinstance(rng, Generator):
        drawn = noise([len(total)] if sizes is None else sizes, std, rng, total.device)
        return drawn.values.to(total).add_(total)
    grid = grid_of(std, steps)
    if total.is_cuda and (compiled := _on_cuda()) is not None:
        released: Tensor = compiled.release(total, std, grid)
        return released
    if _by_kernel(total):
        return _released(total, std, grid)
    return Drawn(secret_normals(len(total), total.device, std), grid).on(total)


def _by_kernel(total: Tensor) -> bool:
    known = total.device.type == "cpu" and total.dtype in (torch.float32, torch.float64)
    return known and library() is not None


@cache
def _on_cuda() -> Any:
    """Return what makes noise on a CUDA device in one pass; None where it does not run."""
    try:
        from gradveil.privacy import chacha

        chacha.normals(torch.empty(1, dtype=torch.float64, device="cuda"), 1.0)
    except Exception:  # no Triton, or one that has no compiler here: the CPU draws
        return None
    return chacha


def secret_normals(count: int, device: torch.device, std: float = 1.0) -> Tensor:
    """Return secret normal numbers (count,) of a standard deviation, in float64."""
    on_cuda = _on_cuda() if device.type == "cuda" else None
    found = torch.empty(count, dtype=torch.float64, device=None if on_cuda is None else device)
    if on_cuda is not None:
        on_cuda.normals(found, std)
        return found
    if library() is not None:
        _run(None, found, std, 1.0)
        return found.to(device)
    return _by_numpy(found, Stream()).mul_(std).to(device)


def keyed_normals(count: int, key: bytes) -> Tensor:
    """Return standard normal numbers (count,) that follow from a secret key of 32 bytes alone, in float64."""
    return _by_numpy(torch.empty(count, dtype=torch.float64), Stream(key))


def _by_numpy(found: Tensor, stream: Stream) -> Tensor:
    words = np.empty((2, min(PAIRS, (len(found) + 1) // 2)), np.uint64)
    for at in range(0, len(found), 2 * PAIRS):
        stream.fill(words.reshape(-1))
        two = torch.from_numpy(normals_of(*words)).view(-1)
        found[at : at + 2 * PAIRS] = two[: len(found) - at]
    return found


def normals_of(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return the normal numbers (2, pairs) of two words each: the radius of the first, the angle of the second.

    u = (one + ½) / 2⁶⁴ is taken from its nearer end, so that neither logarithm loses digits.
    """
    near = np.minimum(one, ~one).astype(np.float64) * 2.0**-64 + 2.0**-65
    radius = np.sqrt(-2.0 * np.where(one >> np.uint64(63), np.log1p(-near), np.log(near)))
    angle = ((other << np.uint64(2)).view(np.int64) | np.int64(2)) * _STEP  # within an eighth of a turn
    far = np.where(other >> np.uint64(63), -1.0, 1.0) * radius * np.cos(angle)
    near = radius * np.sin(angle)
    turned = (other >> np.uint64(62)) & np.uint64(1) > 0
    return np.stack([np.where(turned, near, far), np.where(turned, far, near)])


@cache
def variants() -> dict[str, Any]:
    """Return the compiled kernels that this processor can run, the best first."""
    return variants_of(Path(__file__).with_name("_gaussian"), "noise", ABI)


@cache
def library() -> Any:
    """Return the best kernel, or None where there is none."""
    return next(iter(variants().values()), None)


def _released(total: Tensor, std: float, grid: float) -> Tensor:
    """Return a vector of float32 or float64 with secret noise, on the grid."""
    total, out = total.contiguous(), torch.empty_like(total, memory_format=torch.contiguous_format)
    _run(total, out, std, grid)
    return out


def _added(total: Tensor, values: Tensor, grid: float) -> Tensor:
    """Return a vector of float32 or float64 with noise that was drawn before (float64), on the grid."""
    total, values = total.contiguous(), values.contiguous()
    out = torch.empty_like(total, memory_format=torch.contiguous_format)
    where = (c_void_p(t.data_ptr()) for t in (values, total, out))
    library().noise_add(*where, c_int64(len(out)), c_double(grid), c_int32(total.dtype == torch.float64))
    return out


def _run(total: Tensor | None, out: Tensor, std: float, grid: float) -> None:
    run, block, size = library().noise_run, library().noise_block(), out.element_size()
    sums, outs = 0 if total is None else total.data_ptr(), out.data_ptr()
    starts, lock = iter(range(0, len(out), PIECE)), Lock()

    def work() -> None:
        stream, words = Stream(), np.empty(WORDS, np.uint64)  # a key of its own for each thread
        call = _Noise(words.ctypes.data, None, None, 0, std, grid, out.dtype == torch.float64)
        at_call = byref(call)
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            end = min(start + PIECE, len(out))
            for at in range(start, end, WORDS):
                call.count = min(WORDS, end - at)
                stream.fill(words[: -(-call.count // block) * block])
                call.sum, call.out = sums and sums + at * size, outs + at * size
                run(at_call)  # without the interpreter's lock

    pieces = -(-len(out) // PIECE)
    on_threads(work, pieces) if pieces > 1 else work()
