"""DP-SGD as it is commonly run (Abadi et al. 2016; Opacus): one clip for all layers, noise alike in all directions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.defenses.veil import Veil
from gradveil.privacy.noise import Source
from gradveil.protection.defense import DEFENSES, Accounted, Defense
from gradveil.protection.records import Records
from gradveil.ranges import Positive
from gradveil.tree import Params


@DEFENSES.register("dp_sgd")
@dataclass(frozen=True)
class DpSgd(Accounted):
    """Clip each record's gradient to the length ``clip``, add noise of std ``noise`` × ``clip`` to the sum, and divide.

    What Opacus' optimizer does, on the batches that the client draws; nothing public is used. The same mechanism as
    ``veil:shape=iso,z=noise,clip=clip``, without its promises: an accountant that counts on secret Poisson sampling
    promises more than is kept where batches are shuffled.
    """

    title = "Clipping and noise (DP-SGD)"

    draws_on_device: ClassVar[bool] = True

    noise: Positive = 1.0  # noise_multiplier
    clip: Positive = 1.0  # max_grad_norm

    @property
    def _mechanism(self) -> Veil:
        return Veil(z=self.noise, clip=self.clip)

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        return self._mechanism.on_records(records, slots, rng)

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        return self._mechanism.on_stacked(records, present, slots, rngs)

    def cost(self, epochs: int) -> float:
        return self._mechanism.cost(epochs)

    def mean_of(self, rounds: int) -> Defense:
        return replace(self, noise=self.noise / sqrt(rounds))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return self._mechanism.servers(model)
