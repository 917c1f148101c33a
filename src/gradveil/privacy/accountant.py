"""What a client's releases cost its records over a whole run: the account, its files, and who pays for a step.

The mechanism (clip each record's gradient in public coordinates, add Gaussian noise of multiplier z to the sum) is
μ-Gaussian-DP for zeroing one record slot, with μ² = E / z² in a round of E local epochs. The squares add up over
rounds, whatever weights the server sends in between, so an account holds one number: the μ² that was spent.

An account is two files. ``account.json`` says in one line how things stand, and is put in place whole. Beside it
``account.json.journal`` is only ever added to, on the disk before anything is sent: every line holds the running total
and the SHA-256 of the line before. The journal is what counts. Where it is ahead, a writer was killed in between or an
older ``account.json`` was put back, and its total holds; where it is behind, missing, of another account or a copy,
nothing is paid. Both files put back as they were together cannot be told from the truth.
"""

import hashlib
import json
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from gradveil.errors import BudgetError
from gradveil.files import locked, make_folder, open_alone, sync, wrap_os_errors, wrap_parse_errors, write_atomically
from gradveil.privacy.bounds import epsilon_of, rero_gaussian, water_filling

SUFFIX, MOST = ".journal", 2**16  # bytes of an account, and of the journal's end that is looked at
NOT_SENT = "Nothing is sent."
MOVED = (
    'An account that was moved for good begins anew from one line, {"client": ..., "spent": ..., "limit": ...}, with '
    "what was spent, and without a journal."
)


@dataclass(frozen=True)
class Ending:
    """Where a journal ends."""

    line: dict[str, Any] | None  # the last payment
    mark: str  # its SHA-256
    whole: int  # bytes up to its end; what comes after was cut off by a kill and never paid for anything

    @property
    def count(self) -> int:
        return 0 if self.line is None else int(self.line["release"])


def journal_of(path: Path) -> Path:
    """Return the journal of an account's file."""
    return path.with_name(path.name + SUFFIX)


def _end_of(path: Path) -> tuple[bytes, os.stat_result] | None:
    """Return a file's last bytes, and what it is; None where there is none. Links and what is no file are refused."""
    try:
        handle = open_alone(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(handle)
        return os.pread(handle, MOST, max(0, found.st_size - MOST)), found
    finally:
        os.close(handle)


def read_journal(path: Path) -> Ending:
    """Return where the journal beside an account's file ends; a copy of another one is refused."""
    beside = journal_of(path)
    with wrap_parse_errors(beside, BudgetError, NOT_SENT):
        if (read := _end_of(beside)) is None:
            return Ending(None, "", 0)
        end, found = read
        begin, whole = max(0, found.st_size - MOST), end.rfind(b"\n") + 1
        if not whole:
            if begin:
                raise ValueError("no line in its last bytes")
            return Ending(None, "", 0)
        last = end[:whole].splitlines(keepends=True)[-1]
        line = json.loads(last)
        if line["file"] != found.st_ino:
            raise BudgetError(
                f"{beside} is a copy of the journal that it was begun as, or was put back: two that spend from the "
                f"same account, or one that forgets, would promise what does not hold. {NOT_SENT} {MOVED}"
            )
        int(line["release"])
    return Ending(line, hashlib.sha256(last).hexdigest(), begin + whole)


def add_to_journal(path: Path, stand: Ending, payment: dict[str, Any]) -> tuple[int, str]:
    """Add a payment after the last one, for good, and return its number and its mark."""
    beside = journal_of(path)
    handle = open_alone(beside, os.O_RDWR | os.O_CREAT)
    try:
        found = os.fstat(handle)
        number = stand.count + 1
        line = {"release": number, **payment, "file": found.st_ino, "before": stand.mark, "once": secrets.token_hex(8)}
        content = (json.dumps(line) + "\n").encode()
        os.ftruncate(handle, stand.whole)
        if os.pwrite(handle, content, stand.whole) != len(content):
            raise BudgetError(f"{beside} could not be written to its end. {NOT_SENT}")
        os.fsync(handle)
    finally:
        os.close(handle)
    if not stand.whole:
        sync(beside.parent)
    return number, hashlib.sha256(content).hexdigest()


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return what an account's file says; None where there is none."""
    with wrap_parse_errors(path, BudgetError, NOT_SENT):
        if (read := _end_of(path)) is None:
            return None
        if (size := read[1].st_size) > MOST:
            raise ValueError(f"{size:,} bytes, and the most is {MOST:,}")
        said = json.loads(read[0])
        if not isinstance(said, dict):
            raise ValueError("no account")
    return said


def check_summary(path: Path, said: dict[str, Any] | None, stand: Ending) -> None:
    """Raise where the journal is behind the account's file, or of another account."""
    with wrap_parse_errors(path, BudgetError, NOT_SENT):
        count, mark = (0, "") if said is None else (int(said.get("releases", 0)), said.get("last", ""))
    if count > stand.count:
        raise BudgetError(
            f"{path} counts {count} payments and its journal {stand.count}: the journal was cut off, put back or "
            f"removed. {NOT_SENT} Put the right one back. {MOVED}"
        )
    if count and count == stand.count and mark != stand.mark:
        raise BudgetError(f"{path} and its journal are of two accounts. {NOT_SENT} Put the right ones back.")


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
        write_atomically(Path(path), (json.dumps(self.to_json()) + "\n").encode())

    @classmethod
    def read(cls, path: Path | str, client: str) -> "Account":
        """Read a client's file, and the journal beside it where there is one."""
        found, _ = _read_both(Path(path), client)
        if found is None:
            raise NoAccount(f"There is no account of client {client} at {path}. {NOT_SENT}")
        return found


def _read_both(path: Path, client: str) -> tuple[Account | None, Ending]:
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
        before, stand = _read_both(path, client)
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


# Records by number, and in how many slots each of them is; or in how many any of them may be, unknown which; 0: there
# are no numbers at all.
Used = Mapping[Hashable, int] | int


@dataclass
class InStep:
    """In how many slots of the step under way each record is."""

    own: Counter[Hashable] = field(default_factory=Counter)
    all: int = 0  # beside those, as far as is known, any record


class Spending:
    """What the releases cost each record: m slots in one step, m² uses; paid before the release of it.

    Where it is not known of which records a pass is, it may be any: all of them pay. Without numbers of records at all
    a record is taken to be once in a step.
    """

    def __init__(self, cost: float | None, account: Account | None) -> None:
        self.cost = cost  # of a use
        self._purse = [Account("this client") if account is None else account]
        self._own: Counter[Hashable] = Counter()  # uses of each record, beside those that all paid
        self._most = 0  # of these
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> "Spending":
        return self  # a copy of a model trains on the same records

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def account(self) -> Account:
        return self._purse[0]

    def pay(self, used: Used, step: InStep, begins: bool) -> None:
        """Some records come into a step; raise ``BudgetError`` where one of them cannot pay for that."""
        with self._lock:
            if isinstance(used, int):
                if begins or used:  # else another part of a step, of other records
                    self._pay_all(max(used, 1), step)
                return
            both = {i: (step.own[i] + step.all, step.own[i] + step.all + n) for i, n in used.items()}
            self._take({i: after**2 - before**2 for i, (before, after) in both.items()}, 0)
            step.own.update(used)

    def _pay_all(self, slots: int, step: InStep) -> None:
        """Each record pays as if the slots were its own, beside those that it has in this step."""
        self._take({i: 2 * n * slots for i, n in step.own.items()}, (step.all + slots) ** 2 - step.all**2)
        step.all += slots

    def _take(self, own: Mapping[Hashable, int], everybody: int) -> None:
        most = max([self._most, *(self._own[i] + n for i, n in own.items())])
        self._spend(everybody + most - self._most)
        self._most = most
        self._own.update(own)

    def _spend(self, uses: int) -> None:
        if self.cost is None or not uses:
            return
        try:
            self._purse[0] = self.account.spend(self.cost * uses)
        except BudgetError as error:
            hint = "" if self._own else " Every step counts for all records: gradveil.counted(loader) tells which."
            raise BudgetError(f"{error}{hint}") from None
