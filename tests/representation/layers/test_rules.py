"""Every rule of the table against automatic differentiation; a rule without a case here is refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from gradveil.representation.recorder import walk
from gradveil.representation.rules.activations import Pointwise
from gradveil.representation.rules.base import PLAIN, RULES, Affine, Call, Operator
from gradveil.representation.rules.products import ByValue

aten = torch.ops.aten
KNOWN = sorted(RULES)  # as the package fills it, before any test adds to it


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """The arguments of one operation; the input is ``x`` wherever it stands among them."""

    args: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,)
    shape: tuple[int, ...] = (2, 2, 4, 6)
    kwargs: dict[str, Any] = field(default_factory=dict)
    like: Callable[..., Any] | None = None  # the same operation in another form, where this one cannot be run here


WEIGHT, BIAS, MEAN, VAR = draw(2).abs(), draw(2) + 1, draw(2) - 1, draw(2).abs() + 0.5
MASK = draw(2, 2, 4, 6) > 0
SEEN = Case(lambda x: (x, [2, 48]))
NORM = (WEIGHT, BIAS, MEAN, VAR)
TRAINING = Case(lambda x: (x, *NORM, False, 0.1, 1e-5), like=aten.native_batch_norm)
EVAL = Case(
    lambda x: (x, *NORM, 0.1, 1e-5), like=lambda x, *rest: aten.native_batch_norm(x, *rest[:4], False, 0.1, 1e-5)
)
CASES: dict[str, Case] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), SEEN),
    "_reshape_alias": Case(lambda x: (x, [2, 48], [48, 1])),
    "unsqueeze": Case(lambda x: (x, 2)),
    "squeeze": Case(lambda x: (x, 1), (3, 1, 4)),
    **dict.fromkeys(("clone", "alias", "contiguous"), Case()),
    "detach": Case(like=lambda x: x),
    "_to_copy": Case(kwargs={"dtype": torch.float64}),
    "permute": Case(lambda x: (x, [0, 3, -3, 2])),
    "transpose": Case(lambda x: (x, 1, -1)),
    "t": Case(shape=(3, 4)),
    "cat": Case(lambda x: ([draw(1, 1, 4, 6).repeat(2, 1, 1, 1), x], 1)),
    "slice": Case(lambda x: (x, 3, -9, 4)),
    "select": Case(lambda x: (x, 2, -1)),
    "unbind": Case(lambda x: (x, 1)),
    "split": Case(lambda x: (x, 4, -1)),
    "split_with_sizes": Case(lambda x: (x, [1, 3], 2)),
    "expand": Case(lambda x: (x, [2, 5, 4]), (2, 1, 4)),
    "constant_pad_nd": Case(lambda x: (x, [1, 0, 2, -1], 0.5)),
    "add": Case(lambda x: (x, draw(4, 1)), kwargs={"alpha": 3}),
    "sub": Case(lambda x: (draw(1, 2, 4, 6), x), kwargs={"alpha": 0.5}),
    "rsub": Case(lambda x: (x, 2.0)),
    "neg": Case(),
    "mul": Case(lambda x: (draw(2, 1, 3), x), (2, 2, 1, 3)),  # the input is broadcast
    "div": Case(lambda x: (x, draw(2, 1, 6))),
    "mean": Case(lambda x: (x, [-1, 1])),
    "sum": Case(lambda x: (x, [2], True)),
    "addmm": Case(lambda x: (draw(5), x, draw(3, 5)), (2, 3)),
    "mm": Case(lambda x: (x, draw(3, 5)), (2, 3)),
    "linear": Case(lambda x: (x, draw(5, 3), draw(5)), (2, 4, 3)),
    "bmm": Case(lambda x: (x, draw(2, 4, 3)), (2, 5, 4)),
    "_softmax": Case(lambda x: (x, -1, False)),
    "_safe_softmax": Case(lambda x: (x, -1)),
    "native_layer_norm": Case(lambda x: (x, [4, 6], draw(4, 6), draw(4, 6), 1e-5)),
    "native_group_norm": Case(lambda x: (x, draw(4), draw(4), 2, 4, 6, 2, 1e-5), (2, 4, 2, 3)),
    "convolution": Case(lambda x: (x, draw(3, 2, 3, 2), draw(3), [2, 3], [1, 1], [1, 1], False, [0, 0], 1)),
    "max_pool2d_with_indices": Case(lambda x: (x, [2, 3], [1, 2], [1, 0], [1, 1], True)),
    "max_pool3d_with_indices": Case(lambda x: (x, [2, 2, 2]), (2, 1, 3, 4, 4)),
    "adaptive_max_pool2d": Case(lambda x: (x, [3, 2])),
    "adaptive_max_pool3d": Case(lambda x: (x, [2, 2, 3]), (2, 1, 3, 4, 4)),
    "avg_pool2d": Case(lambda x: (x, [2, 3], [1, 2], [1, 1], False, False)),
    "_adaptive_avg_pool2d": Case(lambda x: (x, [3, 4])),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), TRAINING),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "_batch_norm_no_update"), EVAL),
    "native_dropout": Case(lambda x: (x, 0.25, True), like=lambda x, *_: (x * MASK / 0.75, MASK)),
    **dict.fromkeys(("sigmoid", "tanh", "relu", "selu", "silu", "mish", "hardswish", "hardsigmoid"), Case()),
    "leaky_relu": Case(lambda x: (x, 0.3)),
    "hardtanh": Case(lambda x: (x, -0.4, 0.9)),
    "softplus": Case(lambda x: (x, 2.0, 1.5)),
    "elu": Case(lambda x: (x, 0.7)),
    "celu": Case(lambda x: (x, 0.7)),
    "gelu": Case(kwargs={"approximate": "none"}),
}


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple | list) else out


def perform(name: str, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Call]:
    """Return the operation as a function of x alone, and the call of it that a recorder would have seen."""
    case = CASES[name]
    function = case.like or getattr(aten, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    args = case.args(x)
    outs = run(*args, **case.kwargs)
    outs = tuple(outs) if isinstance(outs, tuple | list) else (outs,)
    call = Call(run, args, case.kwargs, outs, lambda value: value is x)
    return lambda z: first(run(*case.args(z), **case.kwargs)), call


def matrix(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian of all outputs by all inputs (out, in), by automatic differentiation."""
    whole = torch.autograd.functional.jacobian(f, x)
    return whole.reshape(-1, x.numel())


def check_products(operator: Operator, dense: Tensor, x: Tensor, out: Tensor) -> None:
    t, g, s = draw(3, *x.shape), draw(2, *out.shape), draw(2, *x.shape).abs()
    assert_close(operator.push(t).flatten(1), t.flatten(1) @ dense.T)
    assert_close(operator.pull(g).flatten(1), g.flatten(1) @ dense)
    assert_close(operator.spread(s).flatten(1), s.flatten(1) @ dense.square().T)
    if not isinstance(operator, ByValue):
        assert_close(operator.entrywise(abs).pull(g).flatten(1), g.flatten(1) @ dense.abs())


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_the_maps_at_a_point_are_the_derivative(name: str) -> None:
    x = draw(*CASES[name].shape)
    f, call = perform(name, x)
    edges = RULES[name].edges(call)
    assert edges is not None
    ((source, operator),) = edges
    assert source is x
    check_products(operator, matrix(f, x), x, call.out)


@pytest.mark.parametrize("name", [name for name in KNOWN if RULES[name].step])
def test_a_step_is_the_operation_at_every_point(name: str) -> None:
    shape = CASES[name].shape
    x = draw(1, *shape[1:]).repeat(shape[0], *[1] * (len(shape) - 1))
    f, call = perform(name, x)
    rule = RULES[name]
    edges = rule.edges(call)
    assert rule.step is not None
    assert edges is not None
    step = rule.step(call, edges)
    if name == "t":
        assert step is None  # it mixes examples
        return
    assert step is not None
    for seed in range(3):
        other = draw(*shape) * (seed + 1)
        off = step.curve.off if isinstance(step, Pointwise) else 0.0  # what the model may lie off the curve
        assert_close(step(other), f(other), rtol=1e-7, atol=off + 1e-7)
    assert step(draw(5, *shape[1:])).shape == (5, *step.out_shape)
    if isinstance(step, Affine):
        out = call.out
        dense = matrix(f, x).reshape(*out.shape, *x.shape)[0].select(out.ndim - 1, 0)
        dense = dense.reshape(step.out_size, step.in_size)
        t, g = draw(4, *step.in_shape), draw(4, *step.out_shape)
        for absolute, a in ((False, dense), (True, dense.abs())):
            assert_close(step.linear(t, absolute).flatten(1), t.flatten(1) @ a.T)
            assert_close(step.transposed(g, absolute).flatten(1), g.flatten(1) @ a)


@pytest.mark.parametrize("rest", [(True,), (False,), (True, 5)], ids=["zeros counted", "zeros left out", "divided"])
def test_averages_over_padding_are_as_torch_weighs_them(rest: tuple[Any, ...]) -> None:
    x = draw(2, 2, 4, 6)
    args = [3, 2], [2, 1], [1, 1], False, *rest
    call = Call(aten.avg_pool2d, (x, *args), {}, (aten.avg_pool2d(x, *args),), lambda value: value is x)
    edges = RULES["avg_pool2d"].edges(call)
    assert edges is not None
    check_products(edges[0][1], matrix(lambda z: aten.avg_pool2d(z, *args), x), x, call.out)


LAYERS: dict[type[nn.Module], nn.Module] = {
    nn.Linear: nn.Linear(6, 5),
    nn.Conv2d: nn.Conv2d(2, 3, 3, 2, 1),
    nn.MaxPool2d: nn.MaxPool2d(3, 2, 1),
    nn.Flatten: nn.Flatten(),
    nn.Identity: nn.Identity(),
    nn.Sigmoid: nn.Sigmoid(),
    nn.Tanh: nn.Tanh(),
    nn.ReLU: nn.ReLU(),
}
WALKED = list(PLAIN)


def test_every_plain_layer_has_a_case() -> None:
    assert set(LAYERS) == set(WALKED)


@pytest.mark.parametrize("kind", WALKED, ids=lambda kind: kind.__name__)
def test_a_walked_layer_is_its_forward_pass_and_its_derivative(kind: type[nn.Module]) -> None:
    layer, x = LAYERS[kind].double(), draw(2, 2, 4, 6)
    tape = walk([layer], x)
    assert_close(tape.r, layer(x))
    check_products(tape.nodes[1].edges[0].operator, matrix(layer, x), x, tape.r)
