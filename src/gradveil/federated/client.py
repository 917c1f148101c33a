"""One client's part of a round: local steps with the defence inside, then the update it sends."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil import pace
from gradveil.data.base import Split
from gradveil.errors import DefenseError, LossError, UpdateError, is_out_of_memory
from gradveil.federated.settings import Local
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.metrics import ClassOutcome, NumberOutcome, outcome
from gradveil.privacy.noise import Source, permutation
from gradveil.protection.capture import records_of
from gradveil.protection.defense import Defense, accounted, build, in_round, own_draws
from gradveil.protection.passes import Pass, Report, check_layer, substitute
from gradveil.step_rule import Momenta
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Update

BatchLoss = Callable[[Tensor, Tensor], Tensor]  # mean over a batch


@dataclass(frozen=True)
class Sent:
    """What leaves a client: its update, and the buffers (batch-norm statistics) that its model ended with."""

    update: Update
    buffers: Params = field(default_factory=dict)

    @property
    def whole(self) -> Update:
        """The update with the buffers in it: all that the server sees."""
        return replace(self.update, buffers=self.buffers)


def local_update(
    model: nn.Module,
    data: Batch | Sequence[Batch],
    defense: str | Defense,
    lr: float,
    rng: Source,
    epochs: int = 1,
    batch_size: int | None = 32,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    loss: str = "cross_entropy",
    **more: Any,
) -> Update:
    """Train a copy of the model and return the update: the sum of the step gradients, (W_t - W_t^k) / lr.

    ``data`` is the client's examples, shuffled by ``rng`` and cut into batches in each epoch, or a list of batches
    that are taken in the given order. ``more``: optimizer, momentum, clip (see ``StepRule``).
    The model itself is left as it was.
    """
    local = Local(epochs, batch_size, loss, weight_decay=weight_decay, proximal=proximal, **more)
    return train_client(copy.deepcopy(model), data, build(defense), lr, rng, local).whole


def train_client(
    model: nn.Module, data: Batch | Sequence[Batch], defense: Defense, lr: float, rng: Source, local: Local
) -> Sent:
    """Train the model in place and return what the client sends.

    The step directions are summed rather than read off the weights, which would cost digits in float32.
    """
    if not lr > 0:
        raise UpdateError(f"lr={lr}: the learning rate must be above 0.")
    names, weights = list(parameters(model)), list(parameters(model).values())
    loss, plain, kept = build_loss(local.loss), local.is_plain, Momenta()
    start = {name: w.clone() for name, w in zip(names, weights, strict=True)} if local.proximal else {}
    total = [torch.zeros_like(p) for p in weights]
    examples = steps = 0
    per_epoch = len(data) if not isinstance(data, Batch) else -(-len(data) // (local.batch_size or len(data) or 1))
    most = local.epochs * per_epoch
    accounted(defense).check_steps(most)
    defense = in_round(defense, model, None, loss)  # what needs no data
    slots, before = slots_of(data, local), float_buffers(model) if "records" in defense.acts_on else {}
    for batch in _batches(data, local, rng):
        pace.step(steps, most)
        pace.check()
        gradient = step_gradient(model, batch, defense, rng, loss=loss, slots=slots)
        with torch.no_grad():
            taken = {name: gradient[name].detach() for name in names}
            if not plain:
                taken, kept = local.direction(taken, dict(zip(names, weights, strict=True)), start, kept)
            direction = list(taken.values())
            torch._foreach_add_(weights, direction, alpha=-lr)
            torch.clear_autocast_cache()  # a caller's autocast keeps rounded copies of the weights as they were
            torch._foreach_add_(total, direction)
        steps += 1
        examples += len(batch)
    count = len(data) if isinstance(data, Batch) else examples // local.epochs
    size = update_batch_size(local, count)
    update = Update(dict(zip(names, total, strict=True)), count, steps, lr, size, local.rule)
    after = float_buffers(model)
    if moved := [name for name, b in before.items() if not torch.equal(b, after[name])]:
        raise DefenseError(
            f"The buffer {moved[0]!r} changes with the data and would leave the client beside the noise: nothing is "
            f"sent. Use layers without running statistics."
        )
    return Sent(defense.on_update(update, rng), after)


def step_gradient(
    model: nn.Module,
    batch: Batch,
    defense: Defense,
    rng: Source,
    *,
    loss: BatchLoss = F.cross_entropy,
    report: Report | None = None,
    slots: int | None = None,
) -> Params:
    """Return the gradient of the mean loss on a batch, defended: on_batch, on_records or perturb, then on_gradient.

    The same numbers as a training loop under ``protect``, in train and in eval mode. Parameters that the loss
    does not depend on have a zero gradient. ``slots``: how many records a batch of this client has room for, which a
    defence on records divides by; None: as many as there are.
    """
    report = Report() if report is None else report
    with own_draws(defense):
        batch = defense.on_batch(batch, rng)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if "records" in defense.acts_on:
        records = records_of(getattr(model, "_orig_mod", model), batch, loss)
        report.steps += 1
        report.examples += len(batch)
        with own_draws(defense):
            bare = accounted(defense).on_records(records, slots or len(batch), rng)
            return defense.on_gradient({name: bare[name.removeprefix("_orig_mod.")] for name in weights}, rng)
    with torch.enable_grad(), _substituting(model, defense, batch.inputs, rng, report) as under_way:
        output = getattr(model, "_orig_mod", model)(batch.inputs)  # a compiled model: run what was compiled, plainly
        if under_way is not None and (message := under_way.used_elsewhere(output)) is not None:
            raise DefenseError(message)
        value = loss(output, batch.labels)
    grads = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
    report.steps += 1
    report.examples += len(batch)
    with own_draws(defense):
        return defense.on_gradient(dict(zip(weights, grads, strict=True)), rng)


@contextmanager
def _substituting(model: nn.Module, defense: Defense, x: Tensor, rng: Source, report: Report) -> Iterator[Pass | None]:
    """Within, each defended layer's weight gradient is built from its perturbed input."""
    layers = defense.layers(model)
    if not layers:
        yield None
        return
    under_way = Pass(model, x)
    handles: list[RemovableHandle] = []

    def hook(layer: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        r = args[0] if args else kwargs["input"]
        if not len(r):
            return output  # no examples, no gradient
        under_way.outputs.append(
            (module, substitute(module, r, under_way.perturbed(defense, layer, r, rng, report, handles)))
        )
        return under_way.outputs[-1][1]

    try:
        for layer in layers:
            check_layer(model, layer)
            target = model.get_submodule(layer)
            handles.append(target.register_forward_hook(partial(hook, layer), prepend=True, with_kwargs=True))
        yield under_way
    finally:
        for handle in handles:
            handle.remove()


def slots_of(data: Batch | Sequence[Batch], local: Local) -> int:
    """Return how many records a batch of this client has room for: public, and the same in a shorter last batch."""
    if not isinstance(data, Batch):
        return max((len(batch) for batch in data), default=1)
    return min(local.batch_size or len(data), len(data))


def update_batch_size(local: Local, num_examples: int) -> int | None:
    """Return the batch size that an update carries: ``None`` where every step took all examples."""
    return None if local.batch_size is None or local.batch_size >= num_examples else local.batch_size


def float_buffers(model: nn.Module) -> Params:
    """Return copies of the model's persistent floating-point buffers: what is averaged beside the weights."""
    kept = model.state_dict(keep_vars=True)
    return {
        name: b.detach().clone() for name, b in model.named_buffers() if name in kept and torch.is_floating_point(b)
    }


def shuffled(num_examples: int, local: Local, rng: Source) -> tuple[Tensor, list[int]]:
    """Return the examples of all local steps one after the other, by position, and how many each step takes.

    Every epoch is shuffled anew, then cut into batches; the last batch of an epoch may be smaller.
    """
    size = min(local.batch_size or num_examples, num_examples)
    full, rest = divmod(num_examples, size)
    sizes = [size] * full + [rest] * (rest > 0)
    epochs = [permutation(num_examples, rng) for _ in range(local.epochs)]
    return torch.cat(epochs), sizes * local.epochs


def _batches(data: Batch | Sequence[Batch], local: Local, rng: Source) -> Iterator[Batch]:
    if not isinstance(data, Batch):
        for _ in range(local.epochs):
            yield from data
        return
    if len(data) == 0:
        raise UpdateError("A client has no examples, so it has nothing to send. Leave it out of the round.")
    order, sizes = shuffled(len(data), local, rng)
    for chosen in order.to(data.labels.device).split(sizes):
        yield Batch(data.inputs[chosen], data.labels[chosen])


def check_loss(model: nn.Module, few: Batch, loss: str) -> None:
    """Raise unless the loss of a few examples is one finite number."""
    first, copied = next(model.parameters()), copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng([first.device] if first.is_cuda else []):
        value = build_loss(loss).of(few.labels)(copied(few.inputs.to(first)), few.labels.to(first.device))
    if not bool(value.isfinite()):
        raise LossError(f"The loss {loss} of the first examples is {float(value)}. A finite number is needed.")


@dataclass(frozen=True)
class Evaluation:
    """How well a model does on held-out examples."""

    accuracy: float
    loss: float
    scored_by: str = "accuracy"  # what the accuracy is: R² where targets are numbers
    outcome: ClassOutcome | NumberOutcome | None = None  # beside answers that look at no input


def evaluate(model: nn.Module, split: Split, batch_size: int = 1000, loss: str | Loss = "cross_entropy") -> Evaluation:
    """Return accuracy and mean loss in evaluation mode; the model's mode is put back afterwards."""
    measured = build_loss(loss).of(split.labels)
    was_training = model.training
    first = next(model.parameters())
    model.eval()
    try:
        with torch.no_grad():
            parts: list[Tensor] = []
            done = 0
            while done < len(split):
                pace.check()
                try:
                    parts.append(model(split.batch(slice(done, done + batch_size)).inputs.to(first)))
                    done += batch_size
                except RuntimeError as error:
                    if batch_size == 1 or not is_out_of_memory(error):
                        raise
                    batch_size //= 2
    finally:
        model.train(was_training)
    output, labels = torch.cat(parts), split.labels.to(first.device)
    mean = measured.total(output, labels) / len(split)
    return Evaluation(measured.score(output, labels), mean, measured.scored_by, outcome(output, labels))
