"""Labels, read off the gradient of the last layer before any image is known.

For mean cross-entropy the gradient by the last layer's bias is δ_c = mean over the batch of (p_c - y_c), with p
the predicted probabilities and y the labels: only a class that is there can make it negative, and for one
example exactly one entry is negative (Zhao et al. 2020, iDLG).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import AttackError, LayerError
from gradveil.gradients.functional import quiet
from gradveil.layers.modules import find_layer, representation
from gradveil.types import Observation

DUMMIES = 64  # made inputs that stand for the client's when predictions are guessed


def recover_labels(seen: Observation, rng: Generator) -> Tensor | None:
    """Return the labels (N,) of an update in rising order, or None where the last layer's gradient is not seen."""
    delta = label_signal(seen, rng)
    if delta is None:
        return None
    if seen.num_examples == 1:
        return delta.argmin()[None]
    return torch.arange(seen.num_classes, device=delta.device).repeat_interleave(class_counts(seen, delta, rng))


def label_signal(seen: Observation, rng: Generator) -> Tensor | None:
    """Return an estimate of mean (p_c - y_c) over the update's examples (K,): from the bias, else from the rows.

    Without a bias, row c of the weight's gradient is the mean of (p_c - y_c) r, and is projected on the mean
    representation of made inputs (its sum, up to scale, where r is positive). Columns that are all zero in
    the update are left out.
    """
    name = _last_layer(seen)
    if name is None:
        return None
    gradient, steps = seen.update.gradient, seen.update.num_steps
    bias, weight = f"{name}.bias", f"{name}.weight"
    if bias in seen.visible and bool(gradient[bias].any()):
        return gradient[bias] / steps
    if weight not in seen.visible:
        return None
    rows = gradient[weight] / steps  # (K, L)
    r = representation(seen.model, name, _dummies(seen, rng)).to(rows).mean(0) * rows.any(0)
    return rows @ r / r.square().sum().clamp_min(torch.finfo(r.dtype).tiny)


def class_counts(seen: Observation, delta: Tensor, rng: Generator) -> Tensor:
    """Return how often each class is among the update's N examples (K,), summing to N.

    From δ = p̄ - counts / N with the mean prediction p̄ guessed on made inputs. Classes with a negative δ are
    there for certain and come first; the rest goes, one at a time, where most is missing (compare Wainakh et
    al. 2022, who do the same with a fixed impact per example).
    """
    with torch.no_grad(), quiet(seen.model):
        mean_prediction = seen.model(_dummies(seen, rng)).softmax(-1).mean(0).to(delta)
    expected = seen.num_examples * (mean_prediction - delta)
    counts = torch.zeros_like(delta)
    sure = (delta < 0).nonzero()[:, 0]
    counts[sure[delta[sure].argsort()][: seen.num_examples]] = 1
    while int(counts.sum()) < seen.num_examples:
        counts[(expected - counts).argmax()] += 1
    return counts.long()


def with_labels(seen: Sequence[Observation], rngs: Sequence[Generator], required: bool = False) -> list[Observation]:
    """Return the observations with the labels that the server knows or can read; required: or refuse."""
    out = []
    for s, rng in zip(seen, rngs, strict=True):
        labels = s.labels if s.labels is not None else recover_labels(s, rng)
        if labels is None and required:
            raise AttackError(
                "The labels cannot be read: the update shows no gradient of a last linear layer with one row per "
                "class. Give the labels, or use an attack that looks for them, such as dlg."
            )
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
