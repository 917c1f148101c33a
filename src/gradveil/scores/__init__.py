"""How much each entry of a representation gives away."""

from gradveil.scores.api import leak_scores, row_norms
from gradveil.scores.methods import METHODS

__all__ = ["METHODS", "leak_scores", "row_norms"]
