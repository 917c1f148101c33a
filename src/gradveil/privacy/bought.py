"""What a privacy configuration buys: a clip and a noise, against whom, how often."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, Literal

from gradveil.privacy.accountant import Account
from gradveil.privacy.configuration_files import number

Level = Literal["record", "client"]


@dataclass(frozen=True)
class Bought:
    """What a configuration gives one record, or one client, over a run."""

    what: str  # the mechanism, in words
    level: Level = "client"
    against: str = "the server"  # whom it protects from
    sigma: float | None = None  # of the noise in what is released
    mu: float | None = None  # of a release; None: no such promise
    releases: int | None = None  # over the run; None: the file does not say
    epsilon_round: float | None = None  # where the promise of a round is no μ: pure ε
    epsilon: float | None = None  # over the run, where it does not follow from μ: pure, or with secret sampling
    notes: tuple[str, ...] = ()  # what is off, or easily misread
    details: dict[str, float] = field(default_factory=dict)

    @property
    def account(self) -> Account | None:
        """What the run costs by Gaussian DP; None where there is no such promise."""
        if self.mu is None or self.mu == inf:
            return None
        return Account("configuration", spent=(self.releases or 1) * self.mu**2)


@dataclass(frozen=True)
class Told:
    """What was said beside the file."""

    rounds: int | None = None
    participations: int | None = None
    parameters: int | None = None
    delta: float = 1e-5


def releases_of(flat: Mapping[str, Any], known: Told) -> tuple[int | None, tuple[str, ...]]:
    """Return how many rounds a client takes part in, and how that was found."""
    if known.participations is not None:
        return known.participations, ()
    rounds = known.rounds or number(flat, "num_server_rounds", "num_rounds", "rounds")
    if rounds is None:
        return None, ("The file does not say how many rounds there are: the figures are of one. Give --rounds.",)
    share = number(flat, "fraction_train", "fraction_fit")
    chosen, devices = number(flat, "num_sampled_clients"), number(flat, "population_size", "num_supernodes")
    if share is None and chosen and devices:
        share = chosen / devices
    note = () if share is None or share >= 1 else (
        f"A client takes part in {ceil(rounds * share):g} of {rounds:g} rounds on average, and may be drawn in all: "
        "all are counted. Give --participations where somebody keeps to fewer.",
    )  # fmt: skip
    return int(rounds), note
