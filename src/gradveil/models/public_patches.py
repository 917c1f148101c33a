"""Responses to patches of public images as fixed features, and features in which an image is its mirror image.

Nothing is learnt from clients. A record and its mirror image fill one slot together, so the mean of the two costs a
promise nothing (De et al. 2022 average over augmentations for the same reason).
"""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

SIDE, STRIDE = 6, 2  # of patches, in pixels
PLACES = 3  # down and across, over which responses are averaged
CUT = 40_000  # patches that the whitening is measured on
FLAT = 10 / 255**2  # added to a patch's variance: a flat one has no contrast
FLOOR = 0.1  # added to the variance of a direction, before whitening
DEAD = 0.5  # responses up to this are 0


class PublicPatches(nn.Module):
    """How alike each place is to whitened patches of public images, by sign (Coates and Ng 2012); at first to noise."""

    kernels: Tensor
    offset: Tensor

    def __init__(self, channels: int, side: int, count: int) -> None:
        super().__init__()
        drawn = torch.randn(count, channels, side, side, generator=_same())
        drawn = drawn - drawn.mean((1, 2, 3), keepdim=True)
        self.register_buffer("kernels", drawn / drawn.flatten(1).norm(dim=1)[:, None, None, None].clamp_min(1e-6))
        self.register_buffer("offset", torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 2 * count, PLACES, PLACES) of images (N, C, H, W)."""
        side = self.kernels.shape[-1]
        mean, square = (F.avg_pool2d(part.mean(1, keepdim=True), side, STRIDE) for part in (x, x.square()))
        contrast = ((square - mean.square()).clamp_min(0) + FLAT).sqrt()
        found = F.conv2d(x, self.kernels.to(x), stride=STRIDE) / contrast + self.offset.to(x)[:, None, None]
        return F.adaptive_avg_pool2d(torch.cat([F.relu(found - DEAD), F.relu(-found - DEAD)], 1), PLACES)

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Cut patches out of (N, C, H, W), whiten them, and keep some."""
        count, *shape = self.kernels.shape
        rng = _same()
        windows = x.unfold(2, shape[1], 1).unfold(3, shape[2], 1)  # (N, C, h, w, side, side)
        at = [torch.randint(windows.shape[i], (CUT,), generator=rng) for i in (0, 2, 3)]
        cut = windows[at[0], :, at[1], at[2]].flatten(1).double()
        cut = cut - cut.mean(1, keepdim=True)
        cut = cut / (cut.square().mean(1, keepdim=True) + FLAT).sqrt()
        mean = cut.mean(0)
        sizes, main = torch.linalg.eigh((cut - mean).T @ (cut - mean) / CUT)
        whitening = main * (sizes + FLOOR).rsqrt() @ main.T
        kernels = F.normalize((cut[:count] - mean) @ whitening, dim=1) @ whitening
        self.offset.copy_(-(kernels @ mean))
        self.kernels.copy_((kernels - kernels.mean(1, keepdim=True)).view(count, *shape))


class Mirrored(nn.Module):
    """What parts make of an image and of its mirror image, in the mean, side by side."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, features)."""
        return torch.cat([(part(x) + part(x.flip(-1))).flatten(1) / 2 for part in self.parts], 1)

    def fit(self, x: Tensor) -> None:
        """Let the parts that learn from public images do so."""
        for part in self.parts:
            if isinstance(part, PublicPatches):
                part.fit(x)


def _same() -> Generator:
    return torch.Generator().manual_seed(0)  # for everybody
