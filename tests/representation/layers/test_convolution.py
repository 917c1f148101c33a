"""Convolutions as maps: the transpose by phases and the rows put in place, for any geometry."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.windows import Convolution

paddings = st.tuples(st.integers(0, 4), st.integers(0, 4))
dilations = st.tuples(st.integers(1, 3), st.integers(1, 3))
sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
small = st.tuples(st.integers(1, 5), st.integers(1, 5))


def _convolution(size, kernel, stride, padding, dilation=(1, 1), groups=1, dtype=torch.float64):  # type: ignore[no-untyped-def]
    padding = tuple(min(p, 4) for p in padding)
    size = tuple(max(n, d * (k - 1) + 1 - 2 * p) for n, k, p, d in zip(size, kernel, padding, dilation, strict=True))
    weight = torch.randn(2 * groups, 3, *kernel, dtype=dtype)
    x = torch.randn(4, 3 * groups, *size, dtype=dtype)
    y = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    return Convolution(weight, stride, padding, dilation, groups, tuple(x.shape), tuple(y.shape)), x, y


@given(size=sizes, kernel=small, stride=small, padding=paddings, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_transpose_by_phases_is_the_gradient(size, kernel, stride, padding, dtype) -> None:  # type: ignore[no-untyped-def]
    operator, x, y = _convolution(size, kernel, stride, padding, dtype=dtype)
    g = torch.randn_like(y)
    expected = torch.nn.grad.conv2d_input(x.shape, operator.weight, g, operator.stride, operator.padding)
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    assert_close(operator.pull(g[None])[0], expected, **near)
    scale = Scale(torch.rand_like(x), tuple(x.shape), tuple(x.shape))
    assert_close(operator.pull_scaled(g[None], scale)[0], expected * scale.by, **near)
    some_order = operator.pull_any(g[None]).flatten(2).norm(dim=2)[0]
    assert_close(some_order, expected.flatten(1).norm(dim=1), **near)
    assert_close(operator.push(x[None])[0], y, **near)


@given(
    size=sizes,
    kernel=small,
    stride=small,
    dilation=dilations,
    groups=st.integers(1, 2),
)
def test_other_convolutions_transpose_as_well(size, kernel, stride, dilation, groups) -> None:  # type: ignore[no-untyped-def]
    operator, x, y = _convolution(size, kernel, stride, (1, 1), dilation, groups)
    g = torch.randn_like(y)
    expected = torch.nn.grad.conv2d_input(x.shape, operator.weight, g, stride, (1, 1), dilation, groups)
    assert_close(operator.pull(g[None])[0], expected)


@given(
    size=sizes,
    kernel=small,
    stride=small,
    padding=paddings,
    dilation=st.integers(1, 2),
)
def test_rows_are_what_unit_vectors_pull_back_to(size, kernel, stride, padding, dilation) -> None:  # type: ignore[no-untyped-def]
    operator, _, y = _convolution(size, kernel, stride, padding, (dilation, dilation))
    length = y[0].numel()
    units = torch.eye(length, dtype=torch.float64).view(length, 1, *y.shape[1:])
    index = torch.arange(length)[:, None]
    rows = operator.rows(index)
    assert rows is not None
    assert_close(rows, operator.pull(units))
    mixed = torch.stack([index[:, 0], index.flip(0)[:, 0]], dim=1)
    assert_close(operator.rows(mixed)[:, 1], rows[:, 0].flip(0))  # type: ignore[index]
