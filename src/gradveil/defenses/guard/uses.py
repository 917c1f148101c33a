"""How often each record was used, and what that has cost the one that was used most."""

import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradveil.certificates.accountant import Account
from gradveil.errors import BudgetError

Used = Mapping[Hashable, int]  # records by number, and in how many slots each of them is


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
        self._all = 0  # uses that every record paid
        self._own: Counter[Hashable] = Counter()  # beside those
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
        """What was spent so far."""
        return self._purse[0]

    @property
    def numbered(self) -> bool:
        """Whether the records of any pass were known."""
        return bool(self._own)

    def pay(self, used: Used | None, step: InStep, begins: bool) -> None:
        """Some records come into a step; raise ``BudgetError`` where one of them cannot pay for that."""
        with self._lock:
            if used is None:
                self._pay_all(step, begins)
                return
            both = {i: (step.own[i] + step.all, step.own[i] + step.all + n) for i, n in used.items()}
            own = {i: self._own[i] + after**2 - before**2 for i, (before, after) in both.items()}
            most = max(self._most, *own.values())
            self._spend(most - self._most)
            self._most = most
            self._own.update({i: n - self._own[i] for i, n in own.items()})
            step.own.update(used)

    def _pay_all(self, step: InStep, begins: bool) -> None:
        if not begins and not self.numbered:
            return  # without numbers: another part of a step, other records
        own = {i: self._own[i] + 2 * n for i, n in step.own.items()}
        most = max(self._most, *own.values()) if own else self._most
        once = (step.all + 1) ** 2 - step.all**2
        self._spend(once + most - self._most)
        self._all += once
        self._most = most
        self._own.update({i: n - self._own[i] for i, n in own.items()})
        step.all += 1

    def _spend(self, uses: int) -> None:
        if self.cost is None or not uses:
            return
        try:
            self._purse[0] = self.account.spend(self.cost * uses)
        except BudgetError as error:
            hint = "" if self.numbered else " Every step counts for all records: gradveil.counted(loader) tells which."
            raise BudgetError(f"{error}{hint}") from None
