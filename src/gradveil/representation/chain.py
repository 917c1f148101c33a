"""Read the part of a model before a layer as a chain of known steps, whatever its modules are called.

The forward pass is run once on an example and the operations it performs are written down; those that lie
between the input and the layer must form one chain of linear maps, poolings and activations. Then the chain is
compared with the model, on the inputs and on other points of the data range.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, prod

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gradveil.errors import CertificateError
from gradveil.modules import copied_state, find_layer, input_of
from gradveil.representation.norms import Precision, forward_error, operator_norm
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
