"""Cross-entropy of the next token at every place of a sequence."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import LossError
from gradveil.ids import PADDING
from gradveil.losses.base import LOSSES, Loss, said


@LOSSES.register("next_token")
@dataclass(frozen=True)
class NextToken(Loss):
    """Cross-entropy of the token that follows at each place, mean over a sequence's tokens, then over sequences.

    Outputs are (N, L, V), targets ids (N, L). Places where the target is 0, the padding, do not count.
    """

    targets = "tokens"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over sequences."""
        return self.each(output, target).mean()

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sequence: the mean over its tokens."""
        if output.ndim != 3 or output.shape[:2] != target.shape:
            raise LossError(
                f"The model gives {tuple(output.shape)} for targets {tuple(target.shape)}; next_token needs one logit "
                f"for each token of the vocabulary at each place."
            )
        surprise = F.cross_entropy(output.mT, target, reduction="none")  # (N, L)
        return _mean(surprise, (target != PADDING).to(surprise))

    def soft(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss for rows y (N, L, V) of probabilities; rows of zeros do not count."""
        return _mean(-(y * output.log_softmax(-1)).sum(-1), y.sum(-1)).mean()

    def of(self, target: Tensor) -> "NextToken":
        """Return itself, for ids of tokens."""
        if target.is_floating_point() or target.ndim != 2:
            raise LossError(
                f"next_token takes ids of tokens, whole numbers (N, L); the targets are {said(target)}. Use "
                f"cross_entropy for classes."
            )
        return self

    def fits(self, output: Tensor, width: int) -> bool:
        """Return whether outputs are one row of logits for each place."""
        return output.ndim == 3 and output.shape[2] == width

    def width(self, target: Tensor, num_classes: int) -> int:
        """Return the size of the vocabulary."""
        return num_classes

    def rows(self, target: Tensor, width: int) -> Tensor:
        """Return ids as certain rows (N, L, V), of zeros where there is padding."""
        return F.one_hot(target.long(), width) * (target != PADDING)[..., None]

    def squash(self, free: Tensor) -> Tensor:
        """Return probabilities."""
        return free.softmax(-1)

    def found(self, free: Tensor) -> Tensor:
        """Return the likeliest ids."""
        return free.argmax(-1)

    def read(self, output: Tensor, slope: Tensor) -> Tensor:
        """Return the ids at which the loss has this slope: it falls by the target's logit, and by no other."""
        low, place = slope.min(-1)
        return place.where(low < -1e-6 * slope.abs().amax(), PADDING)

    def score(self, output: Tensor, target: Tensor) -> float:
        """Return the share of tokens that are right."""
        counts = target != PADDING
        return float(((output.argmax(-1) == target) & counts).sum()) / max(int(counts.sum()), 1)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum(-1) / counts.sum(-1).clamp_min(1)
