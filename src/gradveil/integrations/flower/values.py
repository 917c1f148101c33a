"""The numbers that a message may hold, by name: what they may be, whoever wrote them."""

import math
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from gradveil.errors import UpdateError


@dataclass(frozen=True)
class Range:
    """From a number to a number, both included; whole ones only, where that is said."""

    low: float
    high: float
    whole: bool = False

    def holds(self, value: Any) -> bool:
        """Return whether a value is such a number: no text, no list, not NaN."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.low <= value <= self.high and (not self.whole or float(value).is_integer())

    def __str__(self) -> str:
        return f"{'a whole number ' if self.whole else ''}from {self.low:g} to {self.high:g}"


ASKED = {  # of a training message's config
    "lr": Range(1e-12, 1e6),
    "server-round": Range(0, 1e9, True),
    "batch-size": Range(0, 1e9, True),
    "epochs": Range(1, 1e6, True),
    "momentum": Range(0, 1),
    "weight-decay": Range(0, 1e6),
    "proximal-mu": Range(0, 1e6),
    "clip": Range(0, 1e6),
    "public-clip": Range(1e-6, 1e6),
}


COUNT = Range(0, 1e9, True)  # of examples or steps


def asked(message: Message, name: str, default: float) -> float:
    """Return what a server asks for under this name; anything that is no such number is refused."""
    for record in message.content.config_records.values():
        if name in record:
            if not ASKED[name].holds(record[name]):
                raise UpdateError(f"The server asks for a {name!r} that is not {ASKED[name]}. Nothing is done.")
            return float(record[name])
    return default


def check_asked(message: Message) -> None:
    """Raise where a number that a server asks for is none, or none that makes sense."""
    for name in ASKED:
        asked(message, name, math.nan)
