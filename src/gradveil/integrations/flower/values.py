"""The numbers that a message may hold, by name: what they may be, whoever wrote them."""

import math
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from gradveil.errors import UpdateError
from gradveil.ranges import Range


@dataclass(frozen=True)
class Number:
    """A number in a range; a whole one only, where that is said."""

    range: Range
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        """Whether a value is such a number: no text, no list, no truth value, not NaN."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return value in self.range and (not self.whole or float(value).is_integer())

    def __str__(self) -> str:
        return f"a {'whole ' if self.whole else ''}number {self.range}"


COUNT = Number(Range(0), True)  # of examples or steps
ASKED = {  # of a training message's config
    "lr": Number(Range(1e-12, 1e6)),
    "server-round": COUNT,
    "batch-size": COUNT,
    "epochs": Number(Range(1, 10**6), True),
    "momentum": Number(Range(0, 1, below=True)),
    "weight-decay": Number(Range(0, 1e6)),
    "proximal-mu": Number(Range(0, 1e6)),
    "clip": Number(Range(0, 1e6)),
    "public-clip": Number(Range(1e-6, 1e6)),
}


def asked(message: Message, name: str, default: float) -> float:
    """Return what a server asks for under this name; anything that is no such number is refused."""
    for record in message.content.config_records.values():
        if name in record:
            if record[name] not in ASKED[name]:
                raise UpdateError(f"The server asks for a {name!r} that is not {ASKED[name]}. Nothing is done.")
            return float(record[name])
    return default


def check_asked(message: Message) -> None:
    """Raise where a number that a server asks for is none, or none that makes sense."""
    for name in ASKED:
        asked(message, name, math.nan)
