"""The few errors a user can act on: what is wrong, what was found, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class GradveilError(Exception):
    """Anything a user can mend; the command line prints it in one line and exits with 2."""


class SpecError(GradveilError):
    """A spec (``name:key=value,...``) names something that does not exist."""


class LayerError(GradveilError):
    """A model has no such layer, or the layer cannot be defended."""


class DataError(GradveilError):
    """A data set is missing, empty, or not as asked for."""


class UpdateError(GradveilError):
    """An update is malformed: wrong names, shapes, dtypes or values."""


class DefenseError(GradveilError):
    """A defence cannot act here, or did not act where it had to."""


class ScoreError(GradveilError):
    """Leak scores cannot be computed as asked: unknown method, norm or operation."""


class AttackError(GradveilError):
    """An attack cannot run on what the server sees."""


class CertificateError(GradveilError):
    """A bound cannot be computed for this model, or what was asked for has no meaning."""


class MissingExtraError(GradveilError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency. Install it: pip install 'gradveil[{extra}]'.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"Did you mean 'x'? "`` where some known name is close, else an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
