"""Distances between reconstruction and original, blind guesses as floors, and intervals over images."""

from gradveil.metrics.recovery import METRICS, Interval, blind_guesses, interval, measure, rate
from gradveil.modalities import Metric

__all__ = ["METRICS", "Interval", "Metric", "blind_guesses", "interval", "measure", "rate"]
