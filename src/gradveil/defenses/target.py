"""Zero as few entries as a certificate needs to reach a wanted error."""

from typing import cast

import torch
from torch import Tensor, nn

from gradveil.certificates.base import Kind
from gradveil.certificates.bounds.chain import has_modes
from gradveil.certificates.target import TARGET_KINDS, needed_counts, zeroed, zeroing_order
from gradveil.errors import DefenseError

__all__ = ["TARGET_KINDS", "zero_to_target"]


def zero_to_target(
    model: nn.Module, layer: str, x: Tensor, r: Tensor, scores: Tensor, target_mse: float, kind: str, p: float
) -> Tensor:
    """Return r′: of each example the fewest entries zeroed, by falling score, whose certificate reaches the target.

    Raises where no share does. The certificate is that of the weights as they are, so it is computed anew each time.
    """
    if model.training and has_modes(model):
        raise DefenseError(
            "target_mse: dropout and batch norm make the representation another function in training than the one a "
            "certificate is about. Give a share instead, or train with these layers in eval mode."
        )
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise DefenseError(
            f"target_mse is the error of pixels in [0, 1], and inputs lie in [{float(x.min()):.3g}, "
            f"{float(x.max()):.3g}]. Put the normalisation into the model as its first layer."
        )
    flat = r.flatten(1)  # (N, L)
    order = zeroing_order(flat, scores)
    with torch.no_grad():
        needed = needed_counts(model, layer, x, flat, order, target_mse, cast(Kind, kind), p)
    if not needed.reachable:
        raise DefenseError(
            f"No share reaches target_mse={target_mse:g} by kind={kind} and p={p:g}: with all of the representation "
            f"zeroed, {float(needed.most.min()):.3g} is certified. Ask for less, or for another kind."
        )
    return zeroed(flat, order, needed.counts.to(flat.device)).view_as(r)
