"""Where a bound is claimed: the images within a distance R of one image, inside the data range."""

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import CertificateError
from gradveil.modules import find_layer, prefix
from gradveil.representation.chain import StepChain, has_modes, step_chain
from gradveil.representation.jacobian import FunctionJacobian
from gradveil.representation.norms import Norm, Precision, check_p, forward_error, operator_norm

ROUNDING = 1e-12  # relative, of a sum computed here in float64: thousands of roundings


@dataclass(frozen=True)
class Region:
    """The p-ball of radius R around x, cut to the data range; without a radius the whole range."""

    x: Tensor  # (1, *shape) float64
    lower: Tensor  # (1, *shape): the smallest box around the region
    upper: Tensor
    p: float
    radius: float

    @classmethod
    def whole(cls, x: Tensor, bounds: tuple[float, float]) -> "Region":
        x = x.to(torch.float64)
        return cls(x, torch.full_like(x, bounds[0]), torch.full_like(x, bounds[1]), inf, inf)

    @classmethod
    def ball(cls, x: Tensor, p: float, radius: float, bounds: tuple[float, float]) -> "Region":
        """Return the ball around x (1, *shape), cut to the data range."""
        x = x.to(torch.float64)
        return cls(x, (x - radius).clamp(*bounds), (x + radius).clamp(*bounds), p, radius)

    def highest(self, rows: Tensor, constant: Tensor) -> Tensor:
        """Return the largest value (M,) that planes rows·x + constant take here, widened for rounding."""
        lower, upper = self.lower.flatten(1), self.upper.flatten(1)
        corner = torch.where(rows > 0, upper, lower)
        top = (rows * corner).sum(1)
        if self.p != inf:
            at_centre = rows @ self.x.flatten()
            top = torch.minimum(top, at_centre + self.radius * dual_norm(rows, self.p))
        wide = (rows.abs() * corner.abs()).sum(1) + constant.abs()
        return top + constant + (ROUNDING + rows.shape[1] * 2.0**-52) * wide


def norm(x: Tensor, p: float) -> Tensor:
    """Return the p-norm of each row (N,) of x (N, ...)."""
    found: Tensor = torch.linalg.vector_norm(x.flatten(1), p, dim=1)
    return found


def dual_norm(x: Tensor, p: float) -> Tensor:
    """Return the norm dual to p of each row: inf for 1, 2 for 2, 1 for inf."""
    return norm(x, {1: inf, 2: 2, inf: 1}[p])


def farthest(x: Tensor, bounds: tuple[float, float], p: float) -> Tensor:
    """Return the largest distance (N,) from x to an image in the data range."""
    low, high = bounds
    return norm(torch.maximum(x - low, high - x), p)


def ratio(distance: Tensor, size: Tensor | float) -> Tensor:
    """Return distance / size (N,): infinite where f does not move at all, 0 where r′ is r."""
    size = torch.as_tensor(size, dtype=distance.dtype, device=distance.device)
    return torch.where(distance > 0, distance / size, torch.zeros_like(distance))


Kind = Literal["local", "global", "box", "reach", "residual", "empirical"]

SCOPE = (
    "It speaks only of a server that answers with an image X′ whose representation f(X′) is the perturbed r′. "
    "A server that leaves the defended tensor out, reads the zeroed entries off it, or uses other layers' gradients "
    "does not need f(X′) = r′ and is not bounded by this figure."
)
RANGE = "Every image lies in the data range [{}, {}]."
ROUNDED = (
    "r′ is the representation as the model computes it, in {}: sums of n terms rounded to within n units of the last "
    "place, in any order; that error is taken off. The bound itself is computed in float64 with a margin of its own."
)
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
    precision: Precision | None = None  # of the model where it ran; None: as it is

    @classmethod
    def make(
        cls, model: nn.Module, layer: str | None, x: Tensor, r_perturbed: Tensor, p: float, **settings: object
    ) -> "Problem":
        """Check the arguments and return the problem, on the CPU: bounds are computed in float64 there."""
        model = getattr(model, "_orig_mod", model)  # a compiled model: what was compiled
        name = find_layer(model, None if layer is None else layer.removeprefix("_orig_mod."))
        _check_numbers(x, r_perturbed)
        precision = Precision.of(model, x.dtype)
        if any(p.device.type != "cpu" for p in model.parameters()):
            model = copy.deepcopy(model).cpu()
        x, r_perturbed = x.cpu(), r_perturbed.cpu().detach().flatten(1)
        problem = cls(model, name, x, r_perturbed, check_p(p), precision=precision, **settings)  # type: ignore[arg-type]
        low, high = problem.bounds
        if not (isfinite(low) and isfinite(high)):
            raise CertificateError(
                f"The data range [{low}, {high}] has no end. Pass bounds=(low, high) with finite ones."
            )
        if not bool(((x >= low) & (x <= high)).all()):
            raise CertificateError(f"Some inputs lie outside the data range [{low}, {high}]. Pass bounds=(low, high).")
        if problem.residual is not None and not bool((problem.residual >= 0).all()):
            raise CertificateError("residual=...: give a distance, 0 or more, for every input.")
        return problem

    @property
    def size(self) -> int:
        return self.x[0].numel()

    def check_function(self) -> None:
        """Raise unless the part before the layer maps each image by itself, the same at every call, and has slopes."""
        f = prefix(self.model, self.layer)
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm)]
        if any(norm.training or norm.running_mean is None for norm in norms):
            raise CertificateError(
                "Batch norm by the batch's own statistics makes an image's representation hang on the others. Call "
                "model.eval() first, and keep running statistics."
            )
        with torch.no_grad(), torch.random.fork_rng([]):
            first = f(self.x)
            torch.rand(1)  # another state; f leaves it as it was
            again = f(self.x)
        if not torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True):
            raise CertificateError(
                "The forward pass draws random numbers, so no image has one representation. Certify a model that draws "
                "none; dropout layers are taken for switched off."
            )
        two = torch.cat([self.x[:1], sum(self.bounds) - self.x[:1]])
        FunctionJacobian(self.model, self.layer, two).check_examples()

    @cached_property
    def chain(self) -> StepChain:
        """The part of the model before the layer, as a chain."""
        chain = step_chain(self.model, self.layer, self.x, self.bounds)
        if self.precision is not None:
            chain = replace(chain, precision=self.precision)
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

    @cached_property
    def norms(self) -> list[Norm]:
        return [operator_norm(step, self.p) for step in self.chain.steps]

    @cached_property
    def rounding(self) -> tuple[Tensor, float]:
        """e (N,) and t: what the model computes at X′ is within e + t ||X - X′||_p of f(X′), in the p-norm."""
        return forward_error(self.chain.steps, self.norms, self.x, self.p, self.chain.precision)

    @property
    def allowed(self) -> Tensor:
        """The residual (N,) that the server's answer may leave: as given, and what a coarser type made of r′."""
        given = torch.zeros(len(self.x), dtype=torch.float64) if self.residual is None else self.residual.double()
        unit = Precision.exactly(self.r_perturbed.dtype).entry
        return given + unit * norm(self.r_perturbed.double(), self.p) if unit > self.chain.precision.entry else given

    def nearest(self, lip: float) -> Tensor:
        """Return the bound (N,) that a Lipschitz constant gives: ||r - r′|| - tau <= lip D + e + t D at distance D."""
        e, t = self.rounding
        return ratio((self.distance - self.allowed - e).clamp_min(0), lip + t)

    def stated(self, *sentences: str) -> tuple[str, ...]:
        """Return the assumptions of a sound bound: what it is for, the given sentences, how it was rounded."""
        modes = (EVAL,) if has_modes(self.model) else ()
        return (SCOPE, *sentences, *modes, ROUNDED.format(self.chain.precision.name))


def _check_numbers(x: Tensor, r_perturbed: Tensor) -> None:
    if not len(x):
        raise CertificateError("There are no inputs to certify.")
    if len(x) != len(r_perturbed):
        raise CertificateError(f"There are {len(x)} inputs and {len(r_perturbed)} representations.")
    for name, given in (("Inputs", x), ("Representations", r_perturbed)):
        if not given.is_floating_point():
            raise CertificateError(f"{name} are {given.dtype}; a distance needs real numbers. Pass x.float().")
    if not bool(r_perturbed.isfinite().all()):
        raise CertificateError("r_perturbed holds NaN or infinite values, which no image has.")


def largest_mse(x: Tensor) -> Tensor:
    """Return the largest mean squared error (N,) that any image in [0, 1] can have to x."""
    return farthest(x.to(torch.float64), (0.0, 1.0), 2) ** 2 / x[0].numel()


def blind_mse(x: Tensor, mean_image: Tensor) -> Tensor:
    """Return the mean squared error (N,) of answering with the mean image: what a server that saw nothing gets."""
    return ((x - mean_image.reshape(1, *x.shape[1:])) ** 2).flatten(1).mean(1)
