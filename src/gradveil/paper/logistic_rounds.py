"""Federated averaging of logistic regression, all devices of a round in one product.

The same draws and the same defence rule as the general simulation (tested to be equal). Faster because f is the
identity: what the defence removes from an image does not depend on the weights, so it is found once.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data.partition import Indices
from gradveil.errors import DataError
from gradveil.federated.client import shuffled
from gradveil.federated.settings import Training
from gradveil.federated.simulate import round_jobs
from gradveil.seeds import Seeds


def logistic_rounds(
    inputs: Tensor,  # (n, d) float32
    seen: Tensor,  # (n, d): what the weight gradient is built from
    labels: Tensor,  # (n,)
    clients: Sequence[Indices],
    training: Training,
    seeds: Seeds,
    start: Tensor,  # (C, d + 1), the last column is the bias
    pace: Callable[[int], float] | None = None,  # the step size of local step t, in place of a constant one
) -> Iterator[Tensor]:
    """Yield the global weights (C, d + 1) after every round."""
    if len({len(part) for part in clients}) != 1:
        raise DataError("Devices of different sizes cannot share one product; use the general simulation.")
    ones = torch.ones(len(inputs), 1)
    forward, backward = torch.cat([inputs, ones], 1), torch.cat([seen, ones], 1)
    onehot = F.one_hot(labels, len(start)).float()
    w, t = start.float(), 0
    for number in range(1, training.rounds + 1):
        jobs = round_jobs(seeds, number, clients, training)
        orders = []
        for job in jobs:
            order, sizes = shuffled(len(job.indices), training, torch.Generator().manual_seed(job.seed))
            orders.append(torch.from_numpy(job.indices)[order])
        local = w.expand(len(jobs), *w.shape).clone()  # (K, C, d + 1)
        for chosen in torch.stack(orders).split(sizes, dim=1):  # (K, B)
            residual = (forward[chosen] @ local.mT).softmax(2) - onehot[chosen]  # (K, B, C)
            gradient = residual.mT @ backward[chosen] / chosen.shape[1]
            lr = training.lr if pace is None else pace(t)
            local, t = local - lr * (gradient + training.weight_decay * local), t + 1
        w = local.mean(0)
        yield w
