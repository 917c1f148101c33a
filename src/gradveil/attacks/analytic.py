"""Read the input of a linear layer off its gradient, exactly, then undo what lies before that layer."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from gradveil.attacks.analytic_rows import LayerInputs, layer_inputs, readable_layer
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.gradients import quiet
from gradveil.attacks.labels import with_labels
from gradveil.attacks.newton_prior import Prior
from gradveil.attacks.newton_rows import Rows
from gradveil.attacks.newton_smooth import Smoothing, kink_scales
from gradveil.attacks.newton_solve import Schedule, Solver
from gradveil.attacks.newton_step import Dense, MatrixFree
from gradveil.layers import prefix
from gradveil.types import Observation, Reconstruction, check_update


@ATTACKS.register("analytic")
@dataclass(frozen=True)
class Analytic(Attack):
    """Take r = dW/db of the first fully connected layer with a bias, and find the input x with f(x) = r.

    No search for the gradient: one example's r is exact, whatever the other layers send (Phong et al. 2018). Where only
    a reshape or a scaling lies before the layer, x is read off; else f(x) = r is solved by Levenberg-Marquardt with
    the Gaussian prior, over the entries of r that were seen. ``analytic_rows`` says what a batch gives.
    """

    steps: int = 60  # of Levenberg-Marquardt, at most
    restarts: int = 2  # the first from the prior's mean, others from draws of it
    dense_limit: int = 1024  # unknowns up to which the Jacobian is written out
    cg_steps: int = 60  # of conjugate gradients per step, beyond that

    def __post_init__(self) -> None:
        if min(self.steps, self.restarts, self.cg_steps) < 1:
            raise ValueError("steps, restarts and cg_steps must be at least 1")

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates, one after the other."""
        for s in seen:
            check_update(s.update, s.model)
        labelled = with_labels(seen, rngs)
        return [self._one(s, rng) for s, rng in zip(labelled, rngs, strict=True)]

    def _one(self, seen: Observation, rng: Generator) -> Reconstruction:
        visit = readable_layer(seen)
        r = layer_inputs(seen, visit)
        model = deepcopy(seen.model).double()
        shape = (seen.num_examples, *seen.input_shape)
        with quiet(model):
            undone = _undo_scaling(prefix(model, visit.path), r, shape)
        details = {"known": float(r.known.mean()), "iterations": 0.0}
        if undone is not None:
            found, objective = undone, 0.0
            converged = seen.num_examples == 1 and seen.update.num_steps == 1
        else:
            found, objective, steps = self._search(replace(seen, model=model), visit.path, r, rng)
            converged = steps < self.steps and math.isfinite(objective)
            details["iterations"] = float(steps)
        inputs = found.reshape(shape).to(torch.float32).clamp(*seen.bounds)
        return Reconstruction(inputs, seen.labels, objective, converged, details)

    def _search(self, seen: Observation, layer: str, r: LayerInputs, rng: Generator) -> tuple[Tensor, float, int]:
        """Return the inputs (N, d) that the prior and the layer's inputs speak for, every example on its own."""
        alone = replace(seen, update=replace(seen.update, num_examples=1))
        prior = Prior.of(alone, 0, r.values.device)
        rows = _inversion_rows(alone, layer, r, prior.center())
        dense = prior.pixels <= self.dense_limit
        direction = Dense(prior) if dense else MatrixFree(prior, self.cg_steps)
        solver = Solver(prior, Schedule(self.steps, 5, 3.0, 1e-5), direction, r.values.shape[1])
        away = prior.draw(len(r.values) * self.restarts, rng).reshape(-1, self.restarts, prior.pixels)
        away[:, 0] = 0.0
        which = torch.arange(len(r.values), device=r.values.device).repeat_interleave(self.restarts)
        state = solver.solve(rows.take(which), prior.center() + away.flatten(0, 1))
        objective = state.objective.reshape(-1, self.restarts)
        best = state.best.reshape(-1, self.restarts, prior.pixels)
        value, at = objective.min(1)
        found = best[torch.arange(len(best)), at]
        steps = state.steps.reshape(-1, self.restarts).gather(1, at[:, None])
        return found, float(value.mean()), int(steps.max())


def _inversion_rows(seen: Observation, layer: str, r: LayerInputs, center: Tensor) -> Rows:
    """Return the equations f(x) = r of each example."""
    f = prefix(seen.model, layer)
    shape = (1, *seen.input_shape)

    def one(x: Tensor, widths: Tensor, smooth: bool) -> Tensor:
        if not smooth:
            return f(x.reshape(shape)).flatten()
        with Smoothing(widths.unbind()):
            return f(x.reshape(shape)).flatten()

    with quiet(seen.model):
        scales = torch.tensor(kink_scales(lambda: f(center.reshape(shape)))).to(center).expand(len(r.values), -1)
    rms = (r.known * r.values.square()).sum(1).div(r.known.sum(1).clamp_min(1)).sqrt().clamp_min(1e-12)
    level = rms[:, None].expand_as(r.values)
    return Rows(seen.model, one, (), scales, r.values, r.known, r.std, level)


def _undo_scaling(f: Callable[[Tensor], Tensor], r: LayerInputs, shape: tuple[int, ...]) -> Tensor | None:
    """Return x where f only reshapes, scales and shifts each entry and all of r was seen; else None."""
    size = r.values[0].numel()
    if torch.Size(shape[1:]).numel() != size or not bool(r.known.all()):
        return None
    ramp = torch.linspace(0.1, 0.9, size).to(r.values).reshape(1, *shape[1:])
    with torch.no_grad():
        shift, one, probe = (f(x).flatten() for x in (torch.zeros_like(ramp), torch.ones_like(ramp), ramp))
    scale = one - shift
    if not torch.allclose(probe, shift + scale * ramp.flatten()) or not bool(scale.all()):
        return None
    return (r.values - shift) / scale
