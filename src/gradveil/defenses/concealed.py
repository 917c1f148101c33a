"""Concealed samples: others that look different and have nearly the same gradient (Wu et al., AAAI 2024)."""

from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.errors import DefenseError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.noise import Source, integers, uniform
from gradveil.protection.defense import DEFENSES, Defense, PerRound
from gradveil.ranges import Share, Whole
from gradveil.tree import Params, dot, norm, parameters, scale
from gradveil.types import Batch, Observation

AWAY = 0.01  # weight of the distance from the examples in exp(-AWAY ||z - x||), as in the paper
ALIKE = 0.01  # weight of the relative distance of the outputs
RATE = 0.1  # of Adam


@dataclass(frozen=True, eq=False)
class _OfRound:
    """What the round says: the model as it was sent, its loss, and public examples."""

    model: nn.Module
    loss: Loss
    public: Batch | None

    def __deepcopy__(self, memo: dict[int, object]) -> "_OfRound":
        return self  # nothing of it is ever changed


@DEFENSES.register("concealed")
@dataclass(frozen=True)
class Concealed(PerRound):
    """Train on a concealed sample z beside each example x: unlike it to look at, like it in its gradient (Wu et al.).

    z begins as ``mix`` of a public example and the rest of x, and descends 1 - cos(g(z), g(x)) + exp(-0.01 ||z - x||)
    + 0.01 ||f(z) - f(x)|| / ||f(x)||, g being gradients of the whole batch at the weights that were sent. Its label is
    the public example's with chance ``mix``, else that of x. Without public examples z begins as noise; where no
    weights were handed over (``for_round``) it stays as it began. Departures: fewer steps; and gradients that point
    against the old ones are not projected.
    """

    title = "Concealed samples"

    mix: Share = 0.7  # of the public example in the start
    steps: Whole = 20  # of Adam for each batch; the paper takes up to 1000
    _known: _OfRound | None = field(default=None, repr=False, compare=False)

    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> Defense:
        if public is None and self._known is not None:
            return self
        return replace(self, _known=_OfRound(model, loss, public))

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        if not batch.labelled or batch.labels.is_floating_point():
            raise DefenseError("concealed makes examples with labels of classes, and here there are none.")
        public = None if self._known is None else self._known.public
        if public is None:
            others = Batch(uniform(batch.inputs.shape, rng).to(batch.inputs), batch.labels)
        else:
            some = integers(len(public), (len(batch),), rng)
            others = Batch(public.inputs[some].to(batch.inputs), public.labels[some].to(batch.labels))
        z = self.mix * others.inputs + (1 - self.mix) * batch.inputs
        own = (uniform((len(batch),), rng) >= self.mix).to(batch.labels.device)
        labels = torch.where(own.view(-1, *[1] * (batch.labels.ndim - 1)), batch.labels, others.labels)
        z = z if self._known is None else _descended(self._known, batch, Batch(z, labels), self.steps)
        return Batch(torch.cat([batch.inputs, z]), torch.cat([batch.labels, labels]))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = (
            "Looks for twice as many images, takes those that look least like public ones for the concealed, and takes "
            "their gradients off."
        )
        alike = "Matches the direction of the gradient, which concealed samples are made to keep."
        return (Countermeasure("take off", why, _taken_off), Countermeasure("direction", alike, _direction))


def _taken_off(seen: Observation) -> Observation:
    """Return the view of a server that rebuilt all examples, and takes off those that are least likely."""
    update, count = seen.update, seen.num_examples
    if update.num_steps > 1 or seen.prior is None or not update.rule.is_plain:
        return seen
    twice = replace(seen, update=replace(update, num_examples=2 * count), bounds=(-10.0, 10.0))
    found = build_attack("newton").reconstruct(twice, Generator().manual_seed(0))
    if found.labels is None:
        return seen
    away = found.inputs.flatten(1).to(seen.prior.mean) - seen.prior.mean
    odd = torch.linalg.vecdot(away, seen.prior.whiten(away)).topk(count).indices.cpu()
    like = next(seen.model.parameters())
    concealed = Batch(found.inputs[odd].to(like), found.labels[odd].to(like.device))
    with torch.enable_grad():
        known, _ = _gradient(seen.model, parameters(seen.model), concealed, seen.loss)
    left = {name: 2 * g - known[name].to(g) for name, g in update.gradient.items()}
    return replace(seen, update=replace(update, gradient=left))


def _direction(seen: Observation) -> Observation:
    update = replace(seen.update, gradient=_unit(seen.update.gradient))
    return replace(seen, update=update, simulate=_unit, simulate_on="update")


def _unit(gradient: Params) -> Params:
    return scale(gradient, 1 / norm(gradient).clamp_min(1e-30))  # type: ignore[arg-type]


def _gradient(
    model: nn.Module, weights: Params, batch: Batch, loss: Loss, graph: bool = False
) -> tuple[Params, Tensor]:
    free = {n: w.detach().requires_grad_() for n, w in weights.items()}
    output: Tensor = functional_call(model, free, (batch.inputs,))
    found = torch.autograd.grad(
        loss(output, batch.labels), list(free.values()), create_graph=graph, materialize_grads=True
    )
    return dict(zip(free, found, strict=True)), output


def _descended(known: _OfRound, batch: Batch, start: Batch, steps: int) -> Tensor:
    model, minimised = known.model, known.loss
    weights = parameters(model)
    with torch.enable_grad():
        wanted, seen = _gradient(model, weights, batch, minimised)
        seen, z = seen.detach(), start.inputs.clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=RATE)
        for _ in range(steps):
            found, output = _gradient(model, weights, Batch(z, start.labels), minimised, graph=True)
            cosine = dot(wanted, found) / (norm(wanted) * norm(found)).clamp_min(1e-30)
            away = (z - batch.inputs).flatten(1).norm(dim=1).mean()
            apart = ((output - seen).flatten(1).norm(dim=1) / seen.flatten(1).norm(dim=1).clamp_min(1e-12)).mean()
            value = 1 - cosine + torch.exp(-AWAY * away) + ALIKE * apart
            (z.grad,) = torch.autograd.grad(value, [z])
            optimizer.step()
    return z.detach()
