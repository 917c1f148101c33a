"""Cross-entropy of classes: of an example, of the token that follows at each place, and of every place of an image."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import LossError
from gradveil.losses.base import LOSSES, Loss, kind_of, said
from gradveil.modalities.tokens import PADDING
from gradveil.ranges import ClassCount, Decay, Weight


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
        return not self.weights and self.smoothing == 0

    @property
    def separable(self) -> bool:
        return not self.weights

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self._torch(output, target, "mean")

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        return self._torch(output, target, "none")

    def total(self, output: Tensor, target: Tensor) -> float:
        return super().total(output, target) if self.weights else float(self._torch(output, target, "sum"))

    def _torch(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        if output.ndim != 2:
            raise LossError(f"The model gives {tuple(output.shape)}; cross_entropy needs one logit for each class.")
        weights = self.of_classes(output) if self.weights else None
        return F.cross_entropy(output, target, weights, reduction=reduction, label_smoothing=self.smoothing)

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
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
        if kind_of(target) != "classes":
            raise LossError(
                f"cross_entropy takes classes, whole numbers (N,); the targets are {said(target)}. Use the loss bce "
                f"for several yes-or-no labels, mse for numbers."
            )
        return self


CROSS_ENTROPY = CrossEntropy()


@LOSSES.register("next_token")
@dataclass(frozen=True)
class NextToken(Loss):
    """Cross-entropy of the token that follows at each place, mean over a sequence's tokens, then over sequences.

    Outputs are (N, L, V), targets ids (N, L). Places where the target is 0, the padding, do not count.
    """

    targets = "tokens"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.each(output, target).mean()

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        if output.ndim != 3 or output.shape[:2] != target.shape:
            raise LossError(
                f"The model gives {tuple(output.shape)} for targets {tuple(target.shape)}; next_token needs one logit "
                f"for each token of the vocabulary at each place."
            )
        surprise = F.cross_entropy(output.mT, target, reduction="none")  # (N, L)
        return _mean_where(surprise, (target != PADDING).to(surprise))

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        return _mean_where(-(y * output.log_softmax(-1)).sum(-1), y.sum(-1)).mean()

    def of(self, target: Tensor) -> "NextToken":
        if target.is_floating_point() or target.ndim != 2:
            raise LossError(
                f"next_token takes ids of tokens, whole numbers (N, L); the targets are {said(target)}. Use "
                f"cross_entropy for classes."
            )
        return self

    def fits(self, output: Tensor, width: int) -> bool:
        return output.ndim == 3 and output.shape[2] == width

    def width(self, target: Tensor, num_classes: int) -> int:
        return num_classes

    def rows(self, target: Tensor, width: int) -> Tensor:
        return F.one_hot(target.long(), width) * (target != PADDING)[..., None]

    def squash(self, free: Tensor) -> Tensor:
        return free.softmax(-1)

    def found(self, free: Tensor) -> Tensor:
        return free.argmax(-1)

    def read(self, output: Tensor, slope: Tensor) -> Tensor:
        low, place = slope.min(-1)
        return place.where(low < -1e-6 * slope.abs().amax(), PADDING)

    def score(self, output: Tensor, target: Tensor) -> float:
        counts = target != PADDING
        return float(((output.argmax(-1) == target) & counts).sum()) / max(int(counts.sum()), 1)


def _mean_where(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum(-1) / counts.sum(-1).clamp_min(1)


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
        return self.each(output, target).mean()

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        if output.ndim < 3 or output.shape[1] != self.classes or output.shape[2:] != target.shape[1:]:
            raise LossError(
                f"The model gives {tuple(output.shape)} for targets {tuple(target.shape)} of {self.classes} classes; "
                f"the loss dense needs {(len(target), self.classes, *target.shape[1:])}: a logit for each class at "
                f"each place."
            )
        return F.cross_entropy(output, target.long(), reduction="none").flatten(1).mean(1)

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        return -(y.reshape(output.shape) * output.log_softmax(1)).sum(1).mean()

    def of(self, target: Tensor) -> "EveryPlace":
        if target.is_floating_point() or target.ndim < 3:
            raise LossError(f"dense takes a class for each place, whole numbers (N, H, W); they are {said(target)}.")
        if (most := int(target.max()) + 1) > self.classes:
            return replace(self, classes=most)
        return self

    def width(self, target: Tensor, num_classes: int) -> int:
        return target[0].numel() * self.classes

    def outputs(self, target: Tensor, num_classes: int) -> int:
        return self.classes

    def fits(self, output: Tensor, width: int) -> bool:
        return output.ndim > 2 and output[0].numel() == width

    def rows(self, target: Tensor, width: int) -> Tensor:
        return F.one_hot(target.long(), self.classes).movedim(-1, 1).flatten(1)

    def squash(self, free: Tensor) -> Tensor:
        return free.reshape(*free.shape[:-1], self.classes, -1).softmax(-2).flatten(-2)

    def found(self, free: Tensor) -> Tensor:
        return free.reshape(*free.shape[:-1], self.classes, -1).argmax(-2)

    def score(self, output: Tensor, target: Tensor) -> float:
        return float((output.argmax(1) == target).float().mean())
