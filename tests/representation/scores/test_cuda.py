"""What is made for CUDA: matrix products (checked on any machine) and replay (where there is a device)."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from gradveil.representation import scores as api
from gradveil.representation import scores as cuda
from gradveil.representation.jacobian import Tape
from gradveil.representation.matrices import paired_rows
from gradveil.representation.recorder import walkable
from gradveil.representation.rows import RowNorms, exact_rows
from gradveil.representation.scores import _RECORDINGS, METHODS, Method, Recording, leak_scores, linearise, row_norms
from reference.score_models import BUILDERS, make

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CHAINS = {
    "one": nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(60, 2)),
    "two, with scales that differ in sign": nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 3, 2, 1), nn.BatchNorm2d(2), nn.Flatten(),
        nn.Linear(24, 2),
    ),
    "three, one of them linear": nn.Sequential(
        nn.Conv2d(2, 3, 3, 1, 1), nn.Conv2d(3, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(48, 2),
    ),
    "linear": nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(30, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("memory", [1, 2**20])
def test_products_of_pairs_give_the_same_norms(name: str, memory: int) -> None:
    model = CHAINS[name].double().eval()
    with torch.no_grad():
        for part in model:
            if isinstance(part, nn.BatchNorm2d):
                part.weight.copy_(torch.linspace(-1.0, 0.9, len(part.weight)))
    last = str(len(model) - 1)
    tape = linearise(model, last, torch.rand(3, 2, 9, 7, dtype=torch.float64))
    assert isinstance(tape, Tape)
    found = paired_rows(tape, (2.0,), memory)
    assert found is not None
    expected = exact_rows(tape, (2.0,), 2**20)
    assert_close(found.norms, expected.norms)
    assert_close(found.r, expected.r)
    assert paired_rows(tape, (2.0, 1.0), memory) is None


@pytest.mark.parametrize("name", ["pooled", "residual", "grouped", "linear"])
def test_other_models_are_left_to_the_general_way(name: str) -> None:
    tape = linearise(*make(name))
    assert isinstance(tape, Tape)
    assert paired_rows(tape, (2.0,), 2**20) is None


def test_entries_in_other_rows_of_an_image_are_left_to_the_general_way() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Unflatten(1, (4, 3, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    ).double()
    tape = linearise(model, "5", torch.rand(2, 1, 5, 6, dtype=torch.float64))
    assert isinstance(tape, Tape)
    assert paired_rows(tape, (2.0,), 2**20) is None


class _Fake(Recording):
    """Stands for a recording where there is no device: it makes the call again, and counts."""

    made: ClassVar[int] = 0
    replays: ClassVar[int] = 0

    @classmethod
    def of(cls, run: Callable[[Tensor], RowNorms], x: Tensor, kept: tuple[Tensor, ...]) -> "Recording":
        _Fake.made += 1
        found = cls(None, x, run(x), kept)  # type: ignore[arg-type]
        object.__setattr__(found, "run", run)
        return found

    def __call__(self, x: Tensor) -> RowNorms:
        _Fake.replays += 1
        return self.run(x)  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, no_device: None) -> type[_Fake]:
    monkeypatch.setattr(cuda.Recording, "of", _Fake.of)
    _Fake.made = _Fake.replays = 0
    return _Fake


def _replayed(model: nn.Module, layer: str, x: Tensor, name: str = "exact") -> Tensor:
    layers = walkable(model, layer, x)
    assert layers is not None
    return cuda.replayed(model, layers, x, Method(name)).norms[2.0]


@pytest.mark.parametrize("name", ["exact", "moment", "sketch", "auto"])
def test_a_call_is_recorded_at_second_sight_and_replayed_from_then_on(fake: type[_Fake], name: str) -> None:
    model, layer, x = make("even")
    found = [_replayed(model, layer, x, name) for _ in range(4)]
    assert (fake.made, fake.replays) == (1, 3)
    assert_close(found, [row_norms(model, layer, x, name)[1]] * 4)


def test_another_shape_other_settings_or_moved_weights_are_another_call(fake: type[_Fake]) -> None:
    model, layer, x = make("even")
    for _ in range(3):
        _replayed(model, layer, x)
    _replayed(model, layer, x[:2])
    _replayed(model, layer, x, "moment")
    model[0].stride = (1, 1)
    _replayed(model, layer, x)
    model[0].stride = (2, 2)
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    assert_close(_replayed(model, layer, x), row_norms(model, layer, x, "exact")[1])
    assert (fake.made, fake.replays) == (1, 2)


def test_only_a_few_recordings_are_kept(fake: type[_Fake]) -> None:
    model, layer, x = make("even", examples=9)
    for examples in range(1, 9):
        for _ in range(2):
            _replayed(model, layer, x[:examples])
    assert len(_RECORDINGS[model]) == 4


def test_what_takes_long_is_never_recorded(fake: type[_Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    model, layer, x = make("even")
    monkeypatch.setattr(api, "_LIGHT", 1)
    for _ in range(3):
        _replayed(model, layer, x)
    assert fake.made == 0


@pytest.mark.usefixtures("no_device")
def test_a_call_that_cannot_be_recorded_is_made_plainly_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*_: object) -> Recording:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda.Recording, "of", fail)
    model, layer, x = make("even")
    for _ in range(4):
        assert_close(_replayed(model, layer, x), row_norms(model, layer, x, "exact")[1])
    assert len(tried) == 1


@pytest.fixture
def rounded() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("method", [m for m in METHODS if m != "moment"])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_cuda_agrees_with_the_cpu(name: str, method: str) -> None:
    model, layer, x = make(name)
    model.eval()
    expected = leak_scores(model, layer, x, method)
    model = model.cuda()
    for _ in range(3):  # the second call records, the third replays
        assert_close(leak_scores(model, layer, x.cuda(), method).cpu(), expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("method", ["exact", "moment", "sketch"])
def test_a_replayed_call_sees_new_inputs_and_new_weights(method: str) -> None:
    model, layer, x = make("even")
    model, x = model.cuda(), x.cuda()
    for _ in range(3):
        leak_scores(model, layer, x, method)
    assert any(isinstance(kept, Recording) for kept in _RECORDINGS[model].values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    other = x.flip(0) * 0.9
    expected = leak_scores(model.cpu(), layer, other.cpu(), method)
    assert_close(leak_scores(model.cuda(), layer, other, method).cpu(), expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("rounded")
def test_rounded_products_stay_within_a_thousandth() -> None:
    model, layer, x = make("even")
    model, x = model.float(), x.float()
    expected = leak_scores(model, layer, x, "exact")
    model = model.cuda()
    for _ in range(3):
        assert_close(leak_scores(model, layer, x.cuda(), "exact").cpu(), expected, rtol=5e-3, atol=0)
