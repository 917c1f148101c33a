"""The server's part of a round: turn away bad updates, average the rest, move the global weights, keep a checkpoint."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import DataError, SpecError
from gradveil.federated.client import Sent
from gradveil.federated.settings import Weighting
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.ranges import MOST, Decay, Positive, Weight, read
from gradveil.registry import Registry, parse
from gradveil.tree import Params, add, map_values, parameters, scale, subtract

SERVERS: Registry["Server"] = Registry("aggregator", "federated")

Memory = dict[str, Params]  # what a server optimiser keeps between rounds


@dataclass(frozen=True)
class Arrival:
    """What reached the server from one client of the round, or did not."""

    client: int
    sent: Sent | None  # None: the client dropped out
    late: bool = False


@dataclass(frozen=True)
class Merged:
    """What a round's arrivals come to."""

    target: Params  # the average of the accepted clients' weights; empty where none was accepted
    buffers: Params
    accepted: int
    rejected: dict[str, int]  # how many were turned away, by reason: dropped, late, malformed, not finite


def merge(model: nn.Module, arrivals: Sequence[Arrival], weighting: Weighting, sizes: Sequence[int]) -> Merged:
    """Turn away the arrivals that cannot be averaged, and average the others.

    ``sizes`` holds the number of examples of every device. The average is begun before a device has answered whether
    all numbers are finite; where they are not, it is thrown away and done again without those.
    """
    own, buffers = parameters(model), dict(model.named_buffers())
    reasons = [_fault(arrival, own, buffers) for arrival in arrivals]
    sound = [a for a, reason in zip(arrivals, reasons, strict=True) if reason is None]
    rejected = Counter(reason for reason in reasons if reason)
    if not sound:
        return Merged({}, {}, 0, dict(rejected))
    finite = _finite(sound)
    merged = _averages(own, sound, shares(sound, weighting, sizes))
    good = finite.tolist()
    if not all(good):
        rejected["not finite"] = good.count(False)
        sound = [a for a, whole in zip(sound, good, strict=True) if whole]
        merged = _averages(own, sound, shares(sound, weighting, sizes)) if sound else ({}, {})
    return Merged(*merged, len(sound), dict(rejected))


def _averages(weights: Params, arrivals: Sequence[Arrival], parts: Sequence[float]) -> tuple[Params, Params]:
    return average(weights, arrivals, parts), average_buffers(arrivals, parts)


def _fault(arrival: Arrival, own: Params, buffers: Params) -> str | None:
    if arrival.sent is None:
        return "dropped"
    if arrival.late:
        return "late"
    update = arrival.sent.update
    if update.gradient.keys() != own.keys() or update.num_examples < 1:
        return "malformed"
    pairs = [(value, own[name]) for name, value in update.gradient.items()]
    for name, value in arrival.sent.buffers.items():
        if name not in buffers:
            return "malformed"
        pairs.append((value, buffers[name]))
    return None if all(v.shape == o.shape and v.is_floating_point() for v, o in pairs) else "malformed"


def _finite(arrivals: Sequence[Arrival]) -> Tensor:
    """Return whether each arrival holds finite numbers only: (K,), not waited for."""
    tensors = [[*a.sent.update.gradient.values(), *a.sent.buffers.values()] for a in arrivals if a.sent]
    largest = torch.stack(torch._foreach_norm([v for values in tensors for v in values], float("inf")))
    return largest.isfinite().reshape(len(tensors), -1).all(1)


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
    updates = [a.sent.update for a in arrivals if a.sent]
    moves = _combine([u.gradient for u in updates], [part * u.lr for part, u in zip(parts, updates, strict=True)])
    return subtract(scale(weights, sum(parts)), moves)


def average_buffers(arrivals: Sequence[Arrival], parts: Sequence[float]) -> Params:
    """Return the mean of the clients' buffers (batch-norm statistics)."""
    return _combine([a.sent.buffers for a in arrivals if a.sent], [part / sum(parts) for part in parts])


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
    """Take the average as it is; ``lr`` below 1 goes only part of the way (McMahan et al. 2017)."""

    lr: Weight = 1.0

    def move(self, weights: Params, target: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return W + lr (target - W)."""
        if self.lr == 1.0:
            return target, {}
        return add(weights, subtract(target, weights), self.lr), {}


@SERVERS.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Server):
    """Momentum on the server (Hsu et al. 2019)."""

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
        return cls(**{key: read(value, float, f"faults:{key}") for key, value in given.items()})

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
