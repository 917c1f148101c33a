"""Which reconstruction belongs to which original: an update does not keep the order of its examples."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def pair(found: Tensor, truth: Tensor) -> Tensor:
    """Return ``order`` (N,) such that ``found[order]`` lies nearest to ``truth`` in total squared error.

    The optimal assignment, not a greedy one. It favours the attack, as a privacy measure must.
    """
    cost = torch.cdist(truth.flatten(1).double(), found.flatten(1).double()).square()  # (N, N)
    _, order = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(order)
