"""What an example is: an image, a row of a table, a sequence of tokens. One file is one modality."""

from gradveil.modalities.base import MODALITIES, Cell, Metric, Modality
from gradveil.modalities.image import IMAGE

__all__ = ["IMAGE", "MODALITIES", "Cell", "Metric", "Modality"]
