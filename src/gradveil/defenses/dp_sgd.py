"""DP-SGD as it is commonly run (Abadi et al. 2016; Opacus): one clip for all layers, noise alike in all directions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.defenses.veil import Veil
from gradveil.privacy.draws import Source
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.records.records import Records
from gradveil.ranges import Positive
from gradveil.tree import Params


@DEFENSES.register("dp_sgd")
@dataclass(frozen=True)
class DpSgd(Defense):
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
        """Return the clipped sum with its noise, over the slots."""
        return self._mechanism.on_records(records, slots, rng)

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        """Return the same for K clients at once."""
        return self._mechanism.on_stacked(records, present, slots, rngs)

    def spends(self, epochs: int) -> float:
        """Return μ² of one participation, without any gain by sampling: E / noise²."""
        return self._mechanism.spends(epochs)

    def mean_of(self, rounds: int) -> Defense:
        """Return it with the noise of a mean."""
        return replace(self, noise=self.noise / sqrt(rounds))

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return: weigh by the known noise, and clip its own trials alike."""
        return self._mechanism.adaptive(model)
