"""A network with PRECODE in it: a defence that is part of the model (Scheliga, Mäder and Seeland, WACV 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from gradveil.models.base import MODELS
from gradveil.models.convnet import LeNet
from gradveil.models.parts import Layers, Width


class GaussianSample(_DropoutNd):
    """Draw from the Gaussian that its input (N, 2K) describes; in eval mode its mean (N, K).

    It is dropout to whoever asks: its draws are a client's own, and nothing in eval mode.
    """

    def forward(self, statistics: Tensor) -> Tensor:
        """Return mean + softplus(s) × noise, for means and s side by side."""
        mean, s = statistics.chunk(2, -1)
        return mean + F.softplus(s) * torch.randn_like(mean) if self.training else mean


@MODELS.register("precode")
@dataclass(frozen=True)
class Precode(LeNet):
    """LeNet with a variational bottleneck before its last layer, to make gradients random (Scheliga et al. 2022).

    r goes through ``encoder`` to means and spreads, a Gaussian sample is drawn, and ``decoder`` makes of it what the
    last layer gets. The paper's small penalty on the distance from a standard Gaussian (weight 0.001) is left out. All
    layers before the sample see r as it is, so that ``analytic`` reads r off the encoder's own gradient (Balunović et
    al. 2022).
    """

    size: Width = 256  # numbers that are drawn

    def head(self, length: int, num_classes: int) -> Layers:
        """Return encoder, sample, decoder, fc."""
        return {
            "encoder": nn.Linear(length, 2 * self.size),
            "sample": GaussianSample(),
            "decoder": nn.Linear(self.size, length),
            "fc": nn.Linear(length, num_classes),
        }
