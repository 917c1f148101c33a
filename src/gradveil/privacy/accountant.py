"""What a client's releases cost one of its records, over a whole run, and what that leaves a server.

The mechanism (clip each record's gradient in public coordinates, add Gaussian noise of multiplier z to the sum) is
μ-Gaussian-DP for zeroing one record slot, with μ² = E / z² in a round of E local epochs. The squares add up over
rounds, whatever weights the server sends in between, so an account holds one number: the μ² that was spent.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from scipy.special import log_ndtr, ndtr
from torch import Tensor

from gradveil.errors import BudgetError, CertificateError
from gradveil.files import locked, make_folder, wrap_os_errors, wrap_parse_errors, write_atomically
from gradveil.privacy.dp import rero_gaussian
from gradveil.privacy.journal import NOT_SENT, Ending, add_to_journal, check_summary, read_journal, read_summary

SECRET, SIMULATED = NOISE = ("secret", "simulated")  # whether the noise can be drawn again by who knows a seed
THEOREM = (
    "R participations of E local epochs with noise multiplier z are √(E R)/z Gaussian-DP for zeroing one record of one "
    "client, against any server that chooses the weights as it likes and knows all other records."
)
TUNED = (
    "Settings are chosen without these records. Tuning on them is not counted: k tries that the server sees cost √k "
    "times the μ, and the choice costs as well where only the best is shown (Papernot and Steinke 2022)."
)
ASSUMPTIONS = (
    "One record is zeroed in its slot, and how many records a client has is public. Where another record stands in its "
    "place, twice the μ holds.",
    "A record enters at most one batch of a local epoch, batches are cut without looking at the data, and every sum is "
    "divided by the same number of slots.",
    "Nothing else that depends on the data leaves the client: no batch norm statistics, buffers, losses or counts. "
    "Clip and coordinates follow from public data and earlier releases; a gradient that is not finite counts as zero.",
    "The noise is fresh and secret (a cipher under keys of the operating system), and Gaussian up to a bound that δ "
    "takes in. A simulation draws it from its seed: what it shows is the method's promise, not that of its clients.",
    "No gain from sampling is counted: the server knows who takes part in which round.",
    TUNED,
)
AGGREGATE = (
    "The server sees only the sum of a round, one noisy release, of as many honest clients that stay as were counted "
    "on (secure aggregation); in a simulation that is assumed."
)
GUESS = "The chance of a blind guess is the one that the server has with all that it knows beside the releases."
FLOOR = (
    "The floor is for Gaussian images alone: it is proved where the images of a class are Gaussian with the covariance "
    "of public ones, given all that the server knows beside the releases, and of the error on average over records. A "
    "server that knows a record to be one of two gets far below it; the bound on guessing holds for that one too."
)


class NoAccount(BudgetError):
    """A client has no account yet."""


SLACK = 1e-9  # of a limit: what the rounding of a sum may add


@dataclass(frozen=True)
class Account:
    """What one client's records have spent of their budget."""

    client: str
    spent: float = 0.0  # μ², of the record that was used most
    limit: float = inf
    noise: str | None = None  # of all releases: secret, or simulated as soon as one was; None: nobody said

    def __post_init__(self) -> None:
        if not (self.spent >= 0 and isfinite(self.spent) and self.limit > 0 and self.noise in (None, *NOISE)):
            raise BudgetError(
                f"The account of client {self.client} holds spent={self.spent}, limit={self.limit} and noise="
                f"{str(self.noise)[:40]}: it cannot be right, so nothing is sent."
            )

    def allows(self, cost: float) -> bool:
        """Return whether a round that costs μ² = ``cost`` fits in the budget."""
        return self.spent + cost <= self.limit * (1 + SLACK)

    def spend(self, cost: float, noise: str | None = None) -> "Account":
        """Return the account after a round with this noise; one that would overspend is refused."""
        if not (cost > 0 and isfinite(cost)):
            raise BudgetError(f"A round cannot cost μ² = {cost} of client {self.client}'s budget: nothing is sent.")
        if not self.allows(cost):
            raise BudgetError(
                f"Client {self.client} has spent μ² = {self.spent:.4g} of {self.limit:.4g}, and this round costs "
                f"{cost:.4g}: nothing is sent. Plan a run with more noise for more rounds (gradveil plan)."
            )
        known = noise is None or noise == self.noise
        if self.spent and not known:  # a promise is as good as its worst noise
            noise = SIMULATED if SIMULATED in (noise, self.noise) else None
        return replace(self, spent=self.spent + cost, noise=self.noise if known else noise)

    @property
    def mu(self) -> float:
        """The μ of Gaussian DP over all releases so far."""
        return sqrt(self.spent)

    @property
    def z_run(self) -> float:
        """The noise multiplier of a single release that costs as much."""
        return 1 / self.mu if self.spent else inf

    @property
    def rho(self) -> float:
        """The most that the releases tell of a record, in nats: μ²/2, which is also its zero-concentrated DP."""
        return self.spent / 2

    def epsilon(self, delta: float) -> float:
        """Return the ε at this δ, exact for Gaussian DP."""
        return epsilon_of(self.mu, delta)

    def guess(self, kappa: float) -> float:
        """Return the most that a server with a blind guess of chance κ can reach."""
        return rero_gaussian(kappa, self.mu)

    def floor(self, eigenvalues: Tensor | Sequence[float]) -> float:
        """Return the least squared error on a Gaussian record whose covariance has these eigenvalues."""
        return water_filling(eigenvalues, self.rho)

    def figures(self, delta: float, kappa: float) -> dict[str, Any]:
        """Return what was bought, for programs."""
        bought = {"mu": self.mu, "z_run": self.z_run, "rho": self.rho}
        return bought | {
            "epsilon": self.epsilon(delta),
            "delta": delta,
            "guess": self.guess(kappa),
            "blind_guess": kappa,
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a limit of None is none."""
        limit = self.limit if isfinite(self.limit) else None
        return {"client": self.client, "spent": self.spent, "limit": limit, "noise": self.noise}

    @classmethod
    def from_json(cls, data: Any, client: str) -> "Account":
        """Read what ``to_json`` gave; the account of another client is refused."""
        with wrap_parse_errors(f"The account of client {client}", BudgetError, NOT_SENT):
            limit = inf if data["limit"] is None else float(data["limit"])
            found = cls(str(data["client"]), float(data["spent"]), limit, data.get("noise"))
        if found.client != client:
            raise BudgetError(f"The account is of client {found.client}, not of {client}: nothing is sent.")
        return found

    def save(self, path: Path | str) -> None:
        """Write the file whole or not at all."""
        write_atomically(Path(path), (json.dumps(self.to_json()) + "\n").encode())

    @classmethod
    def read(cls, path: Path | str, client: str) -> "Account":
        """Read a client's file, and the journal beside it where there is one."""
        found, _ = _standing(Path(path), client)
        if found is None:
            raise NoAccount(f"There is no account of client {client} at {path}. {NOT_SENT}")
        return found


def _standing(path: Path, client: str) -> tuple[Account | None, Ending]:
    """Return the account as its journal has it, and where that ends; raise where the two files contradict."""
    stand, said = read_journal(path), read_summary(path)
    check_summary(path, said, stand)
    both = [Account.from_json(data, client) for data in (said, stand.line) if data is not None]
    if not both:
        return None, stand
    most, limit = max(both, key=lambda account: account.spent), min(account.limit for account in both)
    return replace(most, limit=limit), stand


def spend_from(
    path: Path, client: str, cost: float, limit: float = inf, *, noise: str | None = None, note: str = ""
) -> Account:
    """Pay for a round out of a client's file, which is begun where there is none, and return the account.

    Call it before anything is sent: when it returns, the payment is on the disk, so a client that is stopped in between
    has paid for nothing, never sent for nothing. A limit that was lowered holds from now on; one that was raised does
    not. Files that were cut off, copied, or put back one without the other are refused; see ``journal``.

    Args:
        path: the file; its journal is kept beside it.
        client: whose account it is.
        cost: μ² of the round.
        limit: of μ² over all rounds.
        noise: of the round: ``secret`` or ``simulated``; None: like that of the rounds before.
        note: what the payment is for, in the journal.
    """
    with ExitStack() as held:  # two rounds at once would pay with the same budget
        held.enter_context(wrap_os_errors(path, NOT_SENT))
        make_folder(path.parent)
        held.enter_context(locked(path.with_name(f".{path.name}.lock"), wait=True, needed=True))
        before, stand = _standing(path, client)
        account = Account(client, limit=limit) if before is None else replace(before, limit=min(before.limit, limit))
        account = account.spend(cost, noise)
        said = account.to_json()
        count, last = add_to_journal(path, stand, said | {"cost": cost, "note": note[:200]})
        write_atomically(path, (json.dumps(said | {"releases": count, "last": last}) + "\n").encode())
    return account


def account_path(name: str) -> Path:
    """Return where the account of a client lies where nobody names a file: in GRADVEIL_ACCOUNTS, or the user's home."""
    if not re.fullmatch(r"[\w-][\w.-]{0,79}", name):
        raise BudgetError(f"{name[:40]!r} cannot name an account: use letters, digits, - and _. {NOT_SENT}")
    folder = os.environ.get("GRADVEIL_ACCOUNTS")
    return (Path(folder) if folder else Path.home() / ".gradveil" / "accounts") / f"{name}.json"


def delta_of(mu: float, epsilon: float) -> float:
    """Return the δ at this ε of μ-Gaussian DP (Dong, Roth and Su 2022, corollary 2.13)."""
    if mu == 0:
        return 0.0
    first, second = float(ndtr(mu / 2 - epsilon / mu)), epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, first - exp(min(second, 0.0)))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least ε >= 0 at this δ of μ-Gaussian DP."""
    _check_delta(delta)
    if mu == 0 or delta_of(mu, 0.0) <= delta:
        return 0.0
    return _crossing(lambda epsilon: delta_of(mu, epsilon) > delta)[1]


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest μ of Gaussian DP that is within (ε, δ)."""
    _check_delta(delta)
    if not (epsilon > 0 and isfinite(epsilon)):
        raise CertificateError(f"epsilon={epsilon}: give a number above 0.")
    return _crossing(lambda mu: delta_of(mu, epsilon) <= delta)[0]


def _crossing(below: Callable[[float], bool]) -> tuple[float, float]:
    """Return where a condition that holds from 0 on ends: just before and just after."""
    low, high = 0.0, 1.0
    while below(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise CertificateError(f"delta={delta}: give a chance between 0 and 1, e.g. 1e-5.")


def water_filling(eigenvalues: Tensor | Sequence[float], rho: float) -> float:
    """Return the least squared error on a Gaussian of these eigenvalues that ρ nats leave: Σ min(θ, λ_i).

    The water level θ solves ½ Σ log⁺(λ_i/θ) = ρ (reverse water-filling).
    """
    values = torch.as_tensor(eigenvalues, dtype=torch.float64).flatten().cpu()
    if rho < 0 or not bool((values.isfinite() & (values >= 0)).all()):
        raise CertificateError(f"rho={rho}, or an eigenvalue below 0: a floor needs ρ >= 0 and a covariance.")
    values = values[values > 0].sort(descending=True).values
    if not len(values) or rho == inf:
        return 0.0
    logs = values.log()
    counts = torch.arange(1, len(values) + 1, dtype=torch.float64)
    levels = (logs.cumsum(0) - 2 * rho) / counts  # log θ where the first 1, 2, ... directions are flooded
    flooded = int((levels < logs).sum())  # holds up to the right number, and for none beyond it
    if flooded == 0:
        return float(values.sum())
    return float(levels[flooded - 1].exp()) * flooded + float(values[flooded:].sum())
