"""Losses that are the mean over all outputs: binary cross-entropy, and squared error."""

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import LossError
from gradveil.losses.base import LOSSES, Loss, said


class EntryLoss(Loss):
    """The mean over all entries of outputs and targets of one shape."""

    @abstractmethod
    def entries(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each entry."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss; targets (N,) go with outputs (N, 1) as well."""
        return self.each(output, target).mean()

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss for rows y (N, K)."""
        return self.each(output, y).mean()

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of each example's entries."""
        if output.numel() != target.numel() or len(output) != len(target):
            raise LossError(
                f"The model gives {tuple(output.shape)} for targets {tuple(target.shape)}; the loss {self.spec_name} "
                f"needs one output for each."
            )
        n = len(output)
        return self.entries(output.reshape(n, -1), target.reshape(n, -1).to(output)).mean(1)


@LOSSES.register("bce")
@dataclass(frozen=True)
class BinaryCrossEntropy(EntryLoss):
    """Binary cross-entropy of logits, as ``torch.nn.BCEWithLogitsLoss``: several labels of 0 or 1, or one."""

    targets = "bits"

    def entries(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each logit."""
        return F.binary_cross_entropy_with_logits(output, target, reduction="none")

    def read(self, output: Tensor, slope: Tensor) -> Tensor:
        """Return the zeros and ones at which the loss has nearly this slope by the outputs."""
        chance = output.sigmoid() - slope * slope.numel()
        return self.found((chance - 0.5).reshape(len(output), -1))

    def of(self, target: Tensor) -> "BinaryCrossEntropy":
        """Return itself, for zeros and ones."""
        if not bool(((target == 0) | (target == 1)).all()):
            raise LossError(f"bce takes targets of 0 and 1; the targets are {said(target)}.")
        return self


@LOSSES.register("mse")
@dataclass(frozen=True)
class MeanSquaredError(EntryLoss):
    """Mean squared error of numbers, as ``torch.nn.MSELoss``."""

    targets = "numbers"

    def entries(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squared error of each number."""
        return (output - target).square()

    def read(self, output: Tensor, slope: Tensor) -> Tensor:
        """Return the numbers at which the loss has this slope by the outputs."""
        return self.found((output - slope * slope.numel() / 2).reshape(len(output), -1))

    def of(self, target: Tensor) -> "MeanSquaredError":
        """Return itself."""
        return self
