"""What suits a network and its clients: attacks by default, how many threads, whether time is limited."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import nn

from gradveil.attacks.newton import Newton
from gradveil.tree import parameters, size
from gradveil.types import Update

ATTACKS = ("newton", "dlg:steps=15,restarts=3")
ATTACKS_ON_LARGE = ("gs",)
LARGE = 500_000  # weights beyond which second-order attacks, and training, take hours on a CPU
UNROLLED = 16  # local steps up to which they are unrolled


def is_large(model: nn.Module, weights: int = LARGE) -> bool:
    """Return whether a network has so many weights that what is done to it is limited, unless more is asked for."""
    return size(parameters(model)) > weights


def in_limited_time(attacks: tuple[str, ...], input_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the attacks for limited time: on large pictures the search of the cheapest steps before all others."""
    if (
        len(input_shape) != 3
        or prod(input_shape) <= Newton().dense_limit
        or not {"newton", "dlg"} & set(_names(attacks))
    ):
        return attacks
    return ("gs", *attacks)


def _names(attacks: tuple[str, ...]) -> list[str]:
    return [attack.partition(":")[0] for attack in attacks]


def default_attacks(model: nn.Module, client: Update) -> tuple[str, ...]:
    """Return the attacks that suit a model and the local training of its clients.

    Several steps are unrolled, and matched between the first and the last weights, which costs the same for any number;
    of Adam's signs a search makes more than equations do. A batch behind a first fully connected layer is unmixed, and
    a transformer, or its low-rank factors, is held against the spans of what its layers saw.
    """
    large = is_large(model)
    unmixing = () if client.rule.adaptive else _unmixing(model, client.num_examples)
    factors = any("lora_b" in name.lower() for name, p in model.named_parameters() if p.requires_grad)
    tokens = any("attention" in type(module).__name__.lower() for module in model.modules())
    spans = ("patches",) if (factors or tokens) and client.num_steps == 1 and not client.rule.adaptive else ()
    return (*unmixing, *_searches(large, client), *spans)


def _unmixing(model: nn.Module, examples: int) -> tuple[str, ...]:
    """Return the attacks on a first layer that is fully connected: of one example exact, of more with ReLU behind."""
    leaves = [m for m in model.modules() if not any(m.children())]
    weighted = [i for i, m in enumerate(leaves) if any(True for _ in m.parameters())]
    first = leaves[weighted[0]] if weighted else None
    if not isinstance(first, nn.Linear):
        return ()
    if examples == 1:
        return ("analytic",) if first.bias is not None else ()
    if len(weighted) < 2:
        return ()
    return ("spear", "cocktail") if isinstance(leaves[weighted[0] + 1], nn.ReLU) else ("cocktail",)


def _searches(large: bool, client: Update) -> tuple[str, ...]:
    """Return the attacks that search for the gradient."""
    if client.num_steps > 1:
        exact = () if large or client.rule.adaptive else ("newton",)
        unrolled = ("fedavg:steps=400",) if client.num_steps <= UNROLLED else ()
        return (*exact, "surrogate:steps=400", *unrolled)
    return ATTACKS_ON_LARGE if large or client.rule.adaptive else ATTACKS


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
