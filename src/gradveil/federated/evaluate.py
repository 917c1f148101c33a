"""Accuracy and loss of a model on a split."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gradveil.data.base import Split


@dataclass(frozen=True)
class Evaluation:
    """How well a model does on held-out examples."""

    accuracy: float
    loss: float  # mean cross-entropy


def evaluate(model: nn.Module, split: Split, batch_size: int = 1000) -> Evaluation:
    """Return accuracy and mean loss in evaluation mode; the model's mode is put back afterwards."""
    was_training = model.training
    first = next(model.parameters())
    model.eval()
    hits = loss = 0.0
    try:
        with torch.no_grad():
            for start in range(0, len(split), batch_size):
                batch = split.batch(slice(start, start + batch_size))
                logits, labels = model(batch.inputs.to(first)), batch.labels.to(first.device)
                hits += float((logits.argmax(1) == labels).sum())
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    finally:
        model.train(was_training)
    return Evaluation(hits / len(split), loss / len(split))
