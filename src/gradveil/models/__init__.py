"""Networks by name, each a builder whose settings are the choices that the literature leaves open."""

from gradveil.models.base import MODELS, Builder, build, build_working, fit_to_public

__all__ = ["MODELS", "Builder", "build", "build_working", "fit_to_public"]
