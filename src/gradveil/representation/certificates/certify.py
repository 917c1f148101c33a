"""``certify``: one call for every kind of bound on how far a server's answer must be from the input."""

from collections.abc import Callable
from math import inf
from typing import get_args

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import CertificateError, did_you_mean
from gradveil.representation.certificates.base import Certificate, Kind, Problem
from gradveil.representation.certificates.lipschitz import (
    box_certificate,
    global_certificate,
    radius_certificate,
    residual_certificate,
)
from gradveil.representation.certificates.local import local_certificate
from gradveil.representation.certificates.reach import empirical_certificate, reach_certificate

KINDS: dict[Kind, Callable[[Problem], Certificate]] = {
    "local": local_certificate,
    "global": global_certificate,
    "box": box_certificate,
    "radius": radius_certificate,
    "reach": reach_certificate,
    "residual": residual_certificate,
    "empirical": empirical_certificate,
}


def certify(
    model: nn.Module,
    layer: str | None,
    x: Tensor,  # (N, *shape)
    r_perturbed: Tensor,  # (N, L), what the layer's weight gradient is built from
    p: float = 2,
    kind: Kind = "global",
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    residual: float | Tensor | None = None,
    rng: Generator | None = None,
) -> Certificate:
    """Return how far from x every image with the representation r′ must be, in the p-norm, and on what that rests.

    ``local`` is the paper's theorem 1 (first order), ``global`` and ``box`` its sound versions (a Lipschitz
    constant on the whole space, on the data range), ``radius`` the sound local one, ``reach`` asks whether any
    image at all can have r′ and how near, ``residual`` is for a server that stays ``residual`` away from r′, and
    ``empirical`` is what an inversion of r′ reaches. ``layer=None`` takes the last fully connected layer.
    """
    if kind not in KINDS:
        known = get_args(Kind)
        raise CertificateError(
            f"No certificate is of kind {kind!r}. {did_you_mean(str(kind), known)}Known: {', '.join(known)}."
        )
    tau = None if residual is None else torch.as_tensor(residual, dtype=torch.float64).expand(len(x))
    problem = Problem.make(model, layer, x, r_perturbed, p, bounds=bounds, residual=tau, rng=rng)
    return KINDS[kind](problem)


def readable_p(text: str) -> float:
    """Read p from text: 1, 2 or inf."""
    try:
        return {"1": 1.0, "2": 2.0, "inf": inf}[text.strip().lower()]
    except KeyError:
        raise CertificateError(f"p is {text!r}; certificates know p = 1, 2 and inf.") from None
