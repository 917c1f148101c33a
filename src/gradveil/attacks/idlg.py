"""Improved deep leakage from gradients (Zhao et al. 2020): read the label first, then search the image alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Generator

from gradveil.attacks.base import ATTACKS
from gradveil.attacks.dlg import DLG
from gradveil.attacks.labels import with_labels
from gradveil.errors import AttackError
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("idlg")
@dataclass(frozen=True)
class IDLG(DLG):
    """DLG with the label read off the sign of the last layer's gradient (Zhao et al. 2020); one example only."""

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates at once."""
        for s in seen:
            if s.num_examples != 1:
                raise AttackError(
                    f"idlg reads the label of one example, and this update is made of {s.num_examples}. "
                    "Use dlg, or gs, which recovers how often each class occurs."
                )
        return super().reconstruct_many(with_labels(seen, rngs, required=True), rngs)
