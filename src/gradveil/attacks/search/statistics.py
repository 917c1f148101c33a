"""What batch norm's running statistics say of the inputs: those of the model, and those that a client sends back.

A client in train mode moves them towards the statistics of its own batches, r <- (1 - m) r + m s. The server knows r, m
and the number of steps, so that it reads s off what comes back: at every batch norm the mean and the variance of each
channel over the client's batch, exactly for one step, averaged with known weights over several. No defence of the
gradient touches them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.attacks.search.matching import pick
from gradveil.gradients.functional import per_problem, quiet
from gradveil.modules import copied_state
from gradveil.tree import Params
from gradveil.types import Observation

SENT = 0.1  # the weight beside a distance of at most 2, unless told otherwise
SMALLEST = 1e-5  # a variance below it counts as this much


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the model's batch norm layers that carry running statistics, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


def sending_norms(model: nn.Module) -> int:
    """Return how many batch norm layers of a model in training move their running statistics, which are then sent."""
    return sum(norm.training for norm in batch_norms(model).values())


def sent_statistics(seen: Observation) -> Params:
    """Return the client's own batch statistics by buffer name, (C,) each, as the sent buffers show them."""
    found: Params = {}
    for layer, norm in batch_norms(seen.model).items():
        if not norm.training:
            continue
        steps = seen.update.num_steps
        before = int(norm.num_batches_tracked or 0) if norm.momentum is None else 0
        kept = before / (before + steps) if norm.momentum is None else (1 - norm.momentum) ** steps
        for name in ("running_mean", "running_var"):
            after = seen.update.buffers.get(f"{layer}.{name}")
            if after is not None and kept < 1:
                old = norm.get_buffer(name)
                found[f"{layer}.{name}"] = (after.to(old) - kept * old) / (1 - kept)
    return found


@dataclass(frozen=True)
class SentStatistics:
    """weight x distance of the images' batch statistics, at each batch norm, from those of the client's batch.

    Per layer the mean over channels of (μ - mean)² / var + (σ² / var - 1)², so that the weight means the same at every
    layer. Taken at the first weights, over all examples.
    """

    weight: float
    client: Params  # name: (P, C)
    of: Callable[[Tensor], Params]  # x (P, N, *shape) -> name: (P, C)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term per problem (P,) for inputs x (P, N, *shape)."""
        trial, parts = self.of(x), []
        for name, mean in self.client.items():
            if name.endswith("running_mean"):
                spread = name.removesuffix("mean") + "var"
                var = self.client[spread].clamp_min(SMALLEST)
                far = (trial[name] - mean).square() / var + (trial[spread] / var - 1).square()
                parts.append(far.mean(1))
        return self.weight * torch.stack(parts).mean(0)

    def take(self, rows: Tensor) -> "SentStatistics":
        """Return the term for the problems at these positions."""
        return replace(self, client=pick(self.client, rows))


def statistics_term(seen: Sequence[Observation], owner: Tensor, weight: float) -> tuple[SentStatistics, ...]:
    """Return the term for problems of these owners, where every client sent its statistics; else nothing."""
    known = [sent_statistics(s) for s in seen] if weight > 0 else [{}]
    if not all(known):
        return ()
    stacked = {n: torch.stack([k[n] for k in known])[owner.to(v.device)] for n, v in known[0].items()}
    return (SentStatistics(weight, stacked, per_problem(seen[0].model, _no_loss, _statistics(seen[0].model))),)


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("statistics need no loss")


def _statistics(model: nn.Module) -> Callable[[object, Tensor], Params]:
    """Return x (N, *shape) -> mean and unbiased variance of each channel at every batch norm, by buffer name."""
    norms = batch_norms(model)

    def one(_: object, x: Tensor) -> Params:
        found: Params = {}

        def look(layer: str, inputs: Tensor) -> None:
            over = [d for d in range(inputs.ndim) if d != 1]
            found[f"{layer}.running_mean"] = inputs.mean(over)
            found[f"{layer}.running_var"] = inputs.var(over)

        handles = [
            norm.register_forward_pre_hook(lambda _, args, layer=layer: look(layer, args[0]))
            for layer, norm in norms.items()
        ]
        try:
            functional_call(model, copied_state(model), (x,))
        finally:
            for handle in handles:
                handle.remove()
        return found

    return one


@dataclass(frozen=True)
class BatchNormStatistics:
    """weight x distance of the images' statistics, at each batch norm, from the running ones (Yin et al. 2021).

    The distance is that of ``SentStatistics``. The running statistics are part of the global model.
    """

    weight: float
    model: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term per problem (P,) for inputs x (P, N, *shape)."""
        norms = list(batch_norms(self.model).values())
        parts: list[Tensor] = []

        def compare(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = args[0].unflatten(0, x.shape[:2])  # (P, N, C, ...)
            over = [d for d in range(1, inputs.ndim) if d != 2]
            buffers = dict(norm.named_buffers())
            var = buffers["running_var"] + norm.eps  # type: ignore[operator]
            mean, spread = inputs.mean(over), inputs.var(over, unbiased=False)
            distance = (mean - buffers["running_mean"]).square() / var + (spread / var - 1).square()
            parts.append(distance.mean(1))

        handles = [norm.register_forward_pre_hook(compare) for norm in norms]
        modes = [norm.training for norm in norms]
        state = {n: v.detach() for n, v in (*self.model.named_parameters(), *self.model.named_buffers())}
        try:
            for norm in norms:
                norm.training = False
            with quiet(self.model):
                functional_call(self.model, state, (x.flatten(0, 1),))
        finally:
            for norm, handle, mode in zip(norms, handles, modes, strict=True):
                handle.remove()
                norm.training = mode
        return self.weight * torch.stack(parts).mean(0)

    def take(self, rows: Tensor) -> "BatchNormStatistics":
        """Return itself: it is the same for all problems."""
        return self
