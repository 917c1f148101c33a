"""Arithmetic that matching can trust: on CUDA, no TF32 unless it is asked for.

TF32 keeps ten bits of the mantissa. A line search near the solution then sees noise in place of descent, and L-BFGS
stalls at a relative residual near 2e-5, where the picture is still blurred.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(wanted: bool = True) -> Iterator[None]:
    """Within, convolutions and matrix products on CUDA run in plain float32, or else in TF32; put back after."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not wanted
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
