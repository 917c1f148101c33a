"""The local steps of several clients side by side, padded to one shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from gradveil.federated.client import Local, shuffled
from gradveil.federated.engines import Job


@dataclass
class Steps:
    """The local steps of several clients, padded to one shape."""

    indices: Tensor  # (S, K, B) into the training split; padding: 0
    weights: Tensor  # (S, K, B), 1/n on a step's n examples, else 0
    counts: list[int]  # (K,) steps of each client

    def to(self, device: torch.device) -> "Steps":
        """Return the steps on a device, without waiting for it."""
        pin = device.type == "cuda"
        moved = [t.pin_memory().to(device, non_blocking=True) if pin else t for t in (self.indices, self.weights)]
        return Steps(moved[0], moved[1], self.counts)


def pad_steps(
    jobs: Sequence[Job], rngs: Sequence[Generator], local: Local, dtype: torch.dtype, least: int = 1
) -> Steps:
    """Return the steps that each client would take alone, side by side, at least ``least`` examples wide."""
    width = max(least, *(min(local.batch_size or len(job.indices), len(job.indices)) for job in jobs))
    plans = [shuffled(len(job.indices), local, rng) for job, rng in zip(jobs, rngs, strict=True)]
    counts = [len(sizes) for _, sizes in plans]
    indices = np.zeros((len(jobs), max(counts), width), np.int64)
    weights = np.zeros(indices.shape)
    for k, (job, (order, sizes)) in enumerate(zip(jobs, plans, strict=True)):
        lengths = np.array(sizes)[:, None]
        filled = np.arange(width) < lengths  # (S_k, B)
        indices[k, : len(sizes)][filled] = job.indices[order.numpy()]
        weights[k, : len(sizes)] = filled / lengths
    side_by_side = torch.from_numpy(indices).transpose(0, 1).contiguous()
    return Steps(side_by_side, torch.from_numpy(weights).transpose(0, 1).contiguous().to(dtype), counts)
