"""How often each record was used, and what that has cost the one that was used most."""

import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradveil.errors import BudgetError
from gradveil.privacy.accountant import Account

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
        """What was spent so far."""
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
