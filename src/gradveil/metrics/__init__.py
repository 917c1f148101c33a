"""Distances between reconstruction and original, blind guesses as floors, and intervals over images."""

from gradveil.metrics.base import METRICS, Metric, measure
from gradveil.metrics.floors import blind_guesses
from gradveil.metrics.intervals import Interval, interval, rate

__all__ = ["METRICS", "Interval", "Metric", "blind_guesses", "interval", "measure", "rate"]
