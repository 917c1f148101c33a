"""How far CUDA may round products: TF32 keeps ten bits, which is too few for what is compared or descended exactly."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(wanted: bool = True, tuned: bool = False) -> Iterator[None]:
    """Within, convolutions and matrix products on CUDA run in plain float32, or else in TF32; put back after.

    Where it is ``tuned``, cuDNN tries its algorithms for each convolution that it has not met and keeps the fastest.
    """
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not wanted
    torch.backends.cudnn.benchmark = tuned
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
        torch.backends.cudnn.benchmark = before[2]
