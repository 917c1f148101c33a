"""A step's gradient out of the gradients of its records, in a training loop that knows nothing of them."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isclose
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradveil.certificates.accountant import Account
from gradveil.defenses.base import Defense
from gradveil.defenses.guard.loss_graph import leads_to, leaves_of, share_of
from gradveil.defenses.guard.passes import Report, lifted
from gradveil.defenses.guard.trace import Bits
from gradveil.errors import DefenseError
from gradveil.gradients.in_training import Ran, TrainedLayers
from gradveil.layers.modules import tensors_in
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Batch


class Spending:
    """What the releases cost a record: once in each epoch, paid before the first release of it."""

    def __init__(self, cost: float | None, account: Account | None, records: int | None) -> None:
        self.cost, self.records = cost, records  # cost of an epoch; records of the client
        self._purse = [Account("this client") if account is None else account]  # one for all copies of a guard
        self._seen = 0  # records of the epoch under way

    def __deepcopy__(self, memo: Any) -> "Spending":
        other = copy.copy(self)
        other.begin_round()
        return other  # a copy of a model trains on the same records, in epochs of its own

    @property
    def account(self) -> Account:
        """What was spent so far."""
        return self._purse[0]

    def begin_round(self) -> None:
        """What comes next is another epoch, whether the last one ran to its end or not."""
        self._seen = 0

    def pay(self, count: int) -> None:
        """A release begins with some records; raise ``BudgetError`` where they begin an epoch that is one too many.

        Where it is not known how many records there are, any of them may be in any step.
        """
        if not self._seen or self.records is None or self._seen + count > self.records:
            if self.cost is not None:
                self._purse[0] = self.account.spend(self.cost)
            self._seen = 0
        self._seen += count

    def add(self, count: int) -> None:
        """More records come into the same release."""
        self._seen += count
        if self.records is not None and self._seen > self.records:
            raise DefenseError(
                f"One optimizer step would hold records of two epochs, and a record might be in it twice: "
                f"{self._seen} of {self.records} records. Take a step at the end of each epoch."
            )


@dataclass
class RecordPass:
    """A training pass, until its loss is differentiated."""

    count: int
    ran: dict[str, Ran] = field(default_factory=dict)
    over: bool = False
    made: set[Node] = field(default_factory=set)  # what the model gave, one row for each record

    @property
    def nodes(self) -> set[Node]:
        """What the layers gave."""
        return {edge.node for ran in self.ran.values() for edge in ran.edges}


class Releases:
    """Turns the backward pass of a loss into a noisy gradient, in which each record counts as the defence lets it."""

    def __init__(
        self,
        model: nn.Module,
        defense: Defense,
        spending: Spending,
        slots: int | None = None,
        mean_loss: bool = False,
        public: Batch | None = None,
    ) -> None:
        self.defense, self.spending, self.slots, self.mean_loss = defense, spending, slots, mean_loss
        self.public = public
        self.watched = TrainedLayers(model)
        self._buffers = Bits(b for b in model.buffers() if b.is_floating_point())
        self.load()
        self.usual: int | None = None  # records of the first pass
        self.current: RecordPass | None = None
        self._filled = 0  # slots of the release that no optimizer has stepped on yet
        self._left_as: list[tuple[Tensor | None, int]] = []  # the gradients as it left them, and how often written to

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"current": None, "_filled": 0, "_left_as": []}

    def load(self) -> None:
        """A round begins with the weights and buffers as they are."""
        self._for_round: Defense | None = None
        self._steps = 0  # of the round
        self.spending.begin_round()
        self._at_start = self._buffers.sum() if self._buffers.tensors else torch.zeros(())

    def check_buffers(self) -> None:
        """Raise where training wrote to a buffer that would be sent as it is."""
        if self._buffers.tensors and bool(self._buffers.sum() != self._at_start):
            raise DefenseError(
                "Buffers of the model (running statistics, moving averages) changed in training: they tell of the "
                "records, and no noise is on them. Keep such layers in eval mode, and do not send this update."
            )

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Iterable[RemovableHandle]) -> None:
        """A training pass begins."""
        self.watched.check()
        if self._for_round is None:
            with lifted(hooks):
                self._for_round = self.defense.for_round(self.watched.model, self.public)
        rows = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim), None)
        if rows is None:
            raise DefenseError("The model was called without a tensor, so there are no records to keep apart.")
        if self.usual is None:
            with lifted(hooks):
                self.watched.check_apart(args, kwargs, len(rows))
        self.current = RecordPass(len(rows))

    def ran(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A layer with weights has run."""
        if self.current is None or self.current.over:
            if torch._C._current_graph_task_id() != -1:  # a checkpointed part runs again
                return
            raise DefenseError(
                f"Layer {layer!r} ran outside the model's own call. Call model(x), not model.forward(x) or a part of "
                f"it."
            )
        if layer in self.current.ran:
            raise DefenseError(f"Layer {layer!r} runs twice in one pass; a record's two gradients cannot be joined.")
        self.current.ran[layer] = self.watched.ran(layer, (args, kwargs), output, self.current.count)

    def leave(self, output: Any) -> None:
        """A training pass is over; without an output it was broken off by an error."""
        if output is None:
            self.current = None
        elif self.current is not None:
            some = (t for t in tensors_in(output) if t.grad_fn is not None and t.shape[:1] == (self.current.count,))
            self.current.over = True
            self.current.made = {t.grad_fn for t in some if t.grad_fn is not None}

    def of(self, roots: Iterable[Tensor]) -> bool:
        """Whether a backward pass goes through the last training pass."""
        layers = set() if self.current is None else self.current.nodes
        return bool(layers) and any(root.grad_fn is not None and leads_to(root.grad_fn, layers) for root in roots)

    def release(self, roots: list[Tensor], retain: bool, weights: Params, rng: Generator, report: Report) -> None:
        """Differentiate a loss, and add what the defence makes of its records to the weights' gradients."""
        current, self.current = self.current, None
        assert current is not None
        if len(roots) != 1 or roots[0].numel() != 1:
            raise DefenseError("A step's loss must be one number: call loss.backward() on the mean over the batch.")
        loss = roots[0]
        self._check_ways(loss, current, weights)
        self._count(current.count)
        share = share_of(loss, current.made | current.nodes, current.count, self.mean_loss)
        self._check_times(share.times, current.count)
        edges = [edge for ran in current.ran.values() for edge in ran.edges]
        deltas = torch.autograd.grad(loss, edges, retain_graph=retain, allow_unused=True)
        own = [None if delta is None else delta.detach() / share.weight for delta in deltas]
        records = self.watched.records(current.ran.values(), own, current.count)
        self._add(self._made(records, rng, weights, report), weights)
        report.examples += current.count

    def _made(self, records: Any, rng: Generator, weights: Params, report: Report) -> Params:
        assert self.slots is not None
        if self._waits(weights):
            if self._filled + records.count > self.slots:
                raise DefenseError(
                    f"{self._filled + records.count} records were differentiated before one optimizer step, and the "
                    f"step has {self.slots} slots. Where gradients are accumulated, give the records of a whole step: "
                    f"protect(..., slots={self._filled + records.count})."
                )
            self._filled += records.count
            self.spending.add(records.count)
            more = self._this_round.on_more_records(records, self.slots)
            if more is None:
                raise DefenseError(f"{describe(self.defense)} takes the records of a step at once: do not accumulate.")
            return more
        self.defense.check_steps(self._steps + 1)
        self.spending.pay(records.count)
        self._filled = records.count
        self._steps += 1
        report.steps += 1
        report.spent = self.spending.account.spent
        return self._this_round.on_records(records, self.slots, rng)

    @property
    def _this_round(self) -> Defense:
        return self.defense if self._for_round is None else self._for_round

    def _waits(self, weights: Params) -> bool:
        """Whether the last release is what the weights' gradients hold, and no step was taken on it."""
        now = _marks(weights)
        return len(now) == len(self._left_as) and all(
            g is h and v == w for (g, v), (h, w) in zip(now, self._left_as, strict=True)
        )

    def stepped(self) -> None:
        """An optimizer took a step: the next records make a release of their own."""
        self._left_as = []

    def _add(self, made: Params, weights: Params) -> None:
        for name, p in weights.items():
            g = made[name].to(p)
            if p.grad is None:
                p.grad = g
            else:
                p.grad.add_(g)
        self._left_as = _marks(weights)

    def _count(self, count: int) -> None:
        self.usual = count if self.usual is None else self.usual
        self.slots = count if self.slots is None else self.slots
        if count > self.slots:
            raise DefenseError(
                f"A batch has {count} records and a step {self.slots} slots, which every step's sum is divided by. Say "
                f"how many the largest has: protect(..., slots={count})."
            )

    def _check_times(self, times: float, count: int) -> None:
        """The loss must be the mean over its records, or such a part of it as steps of several batches take."""
        assert self.slots is not None
        assert self.usual is not None
        parts = max(round(self.slots / self.usual), 1)
        if not any(isclose(times * k, 1, rel_tol=1e-4) for k in {1, parts}):
            what = "their sum, it seems" if isclose(times, count, rel_tol=1e-4) else "GradScaler, perhaps"
            raise DefenseError(
                f"The loss is {times:g} times the mean over its {count} records ({what}), and a factor means nothing "
                f"to a gradient that is clipped. Take the mean and change the learning rate; in mixed precision use "
                f"bfloat16, which needs no scaler."
            )

    def _check_ways(self, loss: Tensor, current: RecordPass, weights: Params) -> None:
        """Every weight must come into the loss through its own layer, in the last pass, and no other weight at all."""
        ends = leaves_of(loss, {edge.node: ran.before for ran in current.ran.values() for edge in ran.edges})
        own = {get_gradient_edge(p).node: name for name, p in weights.items()}
        if odd := sorted(own[end] for end in ends if end in own):
            raise DefenseError(
                f"The weight {odd[0]!r} comes into the loss by another way than one run of its layer: a second pass of "
                f"the model, a weight that is used by hand, or a penalty. Take one pass for a loss; leave penalties to "
                f"the optimizer (weight_decay) or to a backward() of their own."
            )
        if ends:
            raise DefenseError(
                f"The loss depends on {len(ends)} tensors with gradients that are no weights of the guarded model, and "
                f"would not be defended. Guard one module that holds all that is trained."
            )


def _marks(weights: Params) -> list[tuple[Tensor | None, int]]:
    return [(p.grad, 0 if p.grad is None else p.grad._version) for p in weights.values()]
