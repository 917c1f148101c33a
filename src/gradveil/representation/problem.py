"""What a bound is computed from: the images, r′, and the part of the model before the layer as a chain of known steps.

The forward pass is run once on an example and the operations it performs are written down, whatever its modules are
called; those that lie between the input and the layer must form one chain of linear maps, poolings and activations.
Then the chain is compared with the model, on the inputs and on other points of the data range.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, prod
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from gradveil.errors import CertificateError
from gradveil.modules import copied_state, find_layer, input_of, prefix
from gradveil.representation.jacobian import FunctionJacobian
from gradveil.representation.norms import (
    ROUNDING,
    Norm,
    Precision,
    check_p,
    farthest,
    forward_error,
    norm,
    operator_norm,
    ratio,
)
from gradveil.representation.recorder import Graph, Operation, record
from gradveil.representation.rules.activations import Pointwise
from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.base import Affine, Operator, Shape, Step
from gradveil.representation.rules.products import Dense
from gradveil.representation.rules.shapes import Reshape
from gradveil.representation.rules.windows import Convolution


@dataclass(frozen=True)
class StepChain:
    """f: x -> r as a list of steps, in float64, with the model in eval mode."""

    steps: tuple[Step, ...]
    in_shape: Shape
    layer: str
    precision: Precision  # in which the model computes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(torch.float64)
        for step in self.steps:
            x = step(x)
        return x.flatten(1)

    @property
    def out_size(self) -> int:
        return self.steps[-1].out_size if self.steps else prod(self.in_shape)

    def __str__(self) -> str:
        return " -> ".join(_label(s) for s in self.steps if not is_reshape(s)) or "identity"


def is_reshape(step: Step) -> bool:
    """Return whether a step only changes the shape, which no norm and no bound looks at."""
    return isinstance(step, Affine) and isinstance(step.operator, Reshape)


def _label(step: Step) -> str:
    if isinstance(step, Pointwise):
        return step.curve.name
    named = step.operator if isinstance(step, Affine) else step
    return "conv" if isinstance(named, Convolution) else type(named).__name__.lower()


def step_chain(model: nn.Module, layer: str | None, x: Tensor, bounds: tuple[float, float] = (0.0, 1.0)) -> StepChain:
    """Return the chain before ``layer`` for inputs like x (N, *shape); refuse a model that is another function."""
    name = find_layer(model, layer)
    twin = _twin(model)
    example = x[:1].detach().to(torch.float64).repeat(2, *[1] * (x.ndim - 1))
    with torch.random.fork_rng([]), _running():
        torch.manual_seed(0)
        graph = record(twin, name, example, everywhere=True)
    if graph.read is not None:
        raise CertificateError(
            f"The forward pass reads values that depend on the input ({graph.read!r}: an if, a float(), an array), so "
            "it may be another function for other inputs. A certificate needs one for all; use kind='local'."
        )
    steps = tuple(_fold(_steps(graph)))
    chain = StepChain(steps, tuple(x.shape[1:]), name, Precision.of(model, x.dtype))
    modes = {path: module.training for path, module in model.named_modules()}
    for path, module in twin.named_modules():
        module.training = modes[path]
    _compare(chain, model, twin, _probes(x.detach(), bounds))
    return chain


@contextmanager
def _running() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise CertificateError(
            f"The model does not run on points of the data range, in float64 and in its own type ({said}). A "
            "certificate needs both; use kind='local'."
        ) from error


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy in float64 and eval mode; weights that a rule computes from others are as the model rounds them."""
    try:
        twin = copy.deepcopy(model).eval()
    except RuntimeError as error:  # weights made by the hooks of an old weight or spectral norm
        raise CertificateError(
            f"The model cannot be copied ({error}). Use torch.nn.utils.parametrizations, or remove the hooks."
        ) from error
    for module in list(twin.modules()):
        if is_parametrized(module):
            _settle(module)
    return twin.to(torch.float64)


def _settle(module: nn.Module) -> None:
    """Make plain parameters of what is parametrised. (torch's own way would reach the original: both share a class.)"""
    names = list(module.parametrizations)  # type: ignore[arg-type]
    values = {name: getattr(module, name).detach().clone() for name in names}
    del module.parametrizations
    module.__class__ = type(module).__bases__[0]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def _probes(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return x and further points of the data range: anywhere, at corners, near x, dark, bright, and grey."""
    count, (low, high), rng = 8, bounds, torch.Generator().manual_seed(0)
    anywhere = torch.rand(count, *x.shape[1:], generator=rng, dtype=torch.float64) * (high - low) + low
    corners = torch.where(anywhere < (low + high) / 2, low, high)
    some = x[torch.arange(count) % len(x)].to(torch.float64)
    scale = 10.0 ** -torch.arange(1, count + 1, dtype=torch.float64).reshape(-1, *[1] * (x.ndim - 1))
    flat = torch.tensor([low, (low + high) / 2, high], dtype=torch.float64).reshape(-1, *[1] * (x.ndim - 1))
    others = [anywhere, corners, some + scale * (corners - some), flat.expand(-1, *x.shape[1:])]
    return torch.cat([x.to(torch.float64), *others])


def _compare(chain: StepChain, model: nn.Module, twin: nn.Module, points: Tensor) -> None:
    """Raise unless the model, and its twin in float64, compute what the chain says, up to rounding, at every call."""
    norms = [operator_norm(step, inf) for step in chain.steps]
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), points.dtype)
    state = copied_state(model)
    double = Precision.exactly(torch.float64)
    # The twin runs as it is, twice, so that a state which changes shows; the model is left as it was.
    for computed, given, dtype, precision in [(twin, {}, torch.float64, double)] * 2 + [
        (model, state, own, chain.precision)
    ]:
        at = points.to(dtype)
        with torch.random.fork_rng([]), torch.no_grad(), _running():
            torch.manual_seed(1)  # not as recorded: what is drawn at random must not agree by chance
            r = input_of(computed, chain.layer, at.clone(), given).flatten(1).to(torch.float64)
        expected = chain(at)
        allowed, _ = forward_error(chain.steps, norms, at, inf, precision)
        off = torch.linalg.vector_norm(r - expected, inf, dim=1) if r.shape == expected.shape else allowed * inf
        if not bool((off <= allowed).all()):
            raise CertificateError(_differs(model, r, expected))
    if not all(torch.equal(kept, state[name]) for name, kept in model.named_buffers()):
        raise CertificateError(_differs(model, r, expected))


def _differs(model: nn.Module, r: Tensor, expected: Tensor) -> str:
    if any(module.training for module in model.modules()):
        return (
            "The model is in training mode, where batch norm, dropout and the like make it another function than the "
            "one a certificate is about. Call model.eval() first."
        )
    far = f" by up to {float((r - expected).abs().max()):.3g}" if r.shape == expected.shape else ""
    return (
        f"The layers that were recorded are not the whole model: on other inputs it computes something else{far} "
        "(a branch, a state that changes, examples that mix, or randomness). Certify a layer before it, or use "
        "kind='local'."
    )


def _steps(graph: Graph) -> list[Step]:
    if graph.end is None:
        raise CertificateError("What the layer is fed does not depend on the input, so there is nothing to certify.")
    path: list[Operation] = []
    at = graph.end
    while at:
        operation = graph.operations[at]
        if len(operation.parents) > 1:
            raise CertificateError(
                f"The part before the layer is not a chain: {operation.name!r} joins two paths from the input "
                "(a residual connection or a product). Certify a layer before it, or use kind='local'."
            )
        path.append(operation)
        at = operation.parents[0] if operation.parents else 0
    steps = []
    before = graph.operations[0].shape
    for operation in reversed(path):
        if operation.step is None:
            raise CertificateError(
                f"Cannot walk through {operation.name!r} ({before[1:]} to {operation.shape[1:]}). A certificate knows "
                "chains of linear, convolution, pooling, batch norm (eval) and activation layers; use kind='local' for "
                "others."
            )
        before = operation.shape
        if not (is_reshape(operation.step) and operation.step.in_shape == operation.step.out_shape):
            steps.append(operation.step)
    return steps


def has_modes(model: nn.Module) -> bool:
    """Return whether the model has layers that differ between training and eval."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return any(isinstance(m, kinds) for m in model.modules())


def _fold(steps: Sequence[Step]) -> list[Step]:
    """Join each diagonal map with the linear map beside it, so that its norm is not counted apart."""
    folded: list[Step] = []
    for step in steps:
        joined = _join(folded[-1], step) if folded else None
        if joined is None:
            folded.append(step)
        else:
            folded[-1] = joined
    return folded


def _join(a: Step, b: Step) -> Step | None:
    if not isinstance(a, Affine) or not isinstance(b, Affine):
        return None
    first, second = a.operator, b.operator
    if isinstance(second, Scale) and second.source == second.target:
        offset = a.offset * second.one + b.offset
        terms = a.offset_size * second.one.abs() + b.offset_size
        a = replace(a, offset=offset, terms=terms, joined=a.joined + b.joined + 1)
        if isinstance(first, Scale):
            return replace(a, operator=replace(first, by=(first.one * second.one)[None]))
        factor = _per_channel(second.one, first)
        if factor is None or not isinstance(first, Convolution | Dense):
            return None
        weight = first.weight * factor.reshape(-1, *[1] * (first.weight.ndim - 1))
        return replace(a, operator=replace(first, weight=weight))
    if not isinstance(first, Scale) or first.source != first.target or not isinstance(second, Convolution | Dense):
        return None
    factor = _per_channel(first.one, second)
    if factor is None or (isinstance(second, Convolution) and second.groups > 1):
        return None
    inner, size = (
        b.linear(t.expand(a.out_shape).unsqueeze(0), absolute)[0]
        for t, absolute in ((a.offset, False), (a.offset_size, True))
    )
    weight = second.weight * factor.reshape(1, -1, *[1] * (second.weight.ndim - 2))
    return replace(
        b,
        operator=replace(second, weight=weight),
        offset=inner + b.offset,
        terms=size + b.offset_size,
        joined=a.joined + b.joined + 1,
    )


def _per_channel(factor: Tensor, beside: Operator) -> Tensor | None:
    """Return one factor per channel (first dimension) or per feature (last one); None where it varies otherwise."""
    if not isinstance(beside, Convolution):
        return factor if factor.ndim == 1 else None
    flat = factor.reshape(factor.shape[0], -1)
    return flat[:, 0] if bool((flat == flat[:, :1]).all()) else None


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
