"""Decoy inputs: train on x + v in place of x, so that nothing that is sent knows more of x than x + v does."""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.errors import DefenseError, SpecError
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.privacy.noise import NoiseKind, Source, keyed_normals
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.passes import Change, Changed
from gradveil.ranges import Weight
from gradveil.types import Batch, GaussianPrior, Observation

_UNIFORM = 1.0 / 12.0  # variance of a pixel that is anything in [0, 1]


@DEFENSES.register("decoy")
@dataclass(frozen=True)
class Decoy(Defense):
    """Add noise v ~ N(0, c Σ) to each example, always the same to the same example, and train on that.

    Σ is the covariance of public images. Whatever the server does with everything it ever gets, it cannot know more
    of x than x + v tells (data processing): for Gaussian data the best mean squared error is c/(1+c) × the mean
    variance, and c is chosen to make that ``floor``. For real images the floor is that of linear estimators only.
    The noise is a keyed hash of the example, so that it does not average out over epochs and rounds; data
    augmentation breaks this, since every variant of an example gets noise of its own.
    """

    title = "Decoys of the examples"

    keeps_apart: ClassVar[bool] = True

    floor: Weight = 0.015  # mean squared error, in [0, 1] pixels, that no linear estimator should beat
    prior: str | None = None  # a file of save_prior(); None: independent uniform pixels, which images are not
    secret: str | None = None  # a file that only this client has; None: a public key, for simulations only
    _key: bytes | None = None  # in place of what the file holds

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        shape = self._shape(batch.inputs[0].numel())
        key = _read_secret(self.secret) if self._key is None else self._key
        draw = _noise if self.secret is None else _secret_noise
        noise = torch.stack([draw(x, shape.prior, key) for x in batch.inputs.detach().cpu()])
        return replace(batch, inputs=batch.inputs + shape.strength**0.5 * noise.to(batch.inputs))

    def noise_from(self, rng: Source) -> NoiseKind:
        return "simulated" if self.secret is None else "secret"

    def for_server(self) -> Defense:
        return replace(self, _key=b"a server's")

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = "Rebuilds the decoy x + v and shrinks it towards the mean image: the best linear estimate of x."
        return (Countermeasure("denoise", why, self._denoised),)

    def _denoised(self, seen: Observation) -> Observation:
        shape = self._shape(prod(seen.input_shape))
        grow, prior = 1.0 + shape.strength, shape.prior
        model = Changed(seen.model, _grown(prior.mean.reshape(seen.input_shape), grow))
        if self.prior is None:
            return replace(seen, model=model)
        shrunk = GaussianPrior(prior.mean, prior.factor / grow**0.5, prior.ridge / grow)
        return replace(seen, model=model, prior=shrunk)

    def _shape(self, size: int) -> "_Shape":
        prior = GaussianPrior.white(torch.full((size,), 0.5), _UNIFORM**0.5)
        if self.prior is not None:
            prior = load_prior(self.prior)
        if len(prior.mean) != size:
            raise DefenseError(
                f"The prior {self.prior} is of inputs with {len(prior.mean)} entries; these have {size}. Fit it to "
                f"public inputs of the same shape."
            )
        variance = float(prior.factor.square().sum()) / size + prior.ridge
        if self.floor >= variance:
            raise DefenseError(
                f"floor={self.floor} is not below {variance:.3g}, the mean variance of the prior: no noise hides more "
                f"than everything. Give a smaller floor."
            )
        return _Shape(prior, self.floor / (variance - self.floor))


@dataclass(frozen=True)
class _Shape:
    """The noise N(0, strength × prior covariance)."""

    prior: GaussianPrior
    strength: float  # c


def _grown(mean: Tensor, grow: float) -> Change:
    """Return what undoes the denoiser: from an estimate of x to the x + v that it is of."""
    return lambda estimate: mean.to(estimate) + grow * (estimate - mean.to(estimate))


def _noise(x: Tensor, prior: GaussianPrior, key: bytes) -> Tensor:
    """Return v ~ N(0, Σ) of the shape of x, a function of x and a public key alone."""
    rng = Generator().manual_seed(int.from_bytes(_digest(x, key, 8), "big") >> 1)
    inside = torch.randn(prior.factor.shape[1], generator=rng, dtype=prior.factor.dtype)
    return _shaped(x, prior, inside, torch.randn(x.numel(), generator=rng, dtype=prior.factor.dtype))


def _secret_noise(x: Tensor, prior: GaussianPrior, key: bytes) -> Tensor:
    """Return the same of a secret key, by the cipher: a generator's seed of 32 bits could be searched for."""
    drawn = keyed_normals(prior.factor.shape[1] + x.numel(), _digest(x, key, 32)).to(prior.factor.dtype)
    return _shaped(x, prior, *drawn.split([prior.factor.shape[1], x.numel()]))


def _digest(x: Tensor, key: bytes, size: int) -> bytes:
    return hashlib.blake2b(x.float().contiguous().numpy().tobytes(), key=key, digest_size=size).digest()


def _shaped(x: Tensor, prior: GaussianPrior, inside: Tensor, beside: Tensor) -> Tensor:
    v: Tensor = prior.factor @ inside + prior.ridge**0.5 * beside  # (d,)
    return v.reshape(x.shape)


def _read_secret(path: str | None) -> bytes:
    if path is None:
        return b"gradveil"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"Cannot read the secret {path!r} ({error.strerror}). Make one: openssl rand -out FILE 32."
        ) from error
    return hashlib.blake2b(content, digest_size=32).digest()


def save_prior(prior: GaussianPrior, path: str | Path) -> None:
    """Write a prior fitted to public data to a file, for ``decoy:prior=FILE``."""
    tensors = {"mean": prior.mean, "factor": prior.factor.contiguous(), "ridge": torch.tensor(prior.ridge)}
    write_atomically(Path(path), save(tensors))
    _load.cache_clear()


def load_prior(path: str | Path) -> GaussianPrior:
    """Read a prior that ``save_prior`` wrote."""
    with wrap_parse_errors(f"The prior {str(path)!r}", SpecError, "Write it with gradveil.defenses.decoy.save_prior."):
        return _load(str(path), Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _load(path: str, changed: int) -> GaussianPrior:
    content, _ = read_safetensors(Path(path))
    prior = GaussianPrior(content["mean"], content["factor"], float(content["ridge"]))
    parts = (prior.mean, prior.factor)
    fits = prior.factor.ndim == 2 and prior.mean.shape == prior.factor.shape[:1] and prior.ridge >= 0
    if not fits or not all(t.is_floating_point() and bool(t.isfinite().all()) for t in parts):
        raise ValueError(f"mean {tuple(prior.mean.shape)}, factor {tuple(prior.factor.shape)}, ridge {prior.ridge}")
    return prior
