"""Settings that make no sense are refused when a defence is built, not in the middle of training."""

from collections.abc import Iterable

from gradveil.errors import SpecError


def check_share(share: float) -> None:
    """Raise unless ``share`` is a part of 1."""
    if not 0.0 <= share <= 1.0:
        raise SpecError(f"share={share} is not a part of 1. Give a number between 0 and 1, e.g. share=0.4 for 40 %.")


def check_positive(name: str, value: float) -> None:
    """Raise unless ``value`` is zero or more."""
    if not value >= 0:
        raise SpecError(f"{name}={value} is negative. Give zero or a positive number.")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless ``value`` is one of the allowed ones."""
    known = list(allowed)
    if value not in known:
        raise SpecError(f"{name}={value!r} is not known. Give one of: {', '.join(map(str, known))}.")
