"""Decoy images with a high floor, a prior of public images and a secret key."""

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Generator

from gradveil.data import load
from gradveil.defenses.base import DEFENSES
from gradveil.defenses.decoy import Decoy, save_prior
from gradveil.types import GaussianPrior
from zoo.keeper import Truth

TRUTH = Truth(
    "The noise on the image is twelve times what images vary by, in each direction.", "noise on the input", "denoise"
)


@lru_cache
def _folder() -> Path:
    """Return where the prior of the public digits and a key lie."""
    folder = Path(tempfile.mkdtemp(prefix="gradveil-zoo-"))
    public = load("digits").test.sample(300, Generator().manual_seed(0))
    save_prior(GaussianPrior.fit(public.inputs), folder / "prior.safetensors")
    (folder / "key").write_bytes(b"what the server does not have")
    return folder


@DEFENSES.register("high_decoy")
@dataclass(frozen=True)
class HighDecoy(Decoy):
    """A decoy for digits; its floor is nine tenths of the variance."""

    floor: float = 0.068
    prior: str | None = str(_folder() / "prior.safetensors")
    secret: str | None = str(_folder() / "key")
