"""A large batch, nearly, from a first fully connected layer (Kariyappa et al. 2023, the cocktail party attack).

Every row of dW is a mixture of the N examples, and mixtures are nearer to a Gaussian than their parts: independent
component analysis finds the directions that are least so. Of images it looks at first and second differences of
neighbours: they are mixed alike, are far from Gaussian, hardly depend on each other from image to image, and few of
them are large (which is the paper's total variation). Whitened, all directions are sought together by the fixed point
of FastICA, kept orthogonal; then each for itself goes to the nearest direction of least total variation, since images
are not quite uncorrelated. db = D 1 gives sign and scale.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Generator, Tensor

from gradveil.attacks.analytic import Mixture, mixture_of
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack
from gradveil.ranges import Count, Weight
from gradveil.types import Observation, Reconstruction

STILL = 1e-4  # change of a direction below which it stands
REFINED = 5  # steps of each direction for itself
LONG = 5e10  # operations of one of them beyond which they are left out


@ATTACKS.register("cocktail")
@dataclass(frozen=True)
class Cocktail(Attack):
    """Unmix the batch behind a first fully connected layer, nearly, by independent component analysis.

    Batches of hundreds below the layer's width; what lies behind the layer does not matter. Inputs and targets come in
    no order.
    """

    kind = "closed form"
    applies_to = (AppliesTo(model="dense", examples=(2, inf), default="", turn=1),)

    steps: Count = 300  # of the fixed point, at most
    tol: Weight = 0.35  # of the gradient that the examples found have, relative, below which they are believed

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        mixture = mixture_of(seen, "cocktail")
        white, back = _whitened(_signals(mixture))
        u, steps = self._apart(white, rng)
        u = _refined(white, u) if _of_images(mixture) else u
        y = mixture.on_plane(u @ back)
        x, targets, residual = mixture.explained(y)
        sure = steps < self.steps and residual < self.tol and mixture.rank == seen.num_examples
        return Reconstruction(x.float(), targets, residual, sure, {"iterations": float(steps)})

    def _apart(self, white: Tensor, rng: Generator) -> tuple[Tensor, int]:
        """Return orthogonal directions (N, N) whose signals are least Gaussian, by the fixed point of FastICA."""
        n = len(white)
        u = _orthogonal(torch.randn(n, n, generator=rng, device=rng.device).to(white))
        for step in range(self.steps):
            z = u @ white
            bell = (-z.square() / 2).exp()
            slope = ((1 - z.square()) * bell).mean(1)
            new = _orthogonal((z * bell) @ white.T / white.shape[1] - slope[:, None] * u)
            moved = float((1 - (new * u).sum(1).abs()).max())
            u = new
            if moved < STILL:
                return u, step
        return u, self.steps


def _of_images(mixture: Mixture) -> bool:
    shape = mixture.seen.input_shape
    return len(shape) >= 2 and min(shape[-2:]) > 2


def _signals(mixture: Mixture) -> Tensor:
    """Return what is unmixed (N, T): differences of neighbours of images, else the entries less their mean."""
    if not _of_images(mixture):
        return mixture.basis - mixture.basis.mean(1, keepdim=True)
    pictures = mixture.basis.reshape(mixture.rank, *mixture.seen.input_shape)
    across, down = pictures.diff(dim=-1), pictures.diff(dim=-2)
    second = (across.diff(dim=-1), across.diff(dim=-2), down.diff(dim=-2))
    return torch.cat([d.flatten(1) for d in (across, down, *second)], 1)


def _whitened(signals: Tensor) -> tuple[Tensor, Tensor]:
    """Return uncorrelated signals of variance 1 (N, T), and the matrix (N, N) that makes them."""
    values, vectors = torch.linalg.eigh(signals @ signals.T / signals.shape[1])
    matrix = (vectors / values.clamp_min(1e-12 * float(values[-1])).sqrt()).T
    return matrix @ signals, matrix


def _orthogonal(u: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(u)
    nearest: Tensor = left @ right
    return nearest


def _refined(white: Tensor, u: Tensor) -> Tensor:
    """Return directions (N, N), each at the least Σ |signal| near it, at length 1: reweighted least squares."""
    n, length = white.shape
    for _ in range(REFINED if n**3 * length < LONG else 0):
        w = 1 / ((u @ white).abs() + 0.1)  # (N, T)
        squares = torch.stack([(white * each) @ white.T for each in w])
        u = torch.linalg.solve(squares, u)
        u = u / u.norm(dim=1, keepdim=True)
    return u
