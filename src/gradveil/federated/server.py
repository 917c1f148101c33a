"""The server's part of a round: turn away bad updates, average the rest, move the global weights."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from gradveil.errors import UpdateError
from gradveil.federated.client import Sent
from gradveil.registry import Registry
from gradveil.tree import Params, add, map_values, parameters, scale, subtract
from gradveil.types import check_update

SERVERS: Registry["Server"] = Registry("server", "gradveil.federated")

Weighting = Literal["samples", "paper", "uniform"]
Memory = dict[str, Params]  # what a server optimiser keeps between rounds


@dataclass(frozen=True)
class Arrival:
    """What reached the server from one client of the round, or did not."""

    client: int
    sent: Sent | None  # None: the client dropped out
    late: bool = False


def screen(arrivals: Sequence[Arrival], model: nn.Module) -> tuple[list[Arrival], dict[str, int]]:
    """Return the arrivals that may be averaged, and how many were turned away for which reason."""
    accepted: list[Arrival] = []
    reasons: Counter[str] = Counter()
    for arrival in arrivals:
        reason = fault(arrival, model)
        if reason is None:
            accepted.append(arrival)
        else:
            reasons[reason] += 1
    return accepted, dict(reasons)


def fault(arrival: Arrival, model: nn.Module) -> str | None:
    """Return why an arrival cannot be averaged: dropped, late, not finite, malformed; ``None``: it can."""
    if arrival.sent is None:
        return "dropped"
    if arrival.late:
        return "late"
    gradient = arrival.sent.update.gradient
    try:
        check_update(arrival.sent.update, model)
    except UpdateError as error:
        return "not finite" if "infinite" in str(error) else "malformed"
    known = parameters(model)
    if gradient.keys() != known.keys() or arrival.sent.update.num_examples < 1:
        return "malformed"
    own = dict(model.named_buffers())
    if any(name not in own or value.shape != own[name].shape for name, value in arrival.sent.buffers.items()):
        return "malformed"
    if not all(bool(torch.isfinite(value).all()) for value in arrival.sent.buffers.values()):
        return "not finite"
    return None


def shares(arrivals: Sequence[Arrival], weighting: Weighting, sizes: Sequence[int]) -> list[float]:
    """Return how much each accepted arrival counts.

    ``samples``: by its number of examples, adding up to 1 (McMahan et al. 2017). ``uniform``: all the same.
    ``paper``: N p_k / K with p_k the client's part of all N devices' examples (Sun et al. 2020), which adds up to 1
    on average over the draw of clients, and in each round only where all clients are equally large.
    """
    count = len(arrivals)
    if weighting == "uniform":
        return [1 / count] * count
    if weighting == "paper":
        return [len(sizes) / count * sizes[a.client] / sum(sizes) for a in arrivals]
    examples = [a.sent.update.num_examples for a in arrivals if a.sent]
    return [n / sum(examples) for n in examples]


def average(weights: Params, arrivals: Sequence[Arrival], parts: Sequence[float]) -> Params:
    """Return the sum of part_k W^k, where W^k = W - lr g_k is what client k ended with."""
    result = scale(weights, sum(parts))
    for arrival, part in zip(arrivals, parts, strict=True):
        if arrival.sent:
            result = add(result, arrival.sent.update.gradient, -part * arrival.sent.update.lr)
    return result


def average_buffers(arrivals: Sequence[Arrival], parts: Sequence[float]) -> Params:
    """Return the mean of the clients' buffers (batch-norm statistics)."""
    found = [a.sent.buffers for a in arrivals if a.sent]
    total = sum(parts)
    return {
        name: torch.stack([b[name] * (part / total) for b, part in zip(found, parts, strict=True)]).sum(0)
        for name in found[0]
    }


class Server(ABC):
    """How the global weights move towards the clients' average. Settings are the dataclass fields."""

    spec_name: ClassVar[str]

    @abstractmethod
    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return the new weights and what to remember; ``memory`` is empty in the first round."""


@SERVERS.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Server):
    """Take the average as it is; ``lr`` below 1 goes only part of the way (McMahan et al. 2017)."""

    lr: float = 1.0

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return W + lr (target - W)."""
        if self.lr == 1.0:
            return target, {}
        return add(weights, subtract(target, weights), self.lr), {}


@SERVERS.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Server):
    """Momentum on the server (Hsu et al. 2019)."""

    lr: float = 1.0
    momentum: float = 0.9

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return W + lr v with v = momentum v + (target - W)."""
        step = subtract(target, weights)
        v = add(step, memory["v"], self.momentum) if memory else step
        return add(weights, v, self.lr), {"v": v}


@SERVERS.register("fedadam")
@dataclass(frozen=True)
class FedAdam(Server):
    """Adam on the server, without bias correction (Reddi et al. 2021, algorithm 2)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return W + lr m / (sqrt(v) + tau) with the running means m of the step and v of its square."""
        step = subtract(target, weights)
        old_m = memory["m"] if memory else map_values(torch.zeros_like, step)
        old_v = memory["v"] if memory else map_values(lambda s: torch.full_like(s, self.tau**2), step)
        m = add(scale(old_m, self.beta1), step, 1 - self.beta1)
        v = add(scale(old_v, self.beta2), map_values(torch.square, step), 1 - self.beta2)
        moved = {name: w + self.lr * m[name] / (v[name].sqrt() + self.tau) for name, w in weights.items()}
        return moved, {"m": m, "v": v}
