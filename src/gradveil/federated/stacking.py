"""What stacked clients need: steps padded to one shape, and the paper's defence with every client's own share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gradveil.defenses.base import Defense
from gradveil.defenses.compose import Compose
from gradveil.defenses.guard.step import substitute
from gradveil.defenses.masking import largest_live_each
from gradveil.defenses.representation import RepresentationPerturbation
from gradveil.federated.client import shuffled
from gradveil.federated.engines import Job
from gradveil.federated.settings import Local
from gradveil.layers.modules import representation
from gradveil.scores.exact import scores
from gradveil.scores.fast.stacked import StackedRows
from gradveil.tree import Params


def why_no_masks(model: nn.Module, defense: Defense, x: Tensor) -> str | None:
    """Return why the representations of this defence's clients cannot be perturbed together; ``None``: they can.

    ``x`` is one batch, of which only the shape matters.
    """
    layers = set()
    for part in _parts(defense):
        if "representation" not in part.acts_on:
            continue
        if not isinstance(part, RepresentationPerturbation) or not _is_plain(part):
            return "the defence acts on each client's representation by a rule of its own"
        layers |= set(part.layers(model))
    if len(layers) > 1:
        return f"the defences act on several layers ({', '.join(sorted(layers))})"
    if layers and StackedRows.of(model, layers.pop(), x) is None:
        return "the defended layer does not follow a plain chain of convolutions and activations"
    return None


def _parts(defense: Defense) -> tuple[Defense, ...]:
    return tuple(p for part in defense.parts for p in _parts(part)) if isinstance(defense, Compose) else (defense,)


def _is_plain(defense: RepresentationPerturbation) -> bool:
    """Whether the defence is the paper's rule; share, count and layer may differ from client to client."""
    return defense.scope == "sample" and defense.p == 2 and defense.method in ("auto", "exact")


class Masks:
    """Perturbs the input of one layer for K clients; ``counts`` lies on the device, as a CUDA graph needs it."""

    def __init__(self, model: nn.Module, defense: Defense, x: Tensor, clients: int) -> None:
        self.model = model
        (self.layer,) = {layer for part in _parts(defense) for layer in part.layers(model)}
        rows = StackedRows.of(model, self.layer, x)
        assert rows is not None
        self.rows = rows
        self.like = representation(model, self.layer, x)  # of which only the size matters
        self.counts = torch.zeros(clients, 1, 1, dtype=torch.int64, device=x.device)

    def use(self, defenses: list[Defense]) -> None:
        """Take each client's number of entries from its own defence."""
        parts = [[p for p in _parts(d) if isinstance(p, RepresentationPerturbation)] for d in defenses]
        counts = [sum(part.budget(self.like) for part in some) for some in parts]
        self.counts.copy_(torch.tensor(counts).view(-1, 1, 1), non_blocking=True)

    def perturbed(self, weights: Params, x: Tensor) -> Tensor:
        """Return r' (K, B, L) for stacked weights and inputs (K, B, ...)."""
        rows = self.rows(weights, x)
        chosen = largest_live_each(rows.r, scores(rows.r, rows.norms, 2.0), self.counts)
        return rows.r.masked_fill(chosen, 0.0)

    def forward(self, weights: Params, x: Tensor, perturbed: Tensor) -> Tensor:
        """Return one client's logits; the defended layer's weight gradient comes from ``perturbed`` (B, L)."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
            return substitute(module, args[0], perturbed.view_as(args[0]))

        handle = self.model.get_submodule(self.layer).register_forward_hook(hook)
        try:
            logits: Tensor = torch.func.functional_call(self.model, weights, (x,))
        finally:
            handle.remove()
        return logits


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
