"""Small problems on one thread: on a shared machine a second one costs many times what it brings."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import nn

from gradveil.tree import parameters, size

WEIGHTS = 100_000
NUMBERS = 256  # of one input


def is_small(model: nn.Module, input_shape: tuple[int, ...] = ()) -> bool:
    """Return whether one thread is enough for this model, and for inputs of this shape."""
    return size(parameters(model)) <= WEIGHTS and prod(input_shape) <= NUMBERS


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Within, torch runs on one thread, where wanted; the setting is put back afterwards."""
    before = torch.get_num_threads()
    try:
        if wanted:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
