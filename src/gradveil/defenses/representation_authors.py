"""The rule as the authors' published code has it, for comparison: not the rule that the paper prints."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from gradveil.defenses.masking import LayerDefense, Layers
from gradveil.privacy.draws import Source
from gradveil.protection.defense import DEFENSES, check_choice
from gradveil.ranges import MOST, Range, Share
from gradveil.representation.scores import METHODS, row_norms


@DEFENSES.register("representation_authors")
@dataclass(frozen=True)
class RepresentationAuthors(LayerDefense):
    """Zero entries of the representation by the rule of the authors' code: one mask for the whole batch.

    Score ||∇r_i|| / (r_i + offset), with the sign of r, summed over the batch; the threshold is the percentile
    100 × share of these signed sums, and entries whose sum is *in absolute value* strictly below it are zeroed.
    So dead entries (sum 0) go first, nothing goes while the threshold is zero or less, and one entry with
    0 / 0 (dead, offset 0) makes the threshold NaN, and nothing goes at all.
    """

    title = "Revealing entries hidden (the authors' code)"

    share: Share = 0.4  # the percentile, as a part of 1
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    offset: Annotated[float, Range(-MOST)] = 0.0  # added to r_i below the fraction; their second script has 0.1
    method: str = "auto"  # how the norms are computed: auto, exact, sketch, ...

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method", self.method, METHODS)

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries of r (N, ...) lie below the percentile."""
        return len(r) * round(self.share * r[0].numel())

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return r with the same entries of every example set to zero."""
        if self.share == 0:
            return r
        flat = r.flatten(1)
        _, norms = row_norms(model, layer, x, self.method, seen=r)  # (N, L)
        sums = (norms / (flat + self.offset)).sum(0)  # (L,)
        threshold = torch.quantile(sums, self.share)
        return flat.masked_fill(sums.abs() < threshold, 0.0).view_as(r)


DEFENSES.renamed("representation:mode=authors", "representation_authors")
