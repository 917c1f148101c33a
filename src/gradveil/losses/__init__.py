"""What clients minimise: losses by name, or a user's own function."""

from gradveil.losses.base import LOSSES, Loss, OwnLoss, build
from gradveil.losses.cross_entropy import CROSS_ENTROPY, CrossEntropy
from gradveil.losses.dense import EveryPlace
from gradveil.losses.entries import BinaryCrossEntropy, MeanSquaredError
from gradveil.losses.next_token import NextToken

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
