"""Cross-entropy of a class at every place of an image: segmentation."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import LossError
from gradveil.losses.base import LOSSES, Loss, said
from gradveil.ranges import ClassCount


@LOSSES.register("dense")
@dataclass(frozen=True)
class EveryPlace(Loss):
    """Cross-entropy of a class at every place, mean over places, then over examples; of segmentation.

    Outputs are (N, C, H, W), targets (N, H, W). A row of an attack is all probabilities of an example, one after the
    other.
    """

    targets = "bits"

    classes: ClassCount = 2

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss."""
        return self.each(output, target).mean()

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each example: the mean over its places."""
        if output.ndim < 3 or output.shape[1] != self.classes or output.shape[2:] != target.shape[1:]:
            raise LossError(
                f"The model gives {tuple(output.shape)} for targets {tuple(target.shape)} of {self.classes} classes; "
                f"the loss dense needs {(len(target), self.classes, *target.shape[1:])}: a logit for each class at "
                f"each place."
            )
        return F.cross_entropy(output, target.long(), reduction="none").flatten(1).mean(1)

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss for rows y (N, K) of probabilities."""
        return -(y.reshape(output.shape) * output.log_softmax(1)).sum(1).mean()

    def of(self, target: Tensor) -> "EveryPlace":
        """Return itself, for classes of places."""
        if target.is_floating_point() or target.ndim < 3:
            raise LossError(f"dense takes a class for each place, whole numbers (N, H, W); they are {said(target)}.")
        if (most := int(target.max()) + 1) > self.classes:
            return replace(self, classes=most)
        return self

    def width(self, target: Tensor, num_classes: int) -> int:
        """Return how many numbers a row has: a probability of each class at each place."""
        return target[0].numel() * self.classes

    def outputs(self, target: Tensor, num_classes: int) -> int:
        """Return how many classes a model tells apart."""
        return self.classes

    def fits(self, output: Tensor, width: int) -> bool:
        """Return whether outputs are a logit for each class at each place."""
        return output.ndim > 2 and output[0].numel() == width

    def rows(self, target: Tensor, width: int) -> Tensor:
        """Return classes as certain rows."""
        return F.one_hot(target.long(), self.classes).movedim(-1, 1).flatten(1)

    def squash(self, free: Tensor) -> Tensor:
        """Return probabilities from free numbers (..., K)."""
        return free.reshape(*free.shape[:-1], self.classes, -1).softmax(-2).flatten(-2)

    def found(self, free: Tensor) -> Tensor:
        """Return the likeliest classes (N, H W)."""
        return free.reshape(*free.shape[:-1], self.classes, -1).argmax(-2)

    def score(self, output: Tensor, target: Tensor) -> float:
        """Return the share of places whose class is right."""
        return float((output.argmax(1) == target).float().mean())
