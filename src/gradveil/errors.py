"""The few errors a user can act on: what is wrong, what was found, what to do."""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path

_OURS = Path(__file__).parent


class GradveilError(Exception):
    """Anything a user can mend; the command line prints it in one line and exits with 2."""


class SpecError(GradveilError):
    """A spec (``name:key=value,...``) names something that does not exist."""


class ModelError(SpecError):
    """A model cannot be made, run or trained; where its own code raised, the text says where."""


class LossError(GradveilError):
    """A loss does not fit the targets or the model's output, or a user's own failed."""


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


class BudgetError(GradveilError):
    """A client's privacy budget does not allow a round, or an account belongs to another client."""


class MissingExtraError(GradveilError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency. Install it: pip install 'gradveil[{extra}]'.")


def printable(text: str) -> str:
    """Return a text of a file without line ends and what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"Did you mean 'x'? "`` where some known name is close, else an empty string."""
    close = get_close_matches(name[:200], list(islice(known, 1000)), n=1)  # it takes time for each
    return f"Did you mean {close[0]!r}? " if close else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, torch's or Python's, says that memory does not suffice."""
    told = ("DefaultCPUAllocator", "not enough memory", "out of memory")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in told))
    )


def own_error(error: Exception) -> str:
    """Return, in one line, what a user's code raised, after its last frame there: ``file:line in function: ...``."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if isinstance(error, SyntaxError):  # its frame is not on the stack, but its text has file and line
        return what
    return own_place(error) + what


def from_defense(error: Exception, what: str = "The defence") -> Exception:
    """Return the error of a defence's code as one line of a report; one of ours, of memory or of time as it is."""
    if isinstance(error, GradveilError) or is_out_of_memory(error) or type(error).__name__ == "OutOfTime":
        return error
    return DefenseError(f"{what} ends with an error of its own: {own_error(error)}")


@cache
def _installed() -> set[str]:
    import sysconfig

    return {
        place for name, place in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }


def own_place(error: BaseException, installed: bool = True) -> str:
    """Return the last frame of a user's code that an error passed, ``file:line in function: ``, where there is one.

    Else that of another package, unless what is ``installed`` does not count.
    """
    stack = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [(path, frame) for path, frame in stack if _OURS not in path.parents and path.name[0] != "<"]
    if not installed:
        frames = [(path, frame) for path, frame in frames if not _installed() & {*map(str, path.parents)}]
    users = [(path, frame) for path, frame in frames if not {"torch", "importlib"} & set(path.parts)]
    return "".join(f"{path}:{frame.lineno} in {frame.name}: " for path, frame in (users or frames)[-1:])
