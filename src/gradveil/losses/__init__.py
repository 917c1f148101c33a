"""What clients minimise: losses by name, or a user's own function."""

from gradveil.losses.base import LOSSES, BinaryCrossEntropy, Loss, MeanSquaredError, OwnLoss, build
from gradveil.losses.cross_entropy import CROSS_ENTROPY, CrossEntropy, EveryPlace, NextToken

__all__ = [
    "CROSS_ENTROPY",
    "LOSSES",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "EveryPlace",
    "Loss",
    "MeanSquaredError",
    "NextToken",
    "OwnLoss",
    "build",
]
