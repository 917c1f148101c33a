"""In place of a share, an error: zero as few entries as a certificate needs to reach it.

Certificates are imported where they are used: they bring scipy, which no other defence has to wait for.
"""

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gradveil.defenses.masking import LayerDefense, Layers
from gradveil.errors import DefenseError
from gradveil.privacy.draws import Source
from gradveil.protection.defense import DEFENSES, check_choice
from gradveil.ranges import Order, Positive
from gradveil.representation.scores import METHODS, leak_scores

if TYPE_CHECKING:
    from gradveil.representation.certificates.base import Kind


@DEFENSES.register("representation_certified")
@dataclass(frozen=True)
class RepresentationCertified(LayerDefense):
    """Zero the fewest entries of each example, in the paper's order, whose certificate reaches ``target_mse``.

    Raises where no number of entries does. The certificate is that of the weights as they are, so it is computed anew
    at each step.
    """

    title = "Revealing entries hidden, up to a certificate"

    target_mse: Positive = 1e-6  # of pixels in [0, 1], for every example
    kind: str = "global"  # the certificate that has to reach it: local, global, box, radius or reach
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    p: Order = 2  # the norm of the input's displacement: 1, 2 or inf
    method: str = "exact"  # how leak scores are computed: exact, auto, sketch, ...

    def __post_init__(self) -> None:
        from gradveil.representation.certificates.target import TARGET_KINDS

        super().__post_init__()
        check_choice("kind", self.kind, TARGET_KINDS)
        check_choice("p", self.p, (1, 2, inf))
        check_choice("method", self.method, METHODS)

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return r with each example's entries zeroed, by falling score, up to the target."""
        from gradveil.representation.certificates.target import needed_counts
        from gradveil.representation.selection import zeroed, zeroing_order

        _check(model, x)
        flat, p = r.flatten(1), float(self.p)  # (N, L)
        order = zeroing_order(flat, leak_scores(model, layer, x, method=self.method, p=p, seen=r))
        with torch.no_grad():
            needed = needed_counts(model, layer, x, flat, order, self.target_mse, cast("Kind", self.kind), p)
        if not needed.reachable:
            raise DefenseError(
                f"No share reaches target_mse={self.target_mse:g} by kind={self.kind} and p={p:g}: with all of the "
                f"representation zeroed, {float(needed.most.min()):.3g} is certified. Ask for less, or for another "
                f"kind."
            )
        return zeroed(flat, order, needed.counts.to(flat.device)).view_as(r)


def _check(model: nn.Module, x: Tensor) -> None:
    """Raise unless the certificate is about the function and the inputs that are trained on."""
    from gradveil.representation.certificates.chain import has_modes

    if model.training and has_modes(model):
        raise DefenseError(
            "target_mse: dropout and batch norm make the representation another function in training than the one a "
            "certificate is about. Give a share instead, or train with these layers in eval mode."
        )
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise DefenseError(
            f"target_mse is the error of pixels in [0, 1], and inputs lie in [{float(x.min()):.3g}, "
            f"{float(x.max()):.3g}]. Put the normalisation into the model as its first layer; token ids have no "
            "pixels: defend text with veil, gaussian or pruning."
        )


DEFENSES.renamed("representation:target_mse=*", "representation_certified:target_mse=*")
