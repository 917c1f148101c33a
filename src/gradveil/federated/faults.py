"""Fault drill: clients that drop out, come late, or send nonsense, by chance from a seed."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Generator

from gradveil.errors import SpecError
from gradveil.federated.server import Arrival
from gradveil.registry import convert, parse
from gradveil.tree import Params


@dataclass(frozen=True)
class Faults:
    """The chance that a client of a round fails in each way; at most one befalls a client."""

    drop: float = 0.0  # sends nothing
    late: float = 0.0  # sends after the round was closed
    nan: float = 0.0  # one tensor holds NaN
    inf: float = 0.0  # one tensor holds infinity
    shape: float = 0.0  # one tensor has another shape

    def __post_init__(self) -> None:
        chances = [getattr(self, f.name) for f in fields(self)]
        if min(chances) < 0 or sum(chances) > 1:
            raise SpecError(f"Fault chances must not be negative nor add up to more than 1; got {chances}.")

    @classmethod
    def parse(cls, text: str) -> "Faults":
        """Read ``drop=0.1,nan=0.05``; an empty text means no faults."""
        known = [f.name for f in fields(cls)]
        given = parse(f"faults:{text}").settings
        for key in given:
            if key not in known:
                raise SpecError(f"No fault is called {key!r}. Known: {', '.join(known)}.")
        return cls(**{key: convert(value, float, f"faults:{key}") for key, value in given.items()})

    def strike(self, arrival: Arrival, rng: Generator) -> Arrival:
        """Return the arrival as it would reach the server, faults included."""
        draw = float(torch.rand((), generator=rng, dtype=torch.float64))
        for field in fields(self):
            draw -= getattr(self, field.name)
            if draw < 0:
                return _befall(arrival, field.name, rng)
        return arrival


def _befall(arrival: Arrival, kind: str, rng: Generator) -> Arrival:
    if kind == "drop" or arrival.sent is None:
        return replace(arrival, sent=None)
    if kind == "late":
        return replace(arrival, late=True)
    update = arrival.sent.update
    gradient: Params = dict(update.gradient)
    name = list(gradient)[int(torch.randint(len(gradient), (), generator=rng))]
    if kind == "shape":
        gradient[name] = torch.cat([gradient[name].flatten(), gradient[name].new_zeros(1)])
    else:
        gradient[name] = torch.full_like(gradient[name], float(kind))
    return replace(arrival, sent=replace(arrival.sent, update=replace(update, gradient=gradient)))
