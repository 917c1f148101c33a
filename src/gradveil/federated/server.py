"""The server's part of a run: draw clients and charge them, average updates, move the weights, keep a checkpoint."""

import json
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradveil.data.partition import Indices
from gradveil.errors import BudgetError, DataError, DefenseError
from gradveil.federated.client import Sent
from gradveil.federated.settings import Training, Weighting
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.privacy.accountant import SIMULATED, Account
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.defense import Defense, accounted
from gradveil.ranges import MOST, Decay, Positive, Weight
from gradveil.registry import Registry
from gradveil.seeds import Seeds
from gradveil.tree import Params, add, map_values, parameters, scale, subtract
from gradveil.types import Update

SERVERS: Registry["Server"] = Registry("aggregator", "federated")

Memory = dict[str, Params]  # what a server optimiser keeps between rounds


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


@dataclass(frozen=True)
class Merged:
    """What a round's updates come to."""

    target: Params  # the average of the accepted clients' weights; empty where none was accepted
    buffers: Params
    accepted: int
    rejected: dict[str, int]  # how many were turned away, by reason: malformed, not finite


Arrival = tuple[int, Sent]  # a client, and what it sent


def merge(model: nn.Module, arrivals: Sequence[Arrival], weighting: Weighting, sizes: Sequence[int]) -> Merged:
    """Turn away the updates that cannot be averaged, and average the others.

    ``sizes`` holds the number of examples of every device. The average is begun before a device has answered whether
    all numbers are finite; where they are not, it is thrown away and done again without those.
    """
    own, buffers = parameters(model), dict(model.named_buffers())
    sound = [arrival for arrival in arrivals if _fits(arrival[1], own, buffers)]
    rejected = {"malformed": len(arrivals) - len(sound)} if len(sound) < len(arrivals) else {}
    if not sound:
        return Merged({}, {}, 0, rejected)
    finite = _finite([sent for _, sent in sound])
    merged = _averages(own, sound, weighting, sizes)
    good = finite.tolist()
    if not all(good):
        rejected["not finite"] = good.count(False)
        sound = [arrival for arrival, whole in zip(sound, good, strict=True) if whole]
        merged = _averages(own, sound, weighting, sizes) if sound else ({}, {})
    return Merged(*merged, len(sound), rejected)


def _fits(sent: Sent, own: Params, buffers: Params) -> bool:
    """Whether an update has the model's names, shapes and kinds of numbers; a defence may have changed them."""
    update = sent.update
    if update.gradient.keys() != own.keys() or not sent.buffers.keys() <= buffers.keys() or update.num_examples < 1:
        return False
    pairs = [(v, own[name]) for name, v in update.gradient.items()] + [(v, buffers[n]) for n, v in sent.buffers.items()]
    return all(v.shape == o.shape and v.is_floating_point() for v, o in pairs)


def _finite(sent: Sequence[Sent]) -> Tensor:
    """Return whether each update holds finite numbers only: (K,), not waited for."""
    tensors = [[*one.update.gradient.values(), *one.buffers.values()] for one in sent]
    largest = torch.stack(torch._foreach_norm([v for values in tensors for v in values], float("inf")))
    return largest.isfinite().reshape(len(tensors), -1).all(1)


def _averages(
    weights: Params, arrivals: Sequence[Arrival], weighting: Weighting, sizes: Sequence[int]
) -> tuple[Params, Params]:
    """Return the averages of weights and of buffers (batch-norm statistics)."""
    parts, sent = shares(arrivals, weighting, sizes), [sent for _, sent in arrivals]
    buffers = _combine([one.buffers for one in sent], [part / sum(parts) for part in parts])
    return average(weights, [one.update for one in sent], parts), buffers


def shares(arrivals: Sequence[Arrival], weighting: Weighting, sizes: Sequence[int]) -> list[float]:
    """Return how much each accepted update counts.

    ``samples``: by its number of examples, adding up to 1 (McMahan et al. 2017). ``uniform``: all the same.
    ``paper``: N p_k / K with p_k the client's part of all N devices' examples (Sun et al. 2020), which adds up to 1
    on average over the draw of clients, and in each round only where all clients are equally large.
    """
    count = len(arrivals)
    if weighting == "uniform":
        return [1 / count] * count
    if weighting == "paper":
        return [len(sizes) / count * sizes[client] / sum(sizes) for client, _ in arrivals]
    examples = [sent.update.num_examples for _, sent in arrivals]
    return [n / sum(examples) for n in examples]


def average(weights: Params, updates: Sequence[Update], parts: Sequence[float]) -> Params:
    """Return the sum of part_k W^k, where W^k = W - lr g_k is what client k ended with."""
    moves = _combine([u.gradient for u in updates], [part * u.lr for part, u in zip(parts, updates, strict=True)])
    return subtract(scale(weights, sum(parts)), moves)


def _combine(trees: Sequence[Params], factors: Sequence[float]) -> Params:
    """Return the sum of factor_k tree_k, a tensor at a time."""
    weights: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    result = {}
    for name, first in trees[0].items():
        kind = (first.dtype, first.device)
        if kind not in weights:
            weights[kind] = first.new_tensor(factors)
        result[name] = torch.tensordot(weights[kind], torch.stack([tree[name] for tree in trees]), 1)
    return result


class Server(ABC):
    """How the global weights move towards the clients' average. Settings are the dataclass fields."""

    spec_name: ClassVar[str]

    @abstractmethod
    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return the new weights and what to remember; ``memory`` is empty in the first round."""


@SERVERS.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Server):
    """Take the average as it is (McMahan et al. 2017)."""

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return the average."""
        return target, {}


@SERVERS.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Server):
    """Momentum on the server (Hsu et al. 2019); without momentum, ``lr`` below 1 goes only part of the way."""

    lr: Weight = 1.0
    momentum: Decay = 0.9

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return W + lr v with v = momentum v + (target - W)."""
        step = subtract(target, weights)
        v = add(step, memory["v"], self.momentum) if memory else step
        return add(weights, v, self.lr), {"v": v}


@SERVERS.register("fedadam")
@dataclass(frozen=True)
class FedAdam(Server):
    """Adam on the server, without bias correction (Reddi et al. 2021, algorithm 2)."""

    lr: Weight = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Positive = 1e-3

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return W + lr m / (sqrt(v) + tau) with the running means m of the step and v of its square."""
        step = subtract(target, weights)
        old_m = memory["m"] if memory else map_values(torch.zeros_like, step)
        old_v = memory["v"] if memory else map_values(lambda s: torch.full_like(s, self.tau**2), step)
        m = add(scale(old_m, self.beta1), step, 1 - self.beta1)
        v = add(scale(old_v, self.beta2), map_values(torch.square, step), 1 - self.beta2)
        moved = {name: w + self.lr * m[name] / (v[name].sqrt() + self.tau) for name, w in weights.items()}
        return moved, {"m": m, "v": v}


@dataclass(frozen=True)
class Checkpoint:
    """All that the next round depends on; its randomness comes from the seed and the round's number."""

    round: int  # the last one that was finished
    state: Params  # the model's state dict
    memory: Memory  # the server optimiser's
    notes: dict[str, Any]  # anything else worth keeping, as JSON

    def save(self, path: Path) -> None:
        """Write the file; an interrupted write leaves the old one whole."""
        from safetensors.torch import save

        tensors = {f"model/{name}": value.detach().cpu().contiguous() for name, value in self.state.items()}
        for kind, tree in self.memory.items():
            tensors |= {f"server/{kind}/{name}": value.detach().cpu().contiguous() for name, value in tree.items()}
        write_atomically(path, save(tensors, {"round": str(self.round), "notes": json.dumps(self.notes)}))

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read a file that ``save`` wrote."""
        state: Params = {}
        memory: Memory = {}
        with wrap_parse_errors(path, DataError, "It is not a checkpoint of gradveil. Start again without --resume."):
            tensors, about = read_safetensors(path)
            for key, value in tensors.items():
                kind, _, name = key.partition("/")
                if kind == "model":
                    state[name] = value
                else:
                    which, _, name = name.partition("/")
                    memory.setdefault(which, {})[name] = value
            found = cls(int(about["round"]), state, memory, json.loads(about["notes"]))
            if not 0 <= found.round <= MOST or not isinstance(found.notes, dict):
                raise ValueError(f"round {about['round']}, notes {about['notes'][:50]}")
        return found

    def restore(self, model: nn.Module) -> None:
        """Load the weights into a model of the same kind."""
        try:
            model.load_state_dict(self.state)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise DataError(f"The checkpoint of round {self.round} belongs to another model ({reason}).") from error
