"""What a defence did, counted: not only what it was asked to do."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Report:
    """Counts over defended training steps. Sums stay on the device until they are read."""

    steps: int = 0  # training passes (or, for defences of the gradient, optimizer steps) that were defended
    skipped: int = 0  # training steps that went out undefended; only where strict=False
    examples: int = 0  # examples in the defended passes
    optimizer_steps: int = 0  # steps taken by optimizers that hold the model's weights
    updates: int = 0  # updates that passed through the defence
    asked: int = 0  # entries that were to be zeroed
    _representations: int = field(default=0, repr=False)  # one for each example and defended layer
    _sums: Tensor | None = field(default=None, repr=False)  # (3,) entries removed, entries live, sum of ||r - r'||_2

    def add(self, r: Tensor, r_perturbed: Tensor, asked: int) -> None:
        """Count one representation r (N, ...) and what became of it."""
        r, r_perturbed = r.detach(), r_perturbed.detach()
        live = r != 0
        distance = (r - r_perturbed).flatten(1).to(torch.float32).norm(dim=1).sum()
        sums = torch.stack([(live & (r_perturbed == 0)).sum(), live.sum(), distance.double()])
        self.asked += asked
        self._representations += len(r)
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums

    @property
    def removed(self) -> int:
        """Live entries that were set to zero."""
        return 0 if self._sums is None else int(self._sums[0])

    @property
    def live(self) -> int:
        """Live entries (r_i ≠ 0) there were."""
        return 0 if self._sums is None else int(self._sums[1])

    @property
    def distance(self) -> float:
        """||r - r'||_2, the mean over examples and defended layers."""
        return 0.0 if self._sums is None else float(self._sums[2]) / self._representations

    def summary(self) -> dict[str, float]:
        """Return every figure by name, for tables and logs."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "examples": self.examples,
            "optimizer_steps": self.optimizer_steps,
            "updates": self.updates,
            "asked": self.asked,
            "removed": self.removed,
            "live": self.live,
            "distance": self.distance,
        }

    def __str__(self) -> str:
        text = f"{self.steps} steps defended, {self.skipped} not"
        if self._sums is not None:
            asked = f" of {self.asked} asked" if self.asked else ""
            text += f"; {self.removed} live entries removed{asked} ({self.live} live)"
            text += f"; mean ||r - r'|| {self.distance:.3g}"
        return text
