"""Labels, read off the gradient of the last layer before any image is known.

For plain mean cross-entropy the gradient by the last layer's bias is δ_c = mean over the batch of (p_c - y_c), with p
the predicted probabilities and y the labels: only a class that is there can make it negative, and for one
example exactly one entry is negative (Zhao et al. 2020, iDLG). Weights and smoothing make of it another
function that is straight in p for each label, so a label is read by whether p comes out as probabilities. With binary
cross-entropy δ_c has the sign of p_c - y_c for one example; of several labels in a batch only the counts show. A
regression shows its residual, the output less the target, and neither alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.rounds import mean_round
from gradveil.errors import AttackError, LayerError
from gradveil.gradients.functional import output_of
from gradveil.losses import BinaryCrossEntropy, CrossEntropy
from gradveil.modules import find_layer, representation
from gradveil.registry import describe
from gradveil.tree import named
from gradveil.types import Observation

SURE = 1e-5  # by how much all other classes must miss being probabilities
RIDGE = 1.0  # how much the guess that all classes are predicted alike counts beside the equations
DUMMIES = 64  # made inputs that stand for the client's when predictions are guessed


def recover_labels(seen: Observation, rng: Generator) -> Tensor | None:
    """Return the labels of an update, classes (N,) in rising order; None where it does not show them."""
    if not isinstance(seen.loss, CrossEntropy | BinaryCrossEntropy):
        return None
    delta = label_signal(seen, rng)
    if delta is None:
        return None
    if isinstance(seen.loss, BinaryCrossEntropy):
        return _bits(seen, delta, rng)
    if seen.num_examples == 1:
        return delta.argmin()[None] if seen.loss.plain else _one_class(seen.loss, delta)
    return torch.arange(seen.num_classes, device=delta.device).repeat_interleave(class_counts(seen, delta, rng))


def _one_class(loss: CrossEntropy, delta: Tensor) -> Tensor | None:
    """Return the class (1,) for which δ comes from probabilities; None where it does for several.

    For class y with weight w_y, δ = a p - b with a = 1 - s + s Σw / (K w_y), b = (1 - s) y + s w / (K w_y).
    """
    weights, k = loss.of_classes(delta), len(delta)
    share = loss.smoothing / k / weights.clamp_min(torch.finfo(delta.dtype).tiny)  # (K,), by class y
    a = 1 - loss.smoothing + share * weights.sum()
    b = (1 - loss.smoothing) * torch.eye(k).to(delta) + share[:, None] * weights
    p = (delta + b) / a[:, None]  # (K, K): of each class y
    below = p.clamp_max(0).abs().sum(1)
    best, second = below.topk(2, largest=False).values
    sure = bool(second - best > SURE)
    return below.argmin()[None] if sure else None


def _bits(seen: Observation, delta: Tensor, rng: Generator) -> Tensor | None:
    """Return the zeros and ones of one example, or of a single logit; of more, it does not show who has which."""
    if not bool(delta.all()):  # not seen, or rounded away
        return None
    if seen.num_examples == 1:
        return seen.loss.found(-delta[None])
    if seen.num_classes > 1:
        return None
    mean_prediction = output_of(seen.model, _dummies(seen, rng)).sigmoid().mean().to(delta)
    ones = (seen.num_examples * (mean_prediction - delta)).round().clamp(0, seen.num_examples)
    labels: Tensor = torch.arange(seen.num_examples, device=delta.device) >= seen.num_examples - ones
    return labels.long()


def label_signal(seen: Observation, rng: Generator) -> Tensor | None:
    """Return an estimate of mean (p_c - y_c) over the update's examples (K,): from the bias, else from the rows.

    Without a bias, row c of the weight's gradient is the mean of (p_c - y_c) r, and is projected on the mean
    representation of made inputs (its sum, up to scale, where r is positive). Columns that are all zero in
    the update are left out.
    """
    name = _last_layer(seen)
    if name is None:
        return None
    gradient = seen.as_one_step().update.gradient
    bias, weight = named(name, "bias"), named(name, "weight")
    if bias in seen.visible and bool(gradient[bias].any()):
        return gradient[bias]
    if weight not in seen.visible:
        return None
    rows = gradient[weight]  # (K, L)
    r = representation(seen.model, name, _dummies(seen, rng)).to(rows).mean(0) * rows.any(0)
    return rows @ r / r.square().sum().clamp_min(torch.finfo(r.dtype).tiny)


def class_counts(seen: Observation, delta: Tensor, rng: Generator) -> Tensor:
    """Return how often each class is among the update's N examples (K,), summing to N.

    From N δ = Σ_c counts_c p_c - counts, with p_c the mean prediction for examples of class c. Their representation is
    the quotient of row c of the weight's gradient and δ_c, where class c is there (Ma et al. 2023, iLRG); for other
    classes, and where the rows are not seen, p_c is guessed on made inputs. Classes with a negative δ are there for
    certain and come first; the rest goes, one at a time, where most is missing. Smoothing and weights are taken off
    first.
    """
    mean_prediction = output_of(seen.model, _dummies(seen, rng)).softmax(-1).mean(0).to(delta)
    expected, least = _solved_counts(seen, delta, mean_prediction), torch.zeros_like(delta)
    if isinstance(seen.loss, CrossEntropy) and not seen.loss.plain:
        expected, least = _weighed_counts(seen.loss, seen.num_examples, mean_prediction, delta)
    counts = torch.zeros_like(delta)
    sure = (delta < least).nonzero()[:, 0]
    counts[sure[delta[sure].argsort()][: seen.num_examples]] = 1
    while int(counts.sum()) < seen.num_examples:
        counts[(expected - counts).argmax()] += 1
    return counts.long()


def _solved_counts(seen: Observation, delta: Tensor, mean_prediction: Tensor) -> Tensor:
    """Return the counts (K,), not rounded, that explain δ best: least squares, with their sum given."""
    name, gradient, k = _last_layer(seen), seen.as_one_step().update.gradient, len(delta)
    each = mean_prediction.expand(k, -1)  # (K, K): row c is p_c
    if (
        name is not None
        and {named(name, "weight"), named(name, "bias")} <= set(seen.visible)
        and not seen.update.rule.adaptive
    ):
        layer = seen.model.get_submodule(name)
        there = (delta < 0)[:, None]
        r = gradient[named(name, "weight")] / delta.where(delta < 0, -torch.ones_like(delta))[:, None]
        with torch.no_grad():
            each = torch.where(there, layer(r.to(layer.weight)).softmax(-1).to(delta), each)  # type: ignore[arg-type]
    guess = seen.num_examples * (mean_prediction - delta)  # as if all classes were predicted alike
    eye = torch.eye(k).to(delta)
    equations = torch.cat([each.T - eye, torch.ones(1, k).to(delta), RIDGE * eye])
    sums = torch.cat([seen.num_examples * delta, delta.new_full((1,), seen.num_examples), RIDGE * guess])
    solved: Tensor = torch.linalg.lstsq(equations.double().cpu(), sums.double().cpu()).solution
    return solved.to(delta)


def _weighed_counts(loss: CrossEntropy, n: int, p: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expected count of each class (K,), and the least δ that a class can have that is not there.

    S δ = (1 - s) (S p̄ - w counts) + s N / K (p̄ Σw - w), with S the weights of the examples' classes together.
    """
    weights, k, s = loss.of_classes(delta).clamp_min(1e-12), len(delta), loss.smoothing
    counts = torch.full_like(delta, n / k)
    for _ in range(5):
        total = (weights * counts).sum()
        beside = s * n / k * (p * weights.sum() - weights)
        counts = ((1 - s) * total * p + beside - total * delta).clamp_min(0) / ((1 - s) * weights)
        counts = n * counts / counts.sum().clamp_min(1e-12)
    return counts, -s / k * weights / weights.min()


def read_at(seen: Observation, inputs: Tensor, rng: Generator) -> Tensor | None:
    """Return the targets that the last layer's gradient speaks for at these inputs (N, ...); None: it does not.

    Each example is given an equal part of the gradient, so it is exact for one example and one step.
    """
    signal = label_signal(seen, rng)
    if signal is None or not seen.update.rule.is_plain:
        return None
    output = output_of(seen.model, inputs)
    slope = (signal / seen.num_examples).to(output).expand(seen.num_examples, -1).reshape(output.shape)
    return seen.loss.read(output, slope)


def unreadable(seen: Observation) -> AttackError:
    """Return the refusal of an attack that needs labels which the update does not show."""
    return AttackError(
        f"The labels cannot be read off this update with the loss {describe(seen.loss)}: they do not show in it, or it "
        "has no gradient of a last linear layer with one row per class. Give the labels, or use an attack that looks "
        "for them, such as dlg or fedavg."
    )


def with_labels(seen: Sequence[Observation], rngs: Sequence[Generator], required: bool = False) -> list[Observation]:
    """Return the observations with the labels that the server knows or can read; required: or refuse.

    Of several rounds their mean is read: at any weights the slope of a class that is not there is above zero.
    """
    out = []
    for s, rng in zip(seen, rngs, strict=True):
        labels = s.labels if s.labels is not None else recover_labels(mean_round((s, *s.rounds)), rng)
        if labels is None and required:
            raise unreadable(s)
        out.append(replace(s, labels=labels))
    return out


def _last_layer(seen: Observation) -> str | None:
    try:
        name = find_layer(seen.model)
    except LayerError:
        return None
    layer = seen.model.get_submodule(name)
    return name if isinstance(layer, nn.Linear) and layer.out_features == seen.num_classes else None


def _dummies(seen: Observation, rng: Generator) -> Tensor:
    """Return made inputs: from the prior where there is one, else uniform within the bounds."""
    low, high = seen.bounds
    like = next(seen.model.parameters())
    size = (DUMMIES, *seen.input_shape)
    if seen.prior is None:
        x = low + (high - low) * torch.rand(size, generator=rng, device=rng.device)
    else:
        factor = seen.prior.factor
        draws = torch.randn(DUMMIES, factor.shape[1], generator=rng, device=rng.device).to(factor)
        x = (seen.prior.mean + draws @ factor.T).clamp(low, high).view(size)
    return x.to(like.device, like.dtype)
