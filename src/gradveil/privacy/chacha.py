# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Noise on a CUDA device: ChaCha20, Box-Muller, scale, sum and grid in one Triton kernel. Imported where it is used.

A program makes LANES blocks of the cipher, each of 8 words of 64 bits: 4 radii, 4 angles, so 8 numbers. The stream is
that of the library on the CPU (RFC 8439 with a nonce of zeros), byte by byte; the normal numbers are as exact as there.
"""

import os
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 128  # blocks of the cipher that a program makes at once


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def _words(k0, k1, k2, k3, k4, k5, k6, k7, LANES: tl.constexpr):
    counter = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.uint32)
    zero = counter ^ counter
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5, s6, s7 = zero + k0.to(tl.uint32), zero + k1.to(tl.uint32), zero + k2.to(tl.uint32), zero + k3.to(tl.uint32)
    s8, s9, s10, s11 = (
        zero + k4.to(tl.uint32),
        zero + k5.to(tl.uint32),
        zero + k6.to(tl.uint32),
        zero + k7.to(tl.uint32),
    )
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, counter, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        _word(x0 + c0, x1 + c1),
        _word(x2 + c2, x3 + c3),
        _word(x4 + s4, x5 + s5),
        _word(x6 + s6, x7 + s7),
        _word(x8 + s8, x9 + s9),
        _word(x10 + s10, x11 + s11),
        _word(x12 + counter, x13),
        _word(x14, x15),
    )


@triton.jit
def _pair(one, other):
    from_end = one ^ (one >> 63)
    x = from_end.to(tl.float64) * 5.421010862427522e-20 + 2.710505431213761e-20  # 2⁻⁶⁴, 2⁻⁶⁵
    y = tl.where(one < 0, 1.0 - x, x)
    lost = tl.where(one < 0, (1.0 - y) - x, 0.0)  # what rounding took from 1 - x
    radius = tl.sqrt(-2.0 * (tl.log(y) + lost / y))
    angle = ((other << 2) | 2).to(tl.float64) * 8.515303950216386e-20  # π/4 · 2⁻⁶³
    near = radius * tl.sin(angle)
    far = tl.where(other < 0, -radius, radius) * tl.cos(angle)
    turned = ((other >> 62) & 1) > 0
    return tl.where(turned, near, far), tl.where(turned, far, near)


@triton.jit
def _put(total, out, at, count, normal, share, grid, per_grid, SUM: tl.constexpr):
    """Write the numbers of some places: the sum with noise on the grid, or the noise alone."""
    inside = at < count
    if SUM:
        scaled = tl.load(total + at, mask=inside, other=0.0).to(tl.float64) * per_grid
        scaled = tl.where(scaled - scaled == 0.0, scaled, 0.0)  # what is not finite counts as zero
        whole = tl.floor(scaled + 0.5)
        value = (whole + tl.floor((scaled - whole) + normal * share + 0.5)) * grid
    else:
        value = normal * share
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


NOT_SPECIAL = ["share", "grid", "count", *(f"k{i}" for i in range(8))]  # one compilation for all keys and sizes


@triton.jit(do_not_specialize=NOT_SPECIAL)
def _noise(
    total, out, share, grid, count,
    k0, k1, k2, k3, k4, k5, k6, k7,
    SUM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write noise for 8 · LANES numbers; ``share`` and ``grid`` are the bits of numbers in float64."""
    share, grid = share.to(tl.float64, bitcast=True), grid.to(tl.float64, bitcast=True)
    per_grid = 1.0 / grid
    w0, w1, w2, w3, w4, w5, w6, w7 = _words(k0, k1, k2, k3, k4, k5, k6, k7, LANES)
    at = tl.program_id(0).to(tl.int64) * (8 * LANES) + tl.arange(0, LANES)
    first, second = _pair(w0, w4)
    _put(total, out, at, count, first, share, grid, per_grid, SUM)
    _put(total, out, at + LANES, count, second, share, grid, per_grid, SUM)
    first, second = _pair(w1, w5)
    _put(total, out, at + 2 * LANES, count, first, share, grid, per_grid, SUM)
    _put(total, out, at + 3 * LANES, count, second, share, grid, per_grid, SUM)
    first, second = _pair(w2, w6)
    _put(total, out, at + 4 * LANES, count, first, share, grid, per_grid, SUM)
    _put(total, out, at + 5 * LANES, count, second, share, grid, per_grid, SUM)
    first, second = _pair(w3, w7)
    _put(total, out, at + 6 * LANES, count, first, share, grid, per_grid, SUM)
    _put(total, out, at + 7 * LANES, count, second, share, grid, per_grid, SUM)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def _stream(out, k0, k1, k2, k3, k4, k5, k6, k7, LANES: tl.constexpr):
    w0, w1, w2, w3, w4, w5, w6, w7 = _words(k0, k1, k2, k3, k4, k5, k6, k7, LANES)
    at = out + (tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)) * 8
    tl.store(at, w0)
    tl.store(at + 1, w1)
    tl.store(at + 2, w2)
    tl.store(at + 3, w3)
    tl.store(at + 4, w4)
    tl.store(at + 5, w5)
    tl.store(at + 6, w6)
    tl.store(at + 7, w7)


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def stream(key: bytes, programs: int, device: torch.device) -> Tensor:
    """Return the first words of a key's stream, as whole numbers with a sign."""
    out = torch.empty(programs * LANES * 8, dtype=torch.int64, device=device)
    with torch.cuda.device_of(out):
        _stream[(programs,)](out, *struct.unpack("<8i", key), LANES)
    return out


def normals(out: Tensor, std: float) -> None:
    """Fill a vector of float64 with secret noise."""
    _run(None, out, std, 1.0)


def release(total: Tensor, std: float, grid: float) -> Tensor:
    """Return a vector with secret noise, on the grid."""
    total, out = total.contiguous(), torch.empty_like(total, memory_format=torch.contiguous_format)
    _run(total, out, std / grid, grid)
    return out


def _run(total: Tensor | None, out: Tensor, share: float, grid: float) -> None:
    programs = -(-len(out) // (8 * LANES))
    if programs > 2**32 // LANES:
        raise ValueError(f"{len(out)} numbers are more than one key is for. Release fewer at once.")
    if programs:
        key = struct.unpack("<8i", os.urandom(32))
        given = out if total is None else total
        with torch.cuda.device_of(out):
            _noise[(programs,)](given, out, _bits(share), _bits(grid), len(out), *key, total is not None, LANES)
