"""What clients minimise: losses by name, or a user's own function."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import LossError, own_error
from gradveil.imports import import_object, is_import_path
from gradveil.modalities.tokens import PADDING
from gradveil.ranges import ClassCount, Decay, Weight
from gradveil.registry import Registry

LOSSES: Registry["Loss"] = Registry("loss", "losses")

Targets = Literal["classes", "bits", "numbers", "tokens"]
# class numbers (N,); zeros and ones, (N,) or (N, K); real numbers; ids of the token at each place (N, L)


class Loss(ABC):
    """Settings are the dataclass fields."""

    spec_name: ClassVar[str]
    targets: Targets  # what it is a loss of

    @property
    def separable(self) -> bool:
        """Whether it is the plain mean of one loss per example, which ``each`` gives."""
        return True

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of outputs for targets as the data have them."""
        return self.each(output, target).mean()

    @abstractmethod
    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of outputs for rows y (N, K), differentiable in both."""

    @abstractmethod
    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each example (N,); for separable losses."""

    def total(self, output: Tensor, target: Tensor) -> float:
        """Return the mean loss times the number of examples."""
        return float(self(output, target)) * len(output)

    @abstractmethod
    def of(self, target: Tensor) -> "Loss":
        """Return the loss as it is for targets of this kind; raise where it is no loss of them."""

    def width(self, target: Tensor, num_classes: int) -> int:
        """Return how many numbers a row of y has, and one example's output, for targets of this kind."""
        return num_classes if self.targets == "classes" else max(target[:1].numel(), 1)

    def outputs(self, target: Tensor, num_classes: int) -> int:
        """Return how many outputs a model has for targets of this kind: of each place, where there are several."""
        return self.width(target, num_classes)

    def fits(self, output: Tensor, width: int) -> bool:
        """Return whether outputs have the shape that it needs."""
        flat = self.targets != "classes" and width == 1 and output.ndim == 1
        return flat or (output.ndim == 2 and output.shape[1] == width)

    # Rows of an attack.

    def rows(self, target: Tensor, width: int) -> Tensor:
        """Return targets as rows y (N, K) that are certain."""
        return F.one_hot(target.long(), width) if self.targets == "classes" else target.reshape(-1, width)

    def squash(self, free: Tensor) -> Tensor:
        """Return rows y (..., K) from free numbers of that shape."""
        if self.targets == "numbers":
            return free
        return free.softmax(-1) if self.targets == "classes" else free.sigmoid()

    def found(self, free: Tensor) -> Tensor:
        """Return the targets that free numbers (N, K) speak for, as the data would have them."""
        if self.targets == "classes":
            return free.argmax(-1)
        value = free if self.targets == "numbers" else (free > 0).long()
        return value[:, 0] if value.shape[1] == 1 else value

    def read(self, output: Tensor, slope: Tensor) -> Tensor | None:
        """Return the targets at which the loss has this slope by the outputs (N, ...), or nearly; None: not known."""
        if self.targets != "classes":
            return None
        k = max(slope[0].numel(), 2)
        rows = torch.eye(k).to(output)[:, None].expand(k, len(output), k)
        slopes = torch.stack([torch.func.grad(self.soft)(output, y) for y in rows])  # (K, N, ...)
        return (slopes - slope).square().flatten(2).sum(2).argmin(0)

    # How well a model does.

    @property
    def scored_by(self) -> str:
        return "R²" if self.targets == "numbers" else "accuracy"

    def score(self, output: Tensor, target: Tensor) -> float:
        """Return the share of classes, or of yes-or-no labels, that are right; for numbers R², 1 - error/variance."""
        if self.targets == "numbers":
            aim = target.reshape(output.shape).double()
            return 1 - float((output - aim).square().sum() / (aim - aim.mean(0)).square().sum())
        if self.targets == "classes" and output.ndim == 2 and output.shape[1] > 1:
            right = output.argmax(1) == target
        else:
            right = (output > 0) == target.reshape(output.shape).bool()
        return float(right.sum()) / right.numel()


@dataclass(frozen=True)
class OwnLoss(Loss):
    """A user's function ``loss(output, target)`` that returns the mean, one number.

    What its targets are is read off the data: classes where they are whole numbers (N,), zeros and ones where they are
    whole numbers (N, K), else numbers.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    name: str
    targets: Targets = "classes"
    flat: bool = True  # targets are (N,), not (N, K)

    @property
    def spec(self) -> str:
        return self.name

    @property
    def separable(self) -> bool:
        return False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        try:
            value: Any = self._called(output, target)
        except Exception as error:
            raise LossError(
                f"The loss {self.name} cannot be computed. The error is its own: {own_error(error)}"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise LossError(f"The loss {self.name} returned {what}; it must return the mean, one number, as a tensor.")
        return value.reshape(())

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss for rows y (N, K); of classes, its expectation.

        At certain rows it is the function's own value, even of a function that is no mean over examples.
        """
        if self.targets != "classes":
            return self._called(output, y[:, 0] if self.flat else y).reshape(())
        certain = y.detach().argmax(-1)
        classes = torch.arange(y.shape[1], device=y.device)
        away = y - (classes == certain[:, None]).to(y)
        each = [self._called(output[i : i + 1], c).reshape(()) for i in range(len(y)) for c in classes[:, None]]
        return self._called(output, certain).reshape(()) + (away * torch.stack(each).view(y.shape)).sum() / len(y)

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        raise LossError(f"The loss {self.name} is not known by examples.")

    def _called(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output, target if self.targets == "classes" else target.to(output.dtype))

    def of(self, target: Tensor) -> "OwnLoss":
        return replace(self, targets=kind_of(target), flat=target.ndim == 1)

    def fits(self, output: Tensor, width: int) -> bool:
        return output.ndim > 0


def kind_of(target: Tensor) -> Targets:
    """Return what targets are, by dtype and shape."""
    if target.is_floating_point():
        return "numbers"
    return "classes" if target.ndim == 1 else "bits"


def said(target: Tensor) -> str:
    """Return targets in words."""
    kind = "numbers" if target.is_floating_point() else "whole numbers"
    low, high = (f"{float(v):g}" for v in (target.min(), target.max()))
    return f"{kind} from {low} to {high} of shape {('N', *target.shape[1:])}".replace("'", "")


def build(spec: str | Loss | Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return the loss that a spec describes: ``cross_entropy:smoothing=0.1``, or ``module:function`` for one's own."""
    if isinstance(spec, str) and is_import_path(spec):
        function = import_object(spec)
        if not callable(function):
            raise LossError(f"{spec} is a {type(function).__name__}; give a function loss(output, target).")
        return OwnLoss(function, spec)
    if isinstance(spec, str | Loss):
        return LOSSES.build(spec)
    return OwnLoss(spec, getattr(spec, "__name__", type(spec).__name__))


class EntryLoss(Loss):
    """The mean over all entries of outputs and targets of one shape."""

    @abstractmethod
    def entries(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each entry."""

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        return self.each(output, y).mean()

    def each(self, output: Tensor, target: Tensor) -> Tensor:
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
        return F.binary_cross_entropy_with_logits(output, target, reduction="none")

    def read(self, output: Tensor, slope: Tensor) -> Tensor:
        chance = output.sigmoid() - slope * slope.numel()
        return self.found((chance - 0.5).reshape(len(output), -1))

    def of(self, target: Tensor) -> "BinaryCrossEntropy":
        if not bool(((target == 0) | (target == 1)).all()):
            raise LossError(f"bce takes targets of 0 and 1; the targets are {said(target)}.")
        return self


@LOSSES.register("mse")
@dataclass(frozen=True)
class MeanSquaredError(EntryLoss):
    """Mean squared error of numbers, as ``torch.nn.MSELoss``."""

    targets = "numbers"

    def entries(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square()

    def read(self, output: Tensor, slope: Tensor) -> Tensor:
        return self.found((output - slope * slope.numel() / 2).reshape(len(output), -1))

    def of(self, target: Tensor) -> "MeanSquaredError":
        return self


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
