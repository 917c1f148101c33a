"""The control for the score: as many entries of the representation, chosen at random."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.defenses.base import DEFENSES
from gradveil.defenses.masking import LayerMask


@DEFENSES.register("random_mask")
@dataclass(frozen=True)
class RandomMask(LayerMask):
    """Zero live entries of the representation at random, as many as the paper's rule would.

    If this does as well as ``representation``, the score does not matter.
    """

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        """Return uniform random keys (N, L)."""
        keys = torch.rand(r.flatten(1).shape, generator=rng, device=rng.device)
        return keys.to(r.device)
