"""Cross-entropy of classes."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import LossError
from gradveil.losses.base import LOSSES, Loss, kind_of, said
from gradveil.ranges import Decay, Weight


@LOSSES.register("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy of classes, as ``torch.nn.CrossEntropyLoss``: weights per class, and label smoothing."""

    targets = "classes"

    weights: tuple[Weight, ...] = ()  # of the classes, joined by '/'; none: all alike
    smoothing: Decay = 0.0  # share of every label that is dealt out to all classes

    def __post_init__(self) -> None:
        if self.weights and not any(self.weights):
            raise ValueError(f"weights={'/'.join(map(str, self.weights))}: give numbers above zero.")

    @property
    def plain(self) -> bool:
        """Whether there are neither weights nor smoothing."""
        return not self.weights and self.smoothing == 0

    @property
    def separable(self) -> bool:
        """Not with weights: the mean is over the weights that a batch has."""
        return not self.weights

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss, over the weights of the targets."""
        return self._torch(output, target, "mean")

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each example."""
        return self._torch(output, target, "none")

    def total(self, output: Tensor, target: Tensor) -> float:
        """Return the mean loss times the number of examples."""
        return super().total(output, target) if self.weights else float(self._torch(output, target, "sum"))

    def _torch(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        if output.ndim != 2:
            raise LossError(f"The model gives {tuple(output.shape)}; cross_entropy needs one logit for each class.")
        weights = self.of_classes(output) if self.weights else None
        return F.cross_entropy(output, target, weights, reduction=reduction, label_smoothing=self.smoothing)

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss for label probabilities y (N, K)."""
        surprise = -output.log_softmax(-1)
        if self.plain:
            return (y * surprise).sum(-1).mean()
        weights = self.of_classes(output)
        smooth = (1 - self.smoothing) * y + self.smoothing / output.shape[-1]
        return (smooth * weights * surprise).sum() / (y * weights).sum()

    def of_classes(self, like: Tensor) -> Tensor:
        """Return the weight of each class (K,) for outputs like these (N, K)."""
        if self.weights and like.shape[-1] != len(self.weights):
            raise LossError(
                f"The loss has {len(self.weights)} weights and the model gives {like.shape[-1]} classes. Give one "
                f"weight for each class, e.g. cross_entropy:weights={'/'.join('1' * min(like.shape[-1], 9))}."
            )
        return like.new_tensor(self.weights) if self.weights else like.new_ones(like.shape[-1])

    def of(self, target: Tensor) -> "CrossEntropy":
        """Return itself, for class numbers."""
        if kind_of(target) != "classes":
            raise LossError(
                f"cross_entropy takes classes, whole numbers (N,); the targets are {said(target)}. Use the loss bce "
                f"for several yes-or-no labels, mse for numbers."
            )
        return self


CROSS_ENTROPY = CrossEntropy()
