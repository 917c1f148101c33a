"""Distances between reconstruction and original, blind guesses as floors, and intervals over images."""

from gradveil.metrics.intervals import Interval, interval, rate
from gradveil.metrics.recovery import METRICS, blind_guesses, measure
from gradveil.modalities import Metric

__all__ = ["METRICS", "Interval", "Metric", "blind_guesses", "interval", "measure", "rate"]
