"""What a client would send for a trial input: the gradient of the loss, for many problems at once.

Three forms of the same function, each differentiable in the trial inputs and labels:

- *manual*: the first backward pass written out, for models that are a chain of known layers (``by_hand.py``);
- *vmap*: ``vmap(grad(loss))``, for any module that ``torch.func`` can trace;
- *loop*: one problem after the other, for the rest.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.errors import AttackError
from gradveil.gradients.by_hand import known_chain, manual_gradients, pays
from gradveil.layers.modules import plain_attention
from gradveil.tree import Params, parameters
from gradveil.types import Update

Form = Literal["auto", "manual", "vmap", "loop"]
TrialGradients = Callable[[Tensor, Tensor], Params]  # x (P, N, *shape), y (P, N, K) -> name: (P, *shape)


def soft_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (N, K) for label probabilities y (N, K)."""
    return -(y * logits.log_softmax(-1)).sum(-1).mean()


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Within, the model is a pure function of its input that can be differentiated twice.

    Batch norm in train mode normalises by the batch's own statistics, as the client's did, and leaves the
    running ones alone. Dropout is off: the server does not know the client's masks. Attention runs by its
    plain formula, since the fused kernels have no second derivative.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    random = [
        m for m in model.modules() if isinstance(m, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)) and m.training
    ]
    try:
        for norm in norms:
            norm.forward = partial(_by_own_statistics, norm)  # type: ignore[method-assign]
        for layer in random:
            layer.training = False
        with plain_attention():
            yield
    finally:
        for norm in norms:
            del norm.forward
        for layer in random:
            layer.training = True


def _by_own_statistics(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Batch norm in plain operations: under vmap the second derivative of torch's own comes out wrong."""
    over = [d for d in range(x.ndim) if d != 1]
    like = [-1 if d == 1 else 1 for d in range(x.ndim)]
    centred = x - x.mean(over, keepdim=True)
    unit = centred * (centred.square().mean(over, keepdim=True) + norm.eps).rsqrt()
    return unit * norm.weight.view(like) + norm.bias.view(like) if norm.affine else unit


def trial_gradients(model: nn.Module, names: Iterable[str], form: Form = "auto") -> TrialGradients:
    """Return the function (x, y) -> gradient of the loss by the named parameters, per problem.

    ``x`` is (P, N, *shape), ``y`` (P, N, K) label probabilities, and each tensor of the result (P, *shape of
    the parameter). ``auto`` takes the written-out form where the model is a chain and that form is the
    faster one on this device, else vmap, else the loop. On a CPU the written-out form is for reverse mode
    only; under ``torch.func`` transforms (``jvp``, ``jacrev``, ``vmap``) ask for ``vmap``.
    """
    wanted = tuple(names)
    links = known_chain(model) if form in ("auto", "manual") else None
    if form == "manual" and links is None:
        raise AttackError(f"{type(model).__name__} is not a chain of known layers. Use form='vmap' or 'auto'.")
    if links is not None and (form == "manual" or pays(links, next(model.parameters()).device)):
        return manual_gradients(links, wanted)
    loss = _loss_of(model, wanted)
    one, many = grad(loss), vmap(grad(loss), in_dims=(None, 0, 0))
    start = {name: p for name, p in parameters(model).items() if name in wanted}
    traced, proven = form != "loop", form == "vmap"

    def gradients(x: Tensor, y: Tensor) -> Params:
        nonlocal traced, proven
        with quiet(model):
            if traced:
                try:
                    found: Params = many(start, x, y)
                except (RuntimeError, NotImplementedError) as error:
                    if proven or isinstance(error, torch.cuda.OutOfMemoryError):  # not for lack of a batching rule
                        raise
                    traced = False
                else:
                    proven = True
                    return found
            alone = [one(start, xi, yi) for xi, yi in zip(x, y, strict=True)]
        return {name: torch.stack([g[name] for g in alone]) for name in wanted}

    return gradients


def _loss_of(model: nn.Module, wanted: tuple[str, ...]) -> Callable[[Params, Tensor, Tensor], Tensor]:
    fixed = {n: p.detach() for n, p in model.named_parameters() if n not in wanted}
    fixed |= {n: b.detach() for n, b in model.named_buffers()}

    def loss(free: Params, x: Tensor, y: Tensor) -> Tensor:
        return soft_cross_entropy(functional_call(model, fixed | free, (x,)), y)

    return loss


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
