"""What a client would send for a trial input: the gradient of the loss, for many problems at once.

Three forms of the same function, each differentiable in the trial inputs and labels:

- *manual*: the first backward pass written out, for models that are a chain of known layers (``by_hand.py``);
- *vmap*: ``vmap(grad(loss))``, for any module that ``torch.func`` can trace;
- *loop*: one problem after the other in plain autograd, for the rest.

``batch_norm`` is that by the batch's own statistics, its second derivative in closed form, for autograd. With u the
standardised input, s the inverse deviation, w the weight and ⟨·⟩ the mean over a channel, let P v = v - ⟨v⟩ - u ⟨u v⟩.
Then d u = s P dx and d s = -s² ⟨u dx⟩. The gradient w s P δ by the input is torch's own kernel, and the derivatives of
that are two more of it and few plain operations; torch's formula is forty of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gradveil.errors import AttackError
from gradveil.gradients.by_hand import known_chain, manual_gradients, pays, wide
from gradveil.losses import CROSS_ENTROPY, CrossEntropy, Loss
from gradveil.modules import copied_buffers, copied_state, plain_attention, plain_checkpoints
from gradveil.step_rule import Momenta
from gradveil.tree import Params, parameters
from gradveil.types import Observation, Update


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the batch norm of x (N, C, ...) in train mode; autograd can differentiate it twice."""
    ones = x.new_ones(x.shape[1]) if weight is None else weight
    out: Tensor = _OwnStatistics.apply(x, ones, torch.zeros_like(ones) if bias is None else bias, eps)
    return out


class _OwnStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        return *_Pull.apply(delta, *ctx.saved_tensors, ctx.eps), None


def _pull_back(delta: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        delta, x, weight, None, None, mean, scale, True, eps, [True, True, True]
    )
    return found


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        found = _pull_back(delta, x, weight, mean, scale, eps)
        ctx.save_for_backward(delta, x, weight, mean, scale, *found[1:])
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, a: Tensor, by_weight: Tensor, by_bias: Tensor) -> tuple[Tensor | None, ...]:
        delta, x, weight, mean, scale, sum_ud, sum_d = ctx.saved_tensors
        count, like = x.numel() // x.shape[1], [1, -1, *[1] * (x.ndim - 2)]

        def each(v: Tensor) -> Tensor:
            return v.view(like)

        by_delta, sum_ua, sum_a = _pull_back(a, x, weight, mean, scale, ctx.eps)
        over = [d for d in range(x.ndim) if d != 1]
        inner = (a * delta).sum(over) - (sum_a * sum_d + sum_ua * sum_ud) / count  # Σ a P δ
        unit = (x - each(mean)) * each(scale)
        slope = weight * scale / count
        turned = torch.addcmul(delta * each(by_weight - slope * sum_ua), a, each(slope * sum_ud), value=-1)
        by_x, *_ = _pull_back(turned, x, torch.ones_like(weight), mean, scale, ctx.eps)
        by_x = torch.addcmul(by_x, unit, each(slope * scale * inner), value=-1)
        by_delta = torch.addcmul(by_delta + each(by_bias), unit, each(by_weight))
        return by_delta, by_x, scale * inner, None, None, None


@contextmanager
def full_precision(wanted: bool = True, tuned: bool = False) -> Iterator[None]:
    """Within, convolutions and matrix products run in plain float32, or else on CUDA in TF32; put back after.

    Where it is ``tuned``, cuDNN tries its algorithms for each convolution that it has not met and keeps the fastest.
    """
    matmul = torch.get_float32_matmul_precision()  # of CUDA and, at "medium", of the CPU
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("highest" if wanted else "high")
    torch.backends.cudnn.allow_tf32 = not wanted
    torch.backends.cudnn.benchmark = tuned
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


Form = Literal["auto", "manual", "vmap", "loop"]
TrialGradients = Callable[[Tensor, Tensor], Params]  # x (P, N, *shape), y (P, N, K) -> name: (P, *shape)
StepGradient = Callable[[Params, Tensor, Tensor], Params]  # weights, x (b, *shape), y (b, K) -> mean gradient
WeightLoss = Callable[[Params, Tensor, Tensor], Tensor]  # the same -> the mean loss


@contextmanager
def quiet(model: nn.Module, transformed: bool = True) -> Iterator[None]:
    """Within, the model is a pure function of its input that can be differentiated twice, also by ``torch.func``.

    Batch norm in train mode normalises by the batch's own statistics and leaves the running ones alone; where it is not
    ``transformed``, for autograd alone, by a quarter of the operations. Dropout is off: the server does not know the
    client's masks. Some functions run by plain formulas (``PlainFunctions``), and activations are never checkpointed.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    random = [
        m for m in model.modules() if isinstance(m, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)) and m.training
    ]
    try:
        for norm in norms:
            norm.forward = partial(_by_own_statistics, norm, transformed)  # type: ignore[method-assign]
        for layer in random:
            layer.training = False
        with plain_attention(), plain_checkpoints(), PlainFunctions():
            yield
    finally:
        for norm in norms:
            del norm.forward
        for layer in random:
            layer.training = True


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model gives for examples; it writes to none of its buffers."""
    with quiet(model), torch.no_grad():
        output: Tensor = functional_call(model, copied_state(model), (x.to(next(model.parameters())),))
    return output


def _by_own_statistics(norm: _BatchNorm, transformed: bool, x: Tensor) -> Tensor:
    """Batch norm by formula: under vmap the second derivative of torch's own comes out wrong."""
    if not transformed:
        return batch_norm(x, norm.weight, norm.bias, norm.eps)
    unit = _standardised(x, [d for d in range(x.ndim) if d != 1], norm.eps)
    like = [-1 if d == 1 else 1 for d in range(x.ndim)]
    return unit * norm.weight.view(like) + norm.bias.view(like) if norm.affine else unit


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    unit = _standardised(x, list(range(-len(normalized_shape), 0)), eps)
    unit = unit if weight is None else unit * weight
    return unit if bias is None else unit + bias


def _instance_norm(
    x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not use_input_stats:
        return F.instance_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    unit, like = _standardised(x, list(range(2, x.ndim)), eps), [-1] + [1] * (x.ndim - 2)
    unit = unit if weight is None else unit * weight.view(like)
    return unit if bias is None else unit + bias.view(like)


def _standardised(x: Tensor, over: list[int], eps: float) -> Tensor:
    centred = x - x.mean(over, keepdim=True)
    return centred * (centred.square().mean(over, keepdim=True) + eps).rsqrt()


def _as_it_is(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *rest: Any,
    **more: Any,
) -> Tensor:  # fmt: skip
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *rest, **more)


_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
)  # fmt: skip


class PlainFunctions(TorchFunctionMode):
    """Within, what torch gets wrong or cannot differentiate runs by its formula, and no function draws a number.

    Under vmap the second derivatives of layer norm and instance norm come out wrong, as those of batch norm do; silu
    and mish have none in forward mode.
    """

    _plain: ClassVar[dict[Any, Callable[..., Tensor]]] = {
        F.layer_norm: _layer_norm,
        F.instance_norm: _instance_norm,
        F.silu: lambda x, inplace=False: x * x.sigmoid(),
        F.mish: lambda x, inplace=False: x * F.softplus(x).tanh(),
        F.rrelu: lambda x, lower=1 / 8, upper=1 / 3, training=False, inplace=False: F.leaky_relu(
            x, (lower + upper) / 2
        ),
        F.scaled_dot_product_attention: _attention,  # by a function it drops out whatever a module's mode is
        **dict.fromkeys(_DROPOUTS, _as_it_is),
    }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._plain.get(func, func)(*args, **(kwargs or {}))


def trial_gradients(
    model: nn.Module, names: Iterable[str], form: Form = "auto", loss: Loss = CROSS_ENTROPY
) -> TrialGradients:
    """Return the function (x, y) -> gradient of the loss by the named parameters, per problem.

    ``x`` is (P, N, *shape), ``y`` (P, N, K) targets as rows. ``auto`` takes the written-out form where the loss is
    plain cross-entropy and that form the faster one, else vmap, else the loop; a single problem runs as it is. The
    written-out form is for reverse mode only: under ``torch.func`` transforms ask for ``vmap``.
    """
    wanted = tuple(names)
    plain = isinstance(loss, CrossEntropy) and loss.plain
    links = known_chain(model) if plain and form in ("auto", "manual") else None
    if form == "manual" and links is None:
        raise AttackError(f"{type(model).__name__} is not a chain of known layers. Use form='vmap' or 'auto'.")
    if links is not None and (form == "manual" or pays(links, next(model.parameters()).device)):
        return manual_gradients(links, wanted)
    start = {name: p for name, p in parameters(model).items() if name in wanted}
    form = "loop" if form == "auto" and alone_pays(model) else form
    return per_problem(model, loss_of(model, wanted, loss), lambda gradient, x, y: gradient(start, x, y), form)


def alone_pays(model: nn.Module) -> bool:
    """Whether one problem after the other is the faster way: for wide convolutions on a CPU, in no known chain.

    Under vmap their weight gradients are convolutions of as many groups as there are problems.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and wide(model.modules()) and known_chain(model) is None


def loss_of(model: nn.Module, free: Iterable[str], loss: Loss) -> WeightLoss:
    """Return the loss as a function of the parameters of these names, the examples and their targets as rows."""
    named = set(free)
    fixed = {n: p.detach() for n, p in model.named_parameters() if n not in named}

    def of_weights(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        state = fixed | copied_buffers(model) | weights  # copied: a forward pass may write to them
        return loss.soft(functional_call(model, state, (x,)), y)

    return of_weights


def per_problem(
    model: nn.Module,
    loss: WeightLoss,
    one: Callable[..., Params],
    form: Form = "auto",
    randomness: Literal["error", "same"] = "error",
) -> Callable[..., Params]:
    """Return ``one`` of each problem of stacked arguments (x, y, ...): by vmap, else one by one.

    Its first argument is how to take the loss's gradient, a ``StepGradient``.
    """
    many = vmap(partial(one, grad(loss)), randomness=randomness)
    traced, proven = form != "loop", form == "vmap"

    def gradients(*stacked: Any) -> Params:
        nonlocal traced, proven
        if traced and (len(stacked[0]) > 1 or form == "vmap"):
            try:
                with quiet(model):
                    found: Params = many(*stacked)
            except (RuntimeError, NotImplementedError, AttackError) as error:
                if proven or isinstance(error, torch.cuda.OutOfMemoryError):  # not for lack of a batching rule
                    raise
                traced = False
            else:
                proven = True
                return found
        with quiet(model, transformed=False):
            each = [tree_map(lambda value, i=i: value[i], stacked) for i in range(len(stacked[0]))]
            alone = [one(partial(_by_autograd, loss), *given) for given in each]
        if len(alone) == 1:  # no copy of large gradients
            return {name: g[None] for name, g in alone[0].items()}
        return {name: torch.stack([g[name] for g in alone]) for name in alone[0]}

    return gradients


def _by_autograd(loss: WeightLoss, weights: Params, x: Tensor, y: Tensor) -> Params:
    free = {n: w if w.requires_grad and not w.is_leaf else w.detach().requires_grad_() for n, w in weights.items()}
    moving = (x, y, *weights.values())
    again = torch.is_grad_enabled() and any(value.requires_grad for value in moving)
    with torch.enable_grad():
        found = torch.autograd.grad(loss(free, x, y), list(free.values()), create_graph=again, materialize_grads=True)
    return dict(zip(free, found, strict=True))


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


def trial_update(
    seen: Observation, gradient: StepGradient, weights: Params, x: Tensor, y: Tensor, blur: float = 0.0
) -> Params:
    """Return what a client with these examples would send: its local steps, and the simulated defence."""

    def step(w: Params, part: Tensor, labels: Tensor) -> Params:
        return seen.simulated(gradient(w, part, labels), "gradient")

    return seen.simulated(unroll(step, weights, x, y, seen.update, blur), "update")


def trial_updates(seen: Observation, names: Iterable[str], blur: float = 0.0) -> TrialGradients:
    """Return x (P, N, *shape), y (P, N, K) -> what a client with each problem's examples would send, by name."""
    start, wanted = parameters(seen.model), tuple(names)

    def one(gradient: StepGradient, x: Tensor, y: Tensor) -> Params:
        sent = trial_update(seen, gradient, start, x, y, blur)
        return {n: sent[n] for n in wanted}

    return per_problem(seen.model, loss_of(seen.model, start, seen.loss), one, randomness=seen.randomness)


def unroll(
    step_gradient: StepGradient, weights: Params, x: Tensor, y: Tensor, update: Update, blur: float = 0.0
) -> Params:
    """Return the sum of the steps' directions, (W_before - W_after) / lr, as a function of x (N, ...) and y (N, K)."""
    batches, epochs = local_plan(update)
    start, kept, total = weights, Momenta(), dict[str, Tensor]()
    for _ in range(epochs):
        for chosen in batches:
            lo, hi = int(chosen[0]), int(chosen[-1]) + 1
            gradient = step_gradient(weights, x[lo:hi], y[lo:hi])
            moved, kept = update.rule.direction(gradient, weights, start, kept, blur)
            weights = {n: w - update.lr * moved[n] if n in moved else w for n, w in weights.items()}
            total = {n: d + total[n] if total else d for n, d in moved.items()}
    return total
