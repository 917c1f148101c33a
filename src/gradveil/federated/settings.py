"""The settings of federated averaging, declared once: training runs, audits and Flower's app extend them."""

import warnings
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Literal, TypeVar

from gradveil.federated.schedules import SCHEDULES
from gradveil.ranges import Count, Positive, Whole
from gradveil.step_rule import StepRule

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

    RENAMED: ClassVar[dict[str, str]] = {"devices": "clients", "server": "aggregator"}  # old name -> name

    rounds: Whole = 10
    clients: Count = 10  # K, that train in a round
    lr: Positive = 0.01
    schedule: str = "constant"
    trains: str = "all"  # or head, batch_norm, names of parameters (fc*): the others stay as they are

    def lr_of(self, number: int) -> float:
        """Return the learning rate of a round."""
        return SCHEDULES.build(self.schedule).lr(self.lr, number, self.rounds)


def takes_old_names(cls: type[T]) -> type[T]:
    """Let ``cls(devices=5)`` work as ``cls(clients=5)``, with a warning."""
    init: Any = cls.__init__
    renamed: dict[str, str] = cls.RENAMED  # type: ignore[attr-defined]

    @wraps(init)
    def with_old_names(self: T, *args: Any, **given: Any) -> None:
        for old in given.keys() & renamed.keys():
            warnings.warn(f"{old}= is called {renamed[old]}= now.", DeprecationWarning, stacklevel=2)
            given[renamed[old]] = given.pop(old)
        init(self, *args, **given)

    cls.__init__ = with_old_names  # type: ignore[assignment]
    return cls


@takes_old_names
@dataclass(frozen=True, kw_only=True)
class Training(Averaging):
    """All settings of federated averaging in ``simulate``.

    ``sampling``: ``without`` draws K different clients, each as likely (the experiments); ``with`` draws K times by
    p_k, the client's part of all examples, and puts it back (the theory).
    """

    sampling: Literal["without", "with"] = "without"
    weighting: Weighting = "samples"
    aggregator: str = "fedavg"
