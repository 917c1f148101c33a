"""What a certificate is: a bound per example, and the sentences it rests on."""

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.certificates.chain import Chain, walk
from gradveil.certificates.norms import check_p
from gradveil.certificates.region import ROUNDING, farthest, norm
from gradveil.errors import CertificateError
from gradveil.layers import find_layer

Kind = Literal["local", "global", "box", "radius", "reach", "residual", "empirical"]

SCOPE = (
    "It speaks only of a server that answers with an image X′ whose representation f(X′) is the perturbed r′. "
    "A server that leaves the defended tensor out, reads the zeroed entries off it, or uses other layers' gradients "
    "does not need f(X′) = r′ and is not bounded by this figure."
)
RANGE = "Every image lies in the data range [{}, {}]."
ROUNDED = "Computed in float64 with a relative margin for rounding, not with directed rounding."
EVAL = "Dropout is off and batch norm uses its running statistics (eval mode)."


@dataclass(frozen=True)
class Certificate:
    """A lower bound of ||X - X′||_p for every example, or for ``empirical`` a distance that was reached."""

    bound: Tensor  # (N,): inf where no image at all can have the representation r′
    kind: Kind
    p: float
    size: int  # d, the numbers in one input
    sound: bool  # whether it follows from the assumptions by proof; a first-order figure does not
    assumptions: tuple[str, ...]  # sentences
    how: str  # how it was computed
    details: dict[str, Tensor] = field(default_factory=dict)  # by name, (N,) each

    def to_mse(self) -> Tensor:
        """Return the mean squared error (N,) that the distance implies: R²/d for p = 2 and inf, R²/d² for p = 1.

        ||z||_2 is at least ||z||_inf and at least ||z||_1 / sqrt(d), so the squared error is at least R² and R²/d.
        """
        return self.bound**2 / (self.size**2 if self.p == 1 else self.size)

    def holds(self, distance: Tensor) -> Tensor:
        """Return whether distances ||X - X′||_p (N,) respect the bound."""
        return distance >= self.bound


@dataclass(frozen=True)
class Problem:
    """What every kind of certificate is computed from."""

    model: nn.Module
    layer: str
    x: Tensor  # (N, *shape)
    r_perturbed: Tensor  # (N, L)
    p: float
    bounds: tuple[float, float] = (0.0, 1.0)
    residual: Tensor | None = None  # (N,): how far from r′ the server's answer may stay
    rng: Generator | None = None

    @classmethod
    def make(
        cls, model: nn.Module, layer: str | None, x: Tensor, r_perturbed: Tensor, p: float, **settings: object
    ) -> "Problem":
        """Check the arguments and return the problem, on the CPU: bounds are computed in float64 there."""
        name = find_layer(model, layer)
        if any(p.device.type != "cpu" for p in model.parameters()):
            model = copy.deepcopy(model).cpu()
        x, r_perturbed = x.cpu(), r_perturbed.cpu()
        if len(x) != len(r_perturbed):
            raise CertificateError(f"There are {len(x)} inputs and {len(r_perturbed)} representations.")
        problem = cls(model, name, x, r_perturbed.detach().flatten(1), check_p(p), **settings)  # type: ignore[arg-type]
        low, high = problem.bounds
        if not bool(((x >= low) & (x <= high)).all()):
            raise CertificateError(f"Some inputs lie outside the data range [{low}, {high}]. Pass bounds=(low, high).")
        return problem

    @property
    def size(self) -> int:
        """The numbers in one input."""
        return self.x[0].numel()

    @cached_property
    def chain(self) -> Chain:
        """The part of the model before the layer, as a chain."""
        chain = walk(self.model, self.layer, self.x)
        if chain.out_size != self.r_perturbed.shape[1]:
            raise CertificateError(
                f"Layer {self.layer!r} takes {chain.out_size} numbers per example; "
                f"r_perturbed has {self.r_perturbed.shape[1]}."
            )
        return chain

    @cached_property
    def r(self) -> Tensor:
        """The representation (N, L), in float64."""
        return self.chain(self.x)

    @cached_property
    def distance(self) -> Tensor:
        """The perturbation's size ||r - r′||_p (N,), less what rounding may have added."""
        rounding = ROUNDING * norm(self.r.abs() + self.r_perturbed.abs(), self.p)
        return (norm(self.r - self.r_perturbed, self.p) - rounding).clamp_min(0)

    @property
    def allowed(self) -> Tensor:
        """The residual (N,) that the server's answer may leave; 0 where none was given."""
        return torch.zeros(len(self.x), dtype=torch.float64) if self.residual is None else self.residual.double()

    def stated(self, *sentences: str) -> tuple[str, ...]:
        """Return the assumptions of a sound bound: what it is for, the given sentences, how it was rounded."""
        modes = (EVAL,) if self.chain.has_modes else ()
        return (SCOPE, *sentences, *modes, ROUNDED)


def largest_mse(x: Tensor, bounds: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Return the largest mean squared error (N,) that any image in the data range can have to x."""
    return farthest(x.to(torch.float64), bounds, 2) ** 2 / x[0].numel()


def blind_mse(x: Tensor, mean_image: Tensor) -> Tensor:
    """Return the mean squared error (N,) of answering with the mean image: what a server that saw nothing gets."""
    return ((x - mean_image.reshape(1, *x.shape[1:])) ** 2).flatten(1).mean(1)
