"""A bound for every estimator and the true, nonlinear update, on average over the prior (van Trees)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from scipy.stats import t as student

from gradveil.errors import CertificateError
from gradveil.representation.layers.recorder import Recorder
from gradveil.representation.layers.rules.activations import Pointwise
from gradveil.representation.layers.rules.base import Affine
from gradveil.threats.meter import bayes_mse, equations, information, posterior_root
from gradveil.types import Batch, GaussianPrior, Observation


@dataclass(frozen=True)
class AveragedBound:
    """The van Trees bound from a sample of inputs."""

    low: float  # at this confidence, no estimator's mean squared error over the prior is below it
    plug_in: float  # the sample's mean information put into the formula: too high on average, as tr A⁻¹ is convex
    inputs: int
    confidence: float = 0.95
    assumptions: tuple[str, ...] = (
        "Inputs are drawn from the Gaussian prior itself, not from images.",
        "The update is a smooth function of the input, and its noise is Gaussian, of a level that the input does not "
        "change.",
        "The information of a random input has a variance (Student's interval for its mean).",
    )


def averaged(seen: Sequence[Observation], truths: Sequence[Batch], prior: GaussianPrior) -> AveragedBound:
    """Return the van Trees bound, for every estimator and free of the linearisation; needs a smooth, noisy update.

    The bound is tr((E F + Λ)⁻¹)/n, and E F is known from a sample only. The first half of the inputs gives a point M,
    where the tangent of tr A⁻¹ lies below the curve; the tangent is linear in E F, so that the other half gives it
    without bias, with a confidence interval.
    """
    if len(seen) < 8:
        raise CertificateError(f"{len(seen)} inputs: the mean information needs at least 8, drawn from the prior.")
    for one, truth in zip(seen, truths, strict=True):
        _check_smooth(one, truth)
    parts = [information(equations(s, t, floor=0.0)) for s, t in zip(seen, truths, strict=True)]
    n, half = len(parts[0]), len(parts) // 2
    first = torch.stack(parts[:half]).mean(0)
    root = posterior_root(first, prior)
    inverse = root.T @ root
    known, *rest = (float((inverse @ f @ inverse).trace()) for f in (first, *parts[half:]))
    sample = torch.tensor(rest, dtype=torch.float64)
    wide = float(student.ppf(AveragedBound.confidence, len(rest) - 1) * sample.std() / sqrt(len(rest)))
    low = (float(inverse.trace()) + known - float(sample.mean()) - wide) / n
    return AveragedBound(max(0.0, low), bayes_mse(torch.stack(parts).mean(0), prior), len(parts))


SMOOTH = {"add", "sub", "mul", "cat", "bmm", "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm"}


def _check_smooth(seen: Observation, truth: Batch) -> None:
    """Raise unless all that is seen is noisy, and a smooth function of the input."""
    silent = next((n for n in seen.visible if not seen.noise.get(n, 0.0) > 0), None)
    if silent is not None:
        raise CertificateError(f"{silent!r} carries no noise, so that no bound holds for every estimator.")
    if seen.simulate is not None or seen.weights:
        raise CertificateError(
            "The defence chooses by the input which entries are seen: no smooth update, so that the bound for every "
            "estimator does not hold. Use leak_meter, which is first order."
        )
    x = truth.inputs.detach().to(next(seen.model.parameters()).dtype)
    with torch.no_grad(), Recorder(x, everywhere=True) as recorder:
        seen.model(x)
    for operation in recorder.operations[1:]:
        step = operation.step
        known = step.curve.smooth if isinstance(step, Pointwise) else isinstance(step, Affine)
        if recorder.read or not (known or operation.name in SMOOTH):
            raise CertificateError(
                f"The update is not known to be a smooth function of the input ({recorder.read or operation.name!r}), "
                "so that the bound for every estimator does not hold: a server can tell on which side of a kink the "
                "input lies. Use sigmoid, tanh, softplus, GELU or SiLU and average pooling, or leak_meter, which is "
                "first order."
            )
