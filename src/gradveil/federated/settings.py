"""Settings of federated averaging, declared once; learning-rate schedules; which parameters are trained."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import ModelError
from gradveil.modules import find_layer
from gradveil.ranges import Count, Positive, Range, Whole
from gradveil.registry import Registry
from gradveil.step_rule import StepRule
from gradveil.tree import named, parameters

SCHEDULES: Registry["Schedule"] = Registry("schedule", "federated")


class Schedule(ABC):
    """Settings are the dataclass fields; the call gets the base rate and the round."""

    spec_name: ClassVar[str]

    @abstractmethod
    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return the learning rate of a round; rounds are numbered from 1."""


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The base rate in every round."""

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return the base rate."""
        return base


@SCHEDULES.register("inverse")
@dataclass(frozen=True)
class Inverse(Schedule):
    """2 / (mu (gamma + t)), t the number of local steps before the round (Li et al. 2020; Sun et al. 2020).

    The base rate is not used. In the theory t grows with every local step; here it grows from round to round.
    """

    mu: Annotated[float, Range(1e-9)] = 1.0
    gamma: Annotated[float, Range(1e-9)] = 8.0
    steps: Count = 1  # local steps per round

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return 2 / (mu (gamma + steps * rounds before))."""
        return 2.0 / (self.mu * (self.gamma + self.steps * (round_number - 1)))


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(Schedule):
    """The base rate times ``factor`` for every round before."""

    factor: Annotated[float, Range(0, 2)] = 0.99

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return base * factor ** (rounds before)."""
        return float(base * self.factor ** (round_number - 1))


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(Schedule):
    """From the base rate down to almost zero along half a cosine (Loshchilov and Hutter 2017)."""

    def lr(self, base: float, round_number: int, rounds: int) -> float:
        """Return base * (1 + cos(pi * rounds before / rounds)) / 2."""
        return base * 0.5 * (1 + math.cos(math.pi * (round_number - 1) / max(rounds, 1)))


Weighting = Literal["samples", "paper", "uniform"]
T = TypeVar("T")


@dataclass(frozen=True)
class Local(StepRule):
    """How a client trains between receiving the weights and sending its update."""

    epochs: Count = 1  # E
    batch_size: Count | None = 32  # B; None: all of a client's examples at once
    loss: str = "cross_entropy"  # or bce, mse, module:function

    def steps(self, num_examples: int) -> int:
        """Return how many local steps a client with so many examples takes."""
        return self.epochs * -(-num_examples // min(self.batch_size or num_examples, num_examples))


@dataclass(frozen=True, kw_only=True)
class Averaging(Local):
    """Rounds in which some clients train and their updates are averaged; the defaults are those of Sun et al. 2020."""

    rounds: Whole = 10
    clients: Count = 10  # K, that train in a round
    lr: Positive = 0.01
    schedule: str = "constant"
    trains: str = "all"  # or head, batch_norm, names of parameters (fc*): the others stay as they are

    def lr_of(self, number: int) -> float:
        """Return the learning rate of a round."""
        return SCHEDULES.build(self.schedule).lr(self.lr, number, self.rounds)


@dataclass(frozen=True, kw_only=True)
class Training(Averaging):
    """All settings of federated averaging in ``simulate``.

    ``sampling``: ``without`` draws K different clients, each as likely (the experiments); ``with`` draws K times by
    p_k, the client's part of all examples, and puts it back (the theory).
    """

    sampling: Literal["without", "with"] = "without"
    weighting: Weighting = "samples"
    aggregator: str = "fedavg"


ALL, HEAD, NORMS = "all", "head", "batch_norm"


def only_trained(model: nn.Module, trains: str) -> nn.Module:
    """Freeze all of a model but ``trains``: all, head (the last linear layer), batch_norm, or names (``fc*,conv1.*``).

    What was frozen before stays so. The model itself is changed, and returned.
    """
    if trains == ALL:
        return model
    known = parameters(model)
    if trains == HEAD:
        patterns = [named(find_layer(model), "*")]
    elif trains == NORMS:
        patterns = [named(path, "*") for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    else:
        patterns = [part.strip() for part in trains.split(",")]
    kept = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not kept:
        raise ModelError(
            f"trains={trains} leaves nothing of {type(model).__name__} to train. Give all, head, batch_norm or names "
            f"of parameters (fc*). It has: {', '.join(known)}."
        )
    for name, p in model.named_parameters():
        p.requires_grad_(name in kept)
    return model


def said_of_trained(model: nn.Module) -> str:
    """Return a part of a sentence on what is trained and so in an update; nothing where it is the whole model."""
    trained, every = list(parameters(model)), dict(model.named_parameters())
    if len(trained) == len(every):
        return ""
    part, whole = (sum(every[name].numel() for name in names) for names in (trained, every))
    shown = ", ".join(trained[:6]) + (f" and {len(trained) - 6} more" if len(trained) > 6 else "")
    return f"; only {part:,} of {whole:,} numbers are trained and in the update: {shown}"
