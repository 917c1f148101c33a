"""How far products may be rounded: TF32 and bfloat16 keep too few bits for what is bounded, compared or descended."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(wanted: bool = True, tuned: bool = False) -> Iterator[None]:
    """Within, convolutions and matrix products run in plain float32, or else on CUDA in TF32; put back after.

    Where it is ``tuned``, cuDNN tries its algorithms for each convolution that it has not met and keeps the fastest.
    """
    matmul = torch.get_float32_matmul_precision()  # of CUDA and, at "medium", of the CPU
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("highest" if wanted else "high")
    torch.backends.cudnn.allow_tf32 = not wanted
    torch.backends.cudnn.benchmark = tuned
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before
