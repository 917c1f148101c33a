"""What every client of a run has spent, who is drawn, and which rounds may not be released."""

import zlib
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from gradveil.data.partition import Indices
from gradveil.errors import BudgetError, DefenseError
from gradveil.federated.settings import Training
from gradveil.privacy.accountant import SIMULATED, Account
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.defense import Defense, accounted
from gradveil.seeds import Seeds


def sample_clients(seeds: Seeds, number: int, sizes: Sequence[int], training: Training) -> list[int]:
    """Return the devices of a round, in the order in which they are served."""
    rng = seeds("sample", number)
    if training.sampling == "with":
        return torch.multinomial(torch.tensor(sizes).double(), training.clients, True, generator=rng).tolist()
    return torch.randperm(len(sizes), generator=rng)[: training.clients].tolist()


def planned_run(
    seeds: Seeds, clients: Sequence[Indices], training: Training, defense: Defense, drawn: bool = True
) -> PlannedRun:
    """Return what this run will be: how often a client takes part at most follows from the draw of every round.

    With a budget clients take turns, so that nobody takes part more than once oftener than anybody else. ``drawn``:
    draw the rounds; without it a client may take part in each, which is enough for the defence itself.
    """
    sizes, counts = [len(part) for part in clients], Counter[int]()
    if accounted(defense).allowance is not None:
        most = -(-max(training.rounds, 1) * training.clients // len(clients))
    elif not drawn:
        most = max(training.rounds, 1)
    else:
        for number in range(1, training.rounds + 1):
            counts.update(sample_clients(seeds, number, sizes, training))
        most = max(counts.values(), default=1)
    rounds = max(training.rounds, most)  # a client that is drawn twice in a round takes part twice
    return PlannedRun(max(sizes), training.batch_size, training.epochs, rounds, most, training.clients)


class Ledger:
    """The accounts of a run's clients under a defence that promises something; under any other it is empty.

    ``noise``: of the clients, as the accounts say it. Here it is simulated; a server of real ones does not know.
    """

    def __init__(
        self, clients: Sequence[Indices], training: Training, defense: Defense, noise: str | None = SIMULATED
    ) -> None:
        acts = accounted(defense)
        self.cost, self.noise = acts.cost(training.epochs), noise  # of a participation
        self.min_clients, self.limit = acts.min_clients, acts.allowance
        self.training, self.sizes = training, [len(part) for part in clients]
        names = [f"{i}-{zlib.crc32(part.tobytes()):08x}" for i, part in enumerate(clients)]
        self.accounts = [] if self.cost is None else [Account(name, limit=self.limit or inf) for name in names]
        self._check()

    def _check(self) -> None:
        """Raise where the noise of a sum, or the count of participations, would not be what the promise needs."""
        if self.training.sampling == "with" and (self.min_clients or self.limit is not None):
            raise DefenseError(
                "A budget and tier=aggregate need clients that are drawn once a round: sampling=without."
            )
        if not self.min_clients:
            return
        if self.min_clients > self.training.clients:
            raise DefenseError(
                f"tier=aggregate counts on {self.min_clients} clients a round, and {self.training.clients} take part. Give "  # noqa: E501
                "the cohort that there is."
            )
        if self.training.adaptive or self.training.clip:
            raise DefenseError(
                "tier=aggregate needs the sum of the noisy gradients, and an adaptive optimizer or a clip of the step "
                "changes each client's by itself. Use optimizer=sgd and clip=0."
            )
        if self.training.weighting == "uniform" and len(set(self.sizes)) > 1:
            raise DefenseError(
                "tier=aggregate needs every record to count alike in the sum, and with clients of different sizes "
                "weighting=uniform lets those of small clients count more. Use weighting=samples."
            )

    def restore(self, saved: Any) -> None:
        """Go on from the accounts of a checkpoint, which must be those of these clients."""
        if self.cost is None and saved:
            raise BudgetError(
                "The checkpoint has accounts, and this defence promises nothing. Go on with the one it had."
            )
        if self.cost is None:
            return
        if not isinstance(saved, list) or len(saved) != len(self.accounts):
            raise BudgetError(
                f"The checkpoint has no accounts of these {len(self.accounts)} clients: its rounds were not protected, "
                "or it is of other clients. Start a new run."
            )
        read = [Account.from_json(data, own.client) for data, own in zip(saved, self.accounts, strict=True)]
        self.accounts = [Account(own.client, own.spent, self.limit or inf, own.noise) for own in read]

    def draw(self, seeds: Seeds, number: int) -> list[int]:
        """Return the clients of a round: with a budget those who have spent least, in a random order among equals.

        Where too few can pay there are none.
        """
        if self.cost is None or self.limit is None:
            return sample_clients(seeds, number, self.sizes, self.training)
        order = torch.randperm(len(self.sizes), generator=seeds("sample", number)).tolist()
        chosen = self.able(order)[: self.training.clients]
        return chosen if len(chosen) >= self.min_clients else []

    def able(self, clients: Sequence[int]) -> list[int]:
        """Return those who can pay for a round, first those who have spent least; without a budget all as they are."""
        if self.cost is None or self.limit is None:
            return list(clients)
        left = [client for client in clients if self.accounts[client].allows(self.cost)]
        return sorted(left, key=lambda client: self.accounts[client].spent)

    def pay(self, number: int, clients: Sequence[int]) -> None:
        """Charge those who were drawn, before they send: what is lost on the way may have been seen."""
        if self.cost is None:
            return
        if not clients:
            most, able = max(account.spent for account in self.accounts), len(self.able(range(len(self.sizes))))
            raise BudgetError(
                f"Round {number} is refused: a participation costs μ² = {self.cost:.4g}, and {able} of "
                f"{len(self.sizes)} clients have that left (spent: {most:.4g} of {self.limit:.4g}). Plan all rounds "
                "from the start, with the noise that they need."
            )
        for client in clients:
            self.accounts[client] = self.accounts[client].spend(self.cost, self.noise)
