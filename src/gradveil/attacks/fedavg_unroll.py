"""Several local steps as one function of the client's examples, from what the server knows.

A client with n examples, batch size b and s steps ran s / ceil(n / b) epochs. Which example went into which batch is
its secret. What is unrolled here is one fixed ordering: examples 0..b-1 first, then b..2b-1, and so on, the same in
every epoch (Dimitrov et al. 2022 average over epochs for the same reason). Within a single epoch the ordering only
renames the unknown examples and costs nothing but the pairing of labels with batches; over several shuffled epochs
it is an approximation.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.errors import AttackError
from gradveil.tree import Params
from gradveil.types import Update

StepGradient = Callable[[Params, Tensor, Tensor], Params]  # weights, x (b, *shape), y (b, K) -> mean gradient


def local_plan(update: Update) -> tuple[tuple[Tensor, ...], int]:
    """Return the batches of one epoch, as positions, and the number of epochs."""
    n = update.num_examples
    size = min(update.batch_size or n, n)
    batches = torch.arange(n).split(size)
    epochs, rest = divmod(update.num_steps, len(batches))
    if rest or epochs == 0:
        raise AttackError(
            f"{update.num_steps} local steps do not fit {n} examples in batches of {size} ({len(batches)} a pass). "
            "Give the update's num_steps, num_examples and batch_size as the client used them."
        )
    return batches, epochs


def unroll(step_gradient: StepGradient, weights: Params, x: Tensor, y: Tensor, update: Update) -> Params:
    """Return the sum of the step gradients, (W_before - W_after) / lr, as a function of x (N, ...) and y (N, K)."""
    batches, epochs = local_plan(update)
    total: Params = {}
    for _ in range(epochs):
        for chosen in batches:
            lo, hi = int(chosen[0]), int(chosen[-1]) + 1
            gradient = step_gradient(weights, x[lo:hi], y[lo:hi])
            weights = {n: w - update.lr * gradient[n] if n in gradient else w for n, w in weights.items()}
            total = {n: g + total[n] if total else g for n, g in gradient.items()}
    return total
