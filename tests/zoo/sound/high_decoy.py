"""Decoy images with a high floor, a prior of public images and a secret key."""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure
from gradveil.data import load
from gradveil.defenses.decoy import Decoy, save_prior
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch, GaussianPrior, Observation
from zoo.keeper import Truth

TRUTH = Truth(
    "The noise on the image is forty times what images vary by, in each direction.", "noise on the input", "denoise"
)
KNOWN = {64: "digits", 784: "mnist", 3072: "cifar10"}  # by the numbers of one image


@DEFENSES.register("high_decoy")
@dataclass(frozen=True)
class HighDecoy(Defense):
    """A decoy whose floor is a large share of what images vary by."""

    share: float = 40 / 41
    key: str = "what the server does not have"

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return _decoy(batch.inputs[0].numel(), self.share, self.key).on_batch(batch, rng)

    def for_server(self) -> Defense:
        return replace(self, key="a server's own")

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        def view(seen: Observation) -> Observation:
            return _decoy(prod(seen.input_shape), self.share, self.key).servers(model)[0].view(seen)

        return (replace(Decoy().servers(model)[0], view=view),)


@cache
def _decoy(size: int, share: float, key: str) -> Decoy:
    folder = Path(tempfile.mkdtemp(prefix="gradveil-zoo-"))
    public = load(KNOWN[size]).test.sample(2000, Generator().manual_seed(0))
    prior = GaussianPrior.fit(public.inputs, rank=256)
    save_prior(prior, folder / "prior.safetensors")
    (folder / "key").write_text(key)
    variance = float(prior.factor.square().sum()) / size + prior.ridge
    return Decoy(share * variance, str(folder / "prior.safetensors"), str(folder / "key"))
