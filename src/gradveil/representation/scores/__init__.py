"""How much each entry of a representation gives away."""

from gradveil.representation.scores.api import METHODS, leak_scores, row_norms

__all__ = ["METHODS", "leak_scores", "row_norms"]
