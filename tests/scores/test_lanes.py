"""The compiled kernel gives what torch gives, for any chain it takes; without it all goes on."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from gradveil.models import build
from gradveil.scores import library, row_norms
from gradveil.scores.api import linearise
from gradveil.scores.exact import exact_rows
from gradveil.scores.lanes import lanes_rows
from gradveil.scores.tape import Tape
from reference.score_models import make

PS = (2.0, 1.0, inf)
needs_kernel = pytest.mark.skipif(library.library() is None, reason="the compiled kernel was not built")
CHAINS = ["linear", "strided", "even", "pooled", "batch norm", "dropout", "branching", "wide", "convolution defended"]


def _tape(model: nn.Module, layer: str, x: Tensor) -> Tape:
    tape = linearise(model.float(), layer, x.float())
    assert isinstance(tape, Tape)
    return tape


def _check(tape: Tape) -> None:
    found = lanes_rows(tape, PS, 2**24)
    assert found is not None, "the kernel did not take this chain"
    expected = exact_rows(tape, PS, 2**24)
    for p in PS:
        scale = expected.norms[p].amax(dim=1, keepdim=True)
        assert_close(found.norms[p] / scale, expected.norms[p] / scale, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.r, expected.r)


@needs_kernel
@pytest.mark.parametrize("name", CHAINS)
def test_the_kernel_agrees_with_torch(name: str) -> None:
    _check(_tape(*make(name, examples=4)))


@needs_kernel
@pytest.mark.parametrize(
    ("spec", "layer"),
    [
        ("lenet", "fc"), ("lenet:activation=relu,normalize=half", "fc"), ("lenet:batchnorm=true,activation=tanh", "fc"),
        ("leaknet", "fc1"), ("leaknet", "fc2"), ("leaknet", "fc3"), ("probe", "fc"),
    ],
)  # fmt: skip
def test_the_kernel_agrees_with_torch_on_the_papers_networks(spec: str, layer: str) -> None:
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    _check(_tape(build(spec, (3, 32, 32), 10), layer, x))


@needs_kernel
def test_the_kernel_agrees_with_torch_on_grey_images_of_odd_sizes() -> None:
    x = torch.rand(2, 1, 27, 21, generator=torch.Generator().manual_seed(0))
    _check(_tape(build("lenet", (1, 27, 21), 10), "fc", x))


sizes = st.tuples(st.integers(5, 9), st.integers(5, 9))
kernels, strides, paddings = (st.tuples(st.integers(a, b), st.integers(a, b)) for a, b in ((1, 4), (1, 3), (0, 2)))


@needs_kernel
@given(
    channels=st.tuples(*[st.integers(1, 19)] * 3), size=sizes, kernel=kernels, stride=strides, padding=paddings,
    dilation=st.integers(1, 2), second=st.integers(1, 3), pool=st.sampled_from([None, (2, 2, 0), (2, 1, 1), (3, 2, 1)]),
)  # fmt: skip
def test_the_kernel_takes_any_geometry(channels, size, kernel, stride, padding, dilation, second, pool) -> None:  # type: ignore[no-untyped-def]
    needed = [-(-(dilation * (k - 1) + 1 - n) // 2) for k, n in zip(kernel, size, strict=True)]
    padding = tuple(map(max, padding, needed))
    a, b, c = channels
    layers = [nn.Conv2d(a, b, kernel, stride, padding, dilation), nn.Tanh()]
    layers += [nn.MaxPool2d(*pool)] if pool else []
    layers += [nn.Conv2d(b, c, second, 1, second - 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(1, 2)]
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers), torch.rand(2, a, *size)
    try:
        with torch.no_grad():
            model[:-1](x)
    except RuntimeError:
        return  # pooled to nothing
    tape = _tape(model, str(len(layers) - 1), x)
    if tape.r[0].numel() <= 8 * x[0].numel():
        _check(tape)


@needs_kernel
def test_threads_share_the_work_and_change_nothing() -> None:
    tape = _tape(build("lenet", (3, 32, 32), 10), "fc", torch.rand(3, 3, 32, 32))
    alone = lanes_rows(tape, PS, 2**24)
    torch.set_num_threads(3)
    try:
        together = lanes_rows(tape, PS, 2**24)
    finally:
        torch.set_num_threads(1)
    assert alone is not None
    assert together is not None
    assert all(torch.equal(alone.norms[p], together.norms[p]) for p in PS)


@needs_kernel
def test_tiny_gradients_are_left_to_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e-25)
    assert lanes_rows(_tape(model, "1", torch.ones(1, 3)), (2.0,), 2**24) is None


@needs_kernel
def test_double_precision_is_left_to_torch() -> None:
    tape = linearise(*make("even"))
    assert isinstance(tape, Tape)
    assert lanes_rows(tape, (2.0,), 2**24) is None


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("name", CHAINS)
def test_without_the_kernel_scores_are_the_same(name: str) -> None:
    model, layer, x = make(name)
    expected = row_norms(model, layer, x, "exact")[1]
    found = row_norms(model.float(), layer, x.float(), "exact")[1].double()
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
