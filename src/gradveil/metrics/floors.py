"""Blind guesses: what somebody who never saw the update would answer. The floor under every attack."""

import torch
from torch import Tensor

from gradveil.types import Batch


def grey(truth: Batch) -> Tensor:
    """Answer half-way between black and white everywhere: (N, *shape)."""
    return torch.full_like(truth.inputs, 0.5)


def mean_image(truth: Batch, public: Batch) -> Tensor:
    """Answer the mean of public images: (N, *shape)."""
    return public.inputs.mean(dim=0).expand_as(truth.inputs)


def class_mean(truth: Batch, public: Batch) -> Tensor:
    """Answer the mean of the public images of the right class, the mean image where there are none: (N, *shape).

    For a server that knows the label, and no more.
    """
    means = {}
    for label in set(truth.labels.tolist()):
        of_class = public.inputs[public.labels == label]
        means[label] = (of_class if len(of_class) else public.inputs).mean(dim=0)
    return torch.stack([means[label] for label in truth.labels.tolist()])


def blind_guesses(truth: Batch, public: Batch) -> dict[str, Tensor]:
    """Return every blind guess by name; ``public`` is data of the same kind that is not the client's."""
    return {
        "grey": grey(truth),
        "mean image": mean_image(truth, public),
        "class mean": class_mean(truth, public),
    }
