"""The gradients of each record's loss, one by one, without the caller knowing how they are computed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gradveil.errors import DefenseError
from gradveil.layers.modules import copied_buffers, plain_attention, plain_checkpoints
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.losses import build as build_loss
from gradveil.tree import Params
from gradveil.types import Batch

HELD = 2**28  # bytes of gradients that are held at once; beyond, they are computed again when they are needed again


class Records(ABC):
    """Gradients g_j of N records."""

    count: int

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Return each ||g_j||² (N,)."""

    @abstractmethod
    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R) with directions (R, *shape) by name."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Params:
        """Return Σ w_j g_j; a record of weight 0 never counts, even where its gradient is not finite."""


@dataclass(frozen=True)
class Held(Records):
    """Gradients that lie side by side: (N, *shape) by name."""

    gradients: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many there are."""
        return len(next(iter(self.gradients.values())))

    def square_norms(self) -> Tensor:
        """Return each ||g_j||² (N,)."""
        return torch.stack([_wide(g).flatten(1).square().sum(1) for g in self.gradients.values()]).sum(0)

    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R)."""
        return sum_of([g.flatten(1) @ directions[n].flatten(1).to(g).T for n, g in self.gradients.items()])

    def weighted_sum(self, weights: Tensor) -> Params:
        """Return Σ w_j g_j."""
        kept = weights != 0
        if not bool(kept.all()):
            weights, kept_only = weights[kept], {n: g[kept] for n, g in self.gradients.items()}
            return Held(kept_only).weighted_sum(weights)
        return {n: torch.tensordot(weights.to(g), g, 1) for n, g in self.gradients.items()}


@dataclass(frozen=True)
class InParts(Records):
    """Gradients of some records after the others: computed anew for every question."""

    parts: Sequence[Callable[[], Held]]
    sizes: Sequence[int]

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many there are."""
        return sum(self.sizes)

    def square_norms(self) -> Tensor:
        """Return each ||g_j||² (N,)."""
        return torch.cat([part().square_norms() for part in self.parts])

    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R)."""
        return torch.cat([part().along(directions) for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> Params:
        """Return Σ w_j g_j."""
        total: Params = {}
        for part, some in zip(self.parts, weights.split(list(self.sizes)), strict=True):
            found = part().weighted_sum(some)
            total = {n: g + total[n] if total else g for n, g in found.items()}
        return total


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in float32 at least."""
    return torch.stack([_wide(term) for term in terms]).sum(0)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def records_of(model: nn.Module, batch: Batch, loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> Records:
    """Return the gradients of each record's loss at the model's weights, by the fastest way that fits.

    What mixes examples is refused: nobody could say then what one record's part is.
    """
    minimised = CROSS_ENTROPY if loss is F.cross_entropy else build_loss(loss)
    check_separable(model, minimised.of(batch.labels))
    return _one_by_one(model, batch, minimised.of(batch.labels))


def check_separable(model: nn.Module, loss: Loss) -> None:
    """Raise where an example's gradient would depend on the others in its batch, or buffers on the data."""
    if not loss.separable:
        name = getattr(loss, "spec", None) or getattr(loss, "name", None) or loss.spec_name
        raise DefenseError(
            f"The loss {name} is not known to be a mean of one loss per example, so that no record can be clipped by "
            f"itself. Use cross_entropy without weights, bce or mse."
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise DefenseError(
                f"Layer {name!r} is batch norm in train mode, which mixes the examples of a batch: no record can be "
                f"clipped by itself. Use group norm, or freeze the layer by eval()."
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise DefenseError(
                f"Layer {name!r} keeps running statistics of the data, which would leave the client beside the noise. "
                f"Build it with track_running_stats=False."
            )


def _one_by_one(model: nn.Module, batch: Batch, loss: Loss) -> Records:
    """Return the gradients by ``torch.func``: the model runs on batches of one."""
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}

    def value(free: Params, x: Tensor, y: Tensor) -> Tensor:
        state = fixed | copied_buffers(model) | free  # copied: a forward pass may write to them
        return loss.each(functional_call(model, state, (x[None],)), y[None]).sum()

    def part(x: Tensor, y: Tensor) -> Held:
        with plain_attention(), plain_checkpoints():
            try:
                found = vmap(partial(grad(value), weights), randomness="different")(x, y)
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                alone = [grad(value)(weights, *one) for one in zip(x, y, strict=True)]
                found = {n: torch.stack([g[n] for g in alone]) for n in weights}
        return Held({n: g.detach() for n, g in found.items()})

    each = sum(w.numel() * w.element_size() for w in weights.values())
    size = max(1, HELD // max(each, 1))
    if len(batch) <= size:
        return part(batch.inputs, batch.labels)
    pieces = [batch[start : start + size] for start in range(0, len(batch), size)]
    return InParts([partial(part, p.inputs, p.labels) for p in pieces], [len(p) for p in pieces])
