"""Updates of many examples: a sample of them, each attacked by a server that knows all the others."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil import tree
from gradveil.auditing.run_folder import Row
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.integrations.flower.probe import Probe
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Update

SAMPLE, SECONDS = 4, 60.0  # how many examples, and after what time no further one is begun


@dataclass
class TrainingPass:
    """One training pass of a client: what is needed to tell what each example added to the update."""

    inputs: Tensor  # (B, *shape)
    weights: Params  # of the model at that time
    slopes: Tensor | None = None  # (B, ...): the loss by the outputs; None: there was no backward pass

    @classmethod
    def of(cls, model: nn.Module, weights: Params, batch: Batch, loss: Loss = CROSS_ENTROPY) -> "TrainingPass":
        """Return the pass of a client that takes one step on the mean loss of all its examples."""
        made = cls(batch.inputs, weights)
        with quiet(model), torch.no_grad():
            outputs = torch.func.functional_call(model, weights, (batch.inputs,))
        made.slopes = torch.func.grad(loss)(outputs, batch.labels)
        return made

    def gradient(self, model: nn.Module, rows: Tensor) -> Params:
        """Return what the examples of these rows (B,) add to the gradient; the model is a copy of the client's."""
        if self.slopes is None:
            return {}
        own = {n: self.weights[n].detach().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
        with torch.enable_grad(), quiet(model):
            outputs = torch.func.functional_call(model, self.weights | own, (self.inputs,))
            slopes = self.slopes * rows.to(self.slopes).reshape(-1, *[1] * (self.slopes.ndim - 1))
            found = torch.autograd.grad(outputs, list(own.values()), slopes, materialize_grads=True)
        return dict(zip(own, found, strict=True))


@dataclass(frozen=True)
class OthersKnown:
    """A client's update and its passes, out of which one example at a time is left unknown."""

    model: nn.Module
    passes: Sequence[TrainingPass]
    update: Update
    unlike: str | None = None  # an optimiser whose update is no sum of gradients

    def check(self, probe: Probe, truth: Batch, rng: Generator, seconds: float) -> list[list[Row]]:
        """Return the rows of the attacks on each of these examples: one at least, no new one after the time."""
        started, model = time.monotonic(), copy.deepcopy(self.model).train().cpu()
        used = [p for p in self.passes if p.slopes is not None]
        if self.unlike:
            raise AttackError(f"The client trains with {self.unlike}, whose update is not a sum of its gradients.")
        if not all(p.weights for p in used):
            raise AttackError("The client took too many steps for its weights to be kept.")
        whole: Params = {}
        for one in used:
            whole = _plus(whole, one.gradient(model, torch.ones(len(one.inputs))))
        if not whole:
            raise AttackError("No backward pass from the model's outputs was seen, so no example can be told apart.")
        unit = _unit(self.update.gradient, whole)
        found: list[list[Row]] = []
        for i in range(len(truth)):
            if found and time.monotonic() - started > seconds:
                break
            found.append(self._one(probe, model, used, truth[i : i + 1], whole, unit, rng))
        return found

    def _one(
        self, probe: Probe, model: nn.Module, used: list[TrainingPass], one: Batch, whole: Params, unit: float,
        rng: Generator,
    ) -> list[Row]:  # fmt: skip
        rows = [(p.inputs == one.inputs).flatten(1).all(1) for p in used]
        where = [k for k, mine in enumerate(rows) if bool(mine.any())]
        own: Params = {}
        for k in where:
            own = _plus(own, used[k].gradient(model, rows[k]))
        times = sum(float(rows[k].sum()) / len(rows[k]) for k in where)  # in how many steps of this example alone
        others = {name: unit * (whole[name] - own[name]) for name in whole}
        scale = 1 / (unit * times)
        return probe.run(
            model, used[where[0]].weights, self.update, rng, one, known=lambda seen: alone(seen, others, scale)
        )


def alone(seen: Observation, others: Params, scale: float) -> Observation:
    """Return what is left to a server that knows what the others added: an update of one step on one example.

    Entries that are zero were removed by a defence, and stay so.
    """

    def left(sent: Params) -> Params:
        return {n: torch.where(g != 0, scale * (g - others[n]), 0.0) for n, g in sent.items()}

    simulate = seen.simulate
    return replace(
        seen,
        update=replace(seen.update, gradient=left(seen.update.gradient), num_examples=1, num_steps=1, batch_size=None),
        noise={name: scale * std for name, std in seen.noise.items()},
        simulate=simulate and (lambda own: left(simulate({n: g / scale + others[n] for n, g in own.items()}))),
    )


def _plus(total: Params, more: Params) -> Params:
    return tree.add(total, more) if total and more else total or more


def _unit(sent: Params, whole: Params) -> float:
    """Return how many times the plain gradients the update is, by the tensor that they explain best.

    The learning rate may not be known, and a defence may have changed some tensors and left others.
    """
    best, unit = 0.0, 1.0
    for name in [name for name in sent if name in whole]:
        there = sent[name] != 0
        mine, plain = sent[name][there].double(), whole[name][there].double()
        both, square = float(mine @ plain), float(plain @ plain)
        if square and (cosine := both / (square * float(mine @ mine)) ** 0.5) > best:
            best, unit = cosine, both / square
    return unit
