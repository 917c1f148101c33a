"""Noise that can be told from a Gaussian by someone who has the record: a guessed seed, a grain, a second use.

What is left of a release when the right candidate is taken off is the noise alone. torch's CPU normals come sixteen at
a time from 24-bit uniforms by Box-Muller in float32 (ATen/native/cpu/DistributionTemplates.h): entries i and i + 8 of a
block are r cos θ and r sin θ, with θ/2π on a lattice of 2⁻²⁴ and a generator that keeps 32 bits of its seed.
"""

from collections.abc import Sequence
from math import pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BLOCK, HALF = 16, 8
BITS = 24
SIGMAS = 6.0  # a chance of 1e-9 for a sound noise
STATE, MIDDLE = 624, 397  # of the Mersenne Twister
AT_ONCE = 2**16  # seeds


def grain(residual: Array, starts: Sequence[int]) -> float:
    """Return by how many standard deviations the angles of pairs lie on torch's lattice; ``starts``: of the tensors.

    The angles of pairs that are no pairs of Box-Muller are taken off, so that a public grid on which everything is
    rounded counts for nothing.
    """
    blocks = [_blocks(part) for part in np.split(residual, starts[1:])]
    found = np.concatenate([b for b in blocks if len(b)] or [np.empty((0, BLOCK))])
    if not len(found):
        return 0.0
    right = _on_lattice(found[:, :HALF], found[:, HALF:])
    wrong = _on_lattice(found[:, :HALF], np.roll(found[:, HALF:], 1, axis=1))
    return float(np.mean(right - wrong)) * sqrt(right.size)  # each a cosine, of variance ½


def _blocks(part: Array) -> Array:
    whole = len(part) // BLOCK * BLOCK
    if len(part) < BLOCK:
        return np.empty((0, BLOCK))
    return part[: whole if whole == len(part) else whole - BLOCK].reshape(-1, BLOCK)  # the last is drawn again


def _on_lattice(cosine: Array, sine: Array) -> Array:
    turns = np.arctan2(sine, cosine) / (2 * pi) * 2.0**BITS
    return np.cos(2 * pi * turns)


def seed_of(residual: Array, starts: Sequence[int], seeds: range, before: Sequence[int] = (0,)) -> int | None:
    """Return the seed of a torch CPU generator whose first normals are the residual's, up to a factor; None: no one.

    ``before``: how many draws of the generator may come before them; up to two hundred are looked at.
    """
    first = next((i for i, part in enumerate(np.split(residual, starts[1:])) if len(part) >= BLOCK), None)
    if first is None or first > 0:  # a short tensor's normals are drawn in another way
        return None
    seen = residual[:BLOCK]
    seen = seen / np.linalg.norm(seen)
    window = [draws for draws in before if draws + BLOCK <= STATE - MIDDLE]
    for low in range(seeds.start, seeds.stop, AT_ONCE):
        some = np.arange(low, min(low + AT_ONCE, seeds.stop), dtype=np.uint64)
        drawn = _outputs(some.astype(np.uint32), max(window) + BLOCK)
        for skipped in window:
            normals = _normals(drawn[skipped : skipped + BLOCK])
            alike = seen @ (normals / np.linalg.norm(normals, axis=0))
            if alike.max() > 1 - 1e-4:
                return int(some[int(alike.argmax())])
    return None


def _outputs(seeds: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Return the first outputs (count, S) of Mersenne Twisters with these seeds."""
    kept = np.empty((count + 1 + count, len(seeds)), np.uint32)
    state = seeds.astype(np.uint32)
    for i in range(MIDDLE + count):
        if i <= count:
            kept[i] = state
        if i >= MIDDLE:
            kept[count + 1 + i - MIDDLE] = state
        state = np.uint32(1812433253) * (state ^ (state >> np.uint32(30))) + np.uint32(i + 1)
    now, later, far = kept[:count], kept[1 : count + 1], kept[count + 1 :]
    mixed = (now & np.uint32(0x80000000)) | (later & np.uint32(0x7FFFFFFF))
    y: Any = far ^ (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), np.uint32(0x9908B0DF), np.uint32(0))
    y = y ^ (y >> np.uint32(11))
    y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    found: NDArray[np.uint32] = y ^ (y >> np.uint32(18))
    return found


def _normals(drawn: NDArray[np.uint32]) -> Array:
    """Return the normals (16, S) of a block, as torch makes them of sixteen outputs."""
    uniform = (drawn & np.uint32(2**BITS - 1)) / 2.0**BITS
    radius = np.sqrt(-2 * np.log1p(-uniform[:HALF]))
    angle = 2 * pi * uniform[HALF:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def reused(residuals: Sequence[Array]) -> float:
    """Return the largest correlation of two releases' noise, in standard deviations of independent ones."""
    if len(residuals) < 2:
        return 0.0
    rows = np.stack([e / max(float(np.linalg.norm(e)), 1e-300) for e in residuals])
    alike = np.abs(rows @ rows.T - np.eye(len(rows)))
    return float(alike.max() * sqrt(rows.shape[1]))
