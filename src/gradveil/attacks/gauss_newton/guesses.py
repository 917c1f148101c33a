"""What is unknown beside the examples, and a first guess of it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.func import functional_call

from gradveil.attacks.gauss_newton.equations import Prior
from gradveil.attacks.gauss_newton.linear import SPREAD
from gradveil.attacks.labels import label_signal, unreadable
from gradveil.gradients.functional import quiet
from gradveil.losses import CrossEntropy
from gradveil.modules import copied_state
from gradveil.types import Observation

Free = Literal["logits", "slopes", "targets", "nothing"]


def free_of(seen: Observation) -> Free:
    """Return what is unknown beside the examples; several local steps have a δ each, so there it is the targets."""
    if seen.labels is None:
        return "slopes" if seen.update.num_steps == 1 else "targets"
    plain = isinstance(seen.loss, CrossEntropy) and seen.loss.plain
    return "logits" if plain and seen.update.num_steps == 1 else "nothing"


@dataclass(frozen=True)
class Guess:
    """Where targets are not known: a first guess of what stands for them, and how far from it that may be."""

    value: Tensor  # (N, K): δ for one local step, else the targets themselves
    spread: Tensor  # (N, K), standard deviation

    @classmethod
    def of(cls, seen: Observation, prior: Prior, rng: Generator) -> "Guess":
        """Return equal parts of the δ that the update shows, or the numbers that fit it at the prior's mean."""
        nothing = prior.mean.new_zeros(seen.num_examples, seen.num_classes)
        if seen.labels is not None:
            return cls(nothing, nothing)
        signal = label_signal(seen, rng)
        if signal is None:
            raise unreadable(seen)
        slopes = nothing + signal.to(nothing) / seen.num_examples
        if free_of(seen) == "slopes":
            return cls(slopes, _spread(slopes))
        output = _output(seen, prior.mean.repeat(seen.num_examples).reshape(-1, *seen.input_shape)).to(nothing)
        numbers = seen.loss.read(output, slopes.reshape(output.shape)) if seen.loss.targets == "numbers" else None
        if numbers is None:
            raise unreadable(seen)
        value = seen.loss.rows(numbers, seen.num_classes)
        return cls(value, _spread(value - output.reshape(value.shape)))

    def targets(self, seen: Observation, inputs: Tensor, free: Tensor) -> Tensor | None:
        """Return the targets of a solution: those given, else those that it speaks for, where the loss tells them."""
        if seen.labels is not None:
            return seen.labels.to(self.value.device)
        found = self.value + self.spread * free.reshape(self.value.shape)
        if free_of(seen) == "targets":
            return seen.loss.found(found.float())
        output = _output(seen, inputs)
        return seen.loss.read(output, found.to(output).reshape(output.shape))


def _spread(sizes: Tensor) -> Tensor:
    return SPREAD * sizes.square().mean().sqrt().expand_as(sizes)


def _output(seen: Observation, inputs: Tensor) -> Tensor:
    with quiet(seen.model), torch.no_grad():
        output: Tensor = functional_call(
            seen.model, copied_state(seen.model), (inputs.to(next(seen.model.parameters())),)
        )
    return output
