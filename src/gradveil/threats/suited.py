"""What suits a network: the order of attacks in limited time, how many threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import nn

from gradveil.attacks.base import LARGE, build
from gradveil.attacks.newton import Newton
from gradveil.tree import parameters, size


def is_large(model: nn.Module, weights: int = LARGE) -> bool:
    """Return whether a network has so many weights that what is done to it is limited, unless more is asked for."""
    return size(parameters(model)) > weights


def in_limited_time(attacks: tuple[str, ...], input_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the attacks for limited time: on large pictures the search of the cheapest steps before the others."""
    if len(input_shape) != 3 or prod(input_shape) <= Newton().dense_limit:
        return attacks
    return tuple(sorted(attacks, key=lambda spec: build(spec).kind == "search" and not spec.startswith("gs")))


WEIGHTS = 100_000
NUMBERS = 256  # of one input


def is_small(model: nn.Module, input_shape: tuple[int, ...] = ()) -> bool:
    """Return whether one thread is enough for this model, and for inputs of this shape.

    On a shared machine a second thread costs a small problem many times what it brings.
    """
    return size(parameters(model)) <= WEIGHTS and prod(input_shape) <= NUMBERS


BUSY = 0.75  # of the cores


def is_busy() -> bool:
    """Return whether others keep this machine's cores busy: then threads wait for each other most of the time.

    Where the number of threads was chosen (OMP_NUM_THREADS), it is left.
    """
    chosen = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys()
    return not chosen and hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)


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
