"""The compiled kernel gives what torch gives, for any chain it takes; without it all goes on."""

import platform
import runpy
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from gradveil.imports import VARIANTS
from gradveil.models import build
from gradveil.representation import cpu_kernel
from gradveil.representation.cpu_kernel import lanes_rows, pieces_of
from gradveil.representation.jacobian import Tape
from gradveil.representation.rows import Start, exact_rows
from gradveil.representation.scores import linearise, row_norms
from reference.score_models import make

PS = (2.0, 1.0, inf)
needs_kernel = pytest.mark.skipif(cpu_kernel.library() is None, reason="the compiled kernel was not built")
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
        scale = expected.norms[p].amax(dim=1, keepdim=True).clamp_min(1e-6)  # 0 where dropout leaves nothing
        assert_close(found.norms[p] / scale, expected.norms[p] / scale, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.r, expected.r)
    alone = lanes_rows(tape, (2.0,), 2**24)  # the 2-norm by itself may take the shorter way
    assert alone is not None
    assert_close(alone.norms[2.0], found.norms[2.0], rtol=1e-5, atol=1e-6)


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


@pytest.fixture
def gram_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make rows stop before that piece, whatever it costs."""

    def force(at: int) -> None:
        def split(shapes: tuple[cpu_kernel.PieceShape, ...], rows: int, width: int) -> cpu_kernel.RowSplit | None:
            return cpu_kernel._split(shapes, at, width)

        monkeypatch.setattr(cpu_kernel, "best_split", split)

    return force


def test_rows_stop_halfway_where_that_saves_work() -> None:
    pieces = _shapes(build("lenet", (3, 32, 32), 10), "fc", torch.rand(1, 3, 32, 32))
    split = cpu_kernel.best_split(pieces, 768, 16)
    assert split is not None
    assert split.at == 2
    assert sum(split.blocks) == 1000  # of 64 x 65 / 2 pairs of places
    assert cpu_kernel.best_split(pieces, 16, 16) is None  # too few rows for a matrix to pay


def _shapes(model: nn.Module, layer: str, x: Tensor) -> tuple[cpu_kernel.PieceShape, ...]:
    tape = _tape(model, layer, x)
    found = pieces_of(tape, Start.of(tape).node)
    assert found is not None
    return tuple(map(cpu_kernel.PieceShape.of, found))


@needs_kernel
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.tuples(*[st.integers(1, 19)] * 4), size=sizes, kernel=kernels, stride=strides, padding=paddings,
    dilation=st.integers(1, 2), at=st.integers(1, 2), examples=st.integers(1, 5),
)  # fmt: skip
def test_norms_from_a_gram_matrix_halfway_are_the_same(  # type: ignore[no-untyped-def]
    gram_before, channels, size, kernel, stride, padding, dilation, at, examples
) -> None:
    gram_before(at)
    a, b, c, d = channels
    needed = [-(-(dilation * (k - 1) + 1 - n) // 2) for k, n in zip(kernel, size, strict=True)]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(a, b, kernel, stride, tuple(map(max, padding, needed)), dilation), nn.Tanh(),
        nn.Conv2d(b, c, 2, 1, 1), nn.Sigmoid(), nn.Conv2d(c, d, 3, 1, 1), nn.Flatten(), nn.Linear(1, 2),
    )  # fmt: skip
    tape = _tape(model, "6", torch.rand(examples, a, *size))
    if tape.r[0].numel() > 8 * tape.x[0].numel():
        return
    found = lanes_rows(tape, (2.0,), 2**24)
    assert found is not None
    assert_close(found.norms, exact_rows(tape, (2.0,), 2**24).norms, rtol=2e-5, atol=1e-6)


@needs_kernel
def test_small_differences_of_large_sums_are_not_left_to_the_gram_matrix(gram_before: Callable[[int], None]) -> None:
    gram_before(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2)).double()
    with torch.no_grad():
        model[0].weight[1] = model[0].weight[0]
        model[1].weight[:, 1] = -model[1].weight[:, 0] * (1 + 1e-3 * torch.rand(3, 3, 3))
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    expected = row_norms(model, "3", x, "exact")[1]
    found = lanes_rows(_tape(model, "3", x), (2.0,), 2**24)
    assert found is not None
    assert_close(found.norms[2.0].double(), expected, rtol=1e-3, atol=0)


@needs_kernel
def test_threads_share_the_work_and_change_nothing() -> None:
    tape = _tape(build("lenet", (3, 32, 32), 10), "fc", torch.rand(3, 3, 32, 32))
    for ps in (PS, (2.0,)):
        alone = lanes_rows(tape, ps, 2**24)
        torch.set_num_threads(3)
        try:
            together = lanes_rows(tape, ps, 2**24)
        finally:
            torch.set_num_threads(1)
        assert alone is not None
        assert together is not None
        assert all(torch.equal(alone.norms[p], together.norms[p]) for p in ps)


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
    monkeypatch.setattr(cpu_kernel, "library", lambda: None)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("name", CHAINS)
def test_without_the_kernel_scores_are_the_same(name: str) -> None:
    model, layer, x = make(name)
    expected = row_norms(model, layer, x, "exact")[1]
    found = row_norms(model.float(), layer, x.float(), "exact")[1].double()
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_nothing_is_compiled_for_the_building_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(pytest.importorskip("setuptools"), "setup", given.update)
    runpy.run_path(str(Path(__file__).parents[3] / "setup.py"))
    for stem in ("_cpu_kernel_", "_gaussian_"):
        some = [ext for ext in given["ext_modules"] if stem in ext.name]
        flags = {ext.name.rpartition(stem)[2]: ext.extra_compile_args for ext in some}
        assert list(flags) == [name for name in VARIANTS if name in flags]
        assert not [flag for some in flags.values() for flag in some if "-march" in flag or "native" in flag]
        assert not [flag for flag in flags["plain"] if flag.startswith("-m")]  # any processor of the family


@needs_kernel
def test_every_library_that_this_processor_runs_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    built = [n for n in VARIANTS if list(Path(cpu_kernel.__file__).parent.glob(f"_cpu_kernel_{n}.*"))]
    assert built == list(VARIANTS if platform.machine() == "x86_64" else ("plain",))
    run = [name for name in cpu_kernel.variants() if name]
    assert run == [name for name in built if name in run]  # the best first
    assert "plain" in run
    tapes = [_tape(*make(name, examples=4)) for name in CHAINS]
    for name in run:
        monkeypatch.setattr(cpu_kernel, "library", lambda name=name: cpu_kernel.variants()[name])
        for tape in tapes:
            _check(tape)
