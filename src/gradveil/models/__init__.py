"""Networks by name, each a builder whose settings are the choices that the literature leaves open."""

from gradveil.models.base import MODELS, Builder, build

__all__ = ["MODELS", "Builder", "build"]
