"""What a server that knows a defence does about it: another view of the same update, maybe another attack.

Such a server knows which defence runs and with which settings, but none of the client's random draws. A defence
declares its countermeasures; an attack is handed the changed view. Neither imports the other. Servers come in tiers, by
what they know beside the update and what they may do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gradveil.tree import Params
from gradveil.types import Observation

Tier = Literal["oblivious", "adaptive", "informed", "multi-round", "malicious"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True)
class Countermeasure:
    """One thing that a server which knows the defence can do."""

    name: str  # short, for table rows: "drop", "mask", "whiten", ...
    why: str  # one sentence for the report
    view: Callable[[Observation], Observation]  # what the attack is then given
    attack: str | None = None  # the spec of an attack that only this server would choose; None: the audit's own
    tier: Tier = "adaptive"  # of the servers that can do it
    over_rounds: bool = False  # whether the view is of all rounds together, not of each by itself


def plain() -> Countermeasure:
    """The server has nothing to undo."""
    return Countermeasure("plain", "Nothing is hidden, so nothing has to be undone.", lambda seen: seen)


def undeclared() -> Countermeasure:
    """Nobody says what a server could do: what attacks then fail to get is not assessed."""
    return Countermeasure("undeclared", "The author of the defence does not say what a server could do.", lambda s: s)


def drop(*patterns: str) -> Countermeasure:
    """Leave the defended tensors out of the matching (Balunović et al., ICLR 2022)."""
    why = f"Leaves the defended tensors ({', '.join(patterns)}) out of the matching."
    return Countermeasure("drop", why, lambda seen: seen.without(*patterns))


def mask(*patterns: str) -> Countermeasure:
    """Read the zero pattern off the update and match the other entries only."""
    why = f"Reads the zeroed entries of {', '.join(patterns)} off the update and matches the others only."
    return Countermeasure("mask", why, lambda seen: seen.masked(*patterns))


def whiten(std: Callable[[Observation], dict[str, float]]) -> Countermeasure:
    """Weigh each tensor by its known noise level and add a prior: the MAP estimate."""
    why = "Weighs every tensor by its known noise level and adds what public examples look like (a MAP estimate)."
    return Countermeasure("whiten", why, lambda seen: replace(seen, noise=seen.noise | std(seen)), "newton")


def simulate(
    transform: Callable[[Params], Params], why: str, on: Literal["gradient", "update"] = "gradient"
) -> Countermeasure:
    """Run the defence on the server's own trial gradients, or trial updates, inside the objective."""
    return Countermeasure("simulate", why, lambda seen: replace(seen, simulate=transform, simulate_on=on))


def use(attack: str, why: str) -> Countermeasure:
    """Switch to another attack that the defence does not touch."""
    return Countermeasure(attack.partition(":")[0], why, lambda seen: seen, attack)
