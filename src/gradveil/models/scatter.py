"""Fixed features under one linear layer: few numbers to learn, and none of them an early layer's.

Noise that hides a record grows with the square root of how many numbers are sent (Tramèr and Boneh 2021 make the same
point for differential privacy), so a fixed first part makes a promise cheap. Nothing of it is learnt from clients:
wavelets, and responses to patches of public images. A record and its mirror image can fill one slot together, so the
mean of the two costs a promise nothing (De et al. 2022 average over augmentations for the same reason).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil.errors import SpecError
from gradveil.models.base import MODELS, Chain, Layers, Rank, Shape, Width

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
        side = self.kernels.shape[-1]
        mean, square = (F.avg_pool2d(part.mean(1, keepdim=True), side, STRIDE) for part in (x, x.square()))
        contrast = ((square - mean.square()).clamp_min(0) + FLAT).sqrt()
        found = F.conv2d(x, self.kernels.to(x), stride=STRIDE) / contrast + self.offset.to(x)[:, None, None]
        return F.adaptive_avg_pool2d(torch.cat([F.relu(found - DEAD), F.relu(-found - DEAD)], 1), PLACES)

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
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
        return torch.cat([(part(x) + part(x.flip(-1))).flatten(1) / 2 for part in self.parts], 1)

    def fit(self, x: Tensor) -> None:
        for part in self.parts:
            if isinstance(part, PublicPatches):
                part.fit(x)


def _same() -> Generator:
    return torch.Generator().manual_seed(0)  # for everybody


ANGLES, SCALES = 8, 2
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2  # of one input channel
WIDTH = 0.8  # of the finest wavelet's envelope, in pixels
SHARPNESS = 4 / ANGLES  # of its two axes, one to the other


def _grid(radius: int) -> tuple[Tensor, Tensor]:
    line = torch.arange(-radius, radius + 1, dtype=torch.float64)
    return line[:, None], line[None, :]


def _wavelet(scale: int, angle: float) -> Tensor:
    """Return a Morlet wavelet as its real and imaginary part, (2, k, k): a wave under an envelope, with mean zero."""
    width = WIDTH * 2**scale
    down, right = _grid(math.ceil(2.5 * width / SHARPNESS))
    along = down * math.cos(angle) + right * math.sin(angle)
    across = right * math.cos(angle) - down * math.sin(angle)
    envelope = torch.exp(-(along**2 + (SHARPNESS * across) ** 2) / (2 * width**2))
    wave = torch.polar(envelope, along * (3 * math.pi / 4 / 2**scale))
    wave = (wave - envelope * (wave.sum() / envelope.sum())) * SHARPNESS / (2 * math.pi * width**2)
    return torch.view_as_real(wave).permute(2, 0, 1).float()


def _by_spectrum(x: Tensor, kernels: Tensor) -> Tensor:
    """Return F.conv2d of (N, 1, H, W) by kernels (K, 1, k, k), by products of their spectra."""
    sides, reach = x.shape[-2:], kernels.shape[-1] - 1
    product = torch.fft.rfft2(x) * torch.fft.rfft2(kernels[:, 0], s=sides).conj()
    found: Tensor = torch.fft.irfft2(product, s=sides)[..., : sides[0] - reach, : sides[1] - reach]
    return found


class Scattering(nn.Module):
    """Local means of the image, of its wavelet moduli, and of theirs (Bruna and Mallat 2013): two scales, 8 angles."""

    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        for scale in range(SCALES):
            bank = torch.stack([_wavelet(scale, math.pi * i / ANGLES) for i in range(ANGLES)], 1)  # (2, angles, k, k)
            self.register_buffer(f"bank{scale}", bank.flatten(0, 1)[:, None], persistent=False)
        down, right = _grid(4)
        low = torch.exp(-(down**2 + right**2) / (2 * (WIDTH * 2 ** (SCALES - 1)) ** 2))
        self.register_buffer("low", (low / low.sum()).float()[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first = [self._moduli(x, scale) for scale in range(SCALES)]
        second = [self._moduli(first[i], j) for i in range(SCALES) for j in range(i + 1, SCALES)]
        return torch.cat([self._means(part) for part in (x, *first, *second)], 1)

    def _moduli(self, x: Tensor, scale: int) -> Tensor:
        parts = self._each(x, getattr(self, f"bank{scale}")).unflatten(1, (x.shape[1], 2, ANGLES))
        moduli: Tensor = (parts.square().sum(2) + 1e-12).sqrt().flatten(1, 2)
        return moduli

    def _means(self, x: Tensor) -> Tensor:
        return self._each(x, self.low, 2**SCALES)

    @staticmethod
    def _each(x: Tensor, kernels: Tensor, stride: int = 1) -> Tensor:
        pad = kernels.shape[-1] // 2
        single = F.pad(x.flatten(0, 1)[:, None], (pad,) * 4, mode="replicate")
        kernels = kernels.to(x.dtype)
        if x.dtype == torch.float64 and stride == 1:  # what attacks solve in; such convolutions are slow on a CPU
            found = _by_spectrum(single, kernels)
        else:
            found = F.conv2d(single, kernels, stride=stride)
        whole: Tensor = found.unflatten(0, x.shape[:2]).flatten(1, 2)
        return whole


class Basis(nn.Module):
    """Coordinates of unit length in the main directions of public examples; before ``fit``, in random directions."""

    directions: Tensor
    offset: Tensor

    def __init__(self, length: int, dims: int) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(dims, length, generator=_same()) / math.sqrt(length))
        self.register_buffer("offset", torch.zeros(dims))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.flatten(1) @ self.directions.T + self.offset, dim=1)

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        over = (0, *range(2, x.ndim))
        centre, spread = x.mean(over, keepdim=True), x.std(over, keepdim=True) + 1e-6
        rows = ((x - centre) / spread).flatten(1).double()
        mean = rows.mean(0)
        _, sizes, main = torch.linalg.svd(rows - mean, full_matrices=False)
        count = min(len(self.directions), int((sizes > 1e-6 * sizes[0]).sum()))
        weighed = main[:count] * (sizes[0] / sizes[:count, None]).sqrt()
        whole = weighed / spread.double().expand(1, *x.shape[1:]).flatten()
        self.directions.zero_()
        self.offset.zero_()
        self.directions[:count] = whole.to(self.directions)
        self.offset[:count] = -(whole @ centre.double().expand(1, *x.shape[1:]).flatten() + weighed @ mean).to(
            self.offset
        )


@MODELS.register("scatter")
@dataclass(frozen=True)
class Scatter(Chain):
    """Fixed wavelet features, ``dims`` directions of them, and one linear layer that is all that is trained.

    The directions are the main ones of public examples where a run has some (``gradveil train`` takes records that no
    client holds), else random ones. With ``patches`` there are responses to so many patches of public examples beside
    the wavelets, an image counts as its mirror image, and the layer has no bias, which would take half of a clip.
    """

    dims: Width = 200
    patches: Rank = 0  # for photographs: a mirrored digit is another sign
    init: Literal["zeros", "default", "kaiming", "uniform"] = "default"
    normalize: str = "none"  # none, half, or mean/std

    def features(self, input_shape: Shape) -> Layers:
        if len(input_shape) != 3:
            raise SpecError(f"Model 'scatter' takes images (channels, height, width); got {input_shape}.")
        channels, *sides = input_shape
        length = channels * CHANNELS * math.prod(-(-side // 2**SCALES) for side in sides)
        if not self.patches:
            return {"scatter": Scattering(), "basis": Basis(length, self.dims)}
        first = Mirrored(Scattering(), PublicPatches(channels, min(SIDE, *sides), self.patches))
        return {"scatter": first, "basis": Basis(length + 2 * self.patches * PLACES**2, self.dims)}

    def head(self, length: int, num_classes: int) -> Layers:
        return {"fc": nn.Linear(length, num_classes, bias=not self.patches)}
