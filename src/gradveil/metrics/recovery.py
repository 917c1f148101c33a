"""What was recovered: reconstructions paired with their originals and measured, and the blind guesses beside them."""

import torch
from torch import Tensor

from gradveil.modalities import IMAGE, Metric, Modality
from gradveil.modalities.base import identification, label_accuracy
from gradveil.types import Batch

COMMON: dict[str, Metric] = {  # of every modality
    m.name: m
    for m in (
        Metric("label", label_accuracy, "higher", "Share of the labels that were recovered, in any order.", True),
        Metric("identified", identification, "higher", "Picks its original out of a gallery of 100 examples.", True),
    )
}
METRICS: dict[str, Metric] = {**IMAGE.metrics, **COMMON}


def measure(
    found: Tensor,
    labels: Tensor | None,
    truth: Batch,
    gallery: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    modality: Modality = IMAGE,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every metric by name, each (N,), and the reconstruction (N, *shape) as it was measured.

    First made an example of its kind (pixels are clamped to the data range and scaled to [0, 1]), then paired with the
    originals by optimal assignment. Without ``labels`` or ``gallery`` those metrics are NaN.
    """
    values, shown = modality.measure(found, truth.inputs, gallery, bounds)
    unknown = torch.full((len(truth),), torch.nan)
    values["label"] = unknown if labels is None else label_accuracy(labels, truth.labels)
    return values, shown


# Blind guesses: what somebody who never saw the update would answer. The floor under every attack.


def blind_guesses(
    truth: Batch, public: Batch | None, bounds: tuple[float, float] = (0.0, 1.0), modality: Modality = IMAGE
) -> dict[str, Tensor]:
    """Return every blind guess (N, *shape) by name; ``public`` is data of the same kind that is not the client's.

    For images: *grey*, half-way between black and white everywhere; *mean image*, of the public images; *class mean*,
    of those of the right class, the mean image where there are none: for a server that knows the label, and no more.
    The last not where labels are no classes.
    """
    nothing, whole, own = modality.guesses
    guesses = {nothing: modality.ignorant(truth.inputs, bounds)}
    if public is not None:
        guesses[whole] = modality.typical(public.inputs).expand_as(truth.inputs)
        if truth.labels.ndim == 1 and not truth.labels.is_floating_point():
            guesses[own] = _by_class(truth, public, modality)
    return guesses


def _by_class(truth: Batch, public: Batch, modality: Modality) -> Tensor:
    guesses = {}
    for label in set(truth.labels.tolist()):
        of_class = public.inputs[public.labels == label]
        guesses[label] = modality.typical(of_class if len(of_class) else public.inputs)
    return torch.stack([guesses[label] for label in truth.labels.tolist()])
