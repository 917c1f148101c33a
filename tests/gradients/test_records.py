"""Gradients of records: the fast way gives what each record alone gives, and what mixes records is refused."""

import pytest
import torch
from torch import Tensor, nn

from gradveil.errors import DefenseError
from gradveil.losses import CROSS_ENTROPY, build
from gradveil.protection.capture import _one_by_one, records_of
from gradveil.protection.records import Captured, Held, InParts, Records
from gradveil.types import Batch

N = 6


class Words(nn.Module):
    """Embedded words, a layer on each, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.each, self.norm = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 8), nn.LayerNorm(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.each(self.table(x)).relu()).mean(1))
        return out


class Twice(nn.Module):
    """A layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.inner(x.mean((1, 2))).tanh()))
        return out


class Turned(nn.Module):
    """A layer whose first dimension is not the records', though there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(12, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(x.mean(1)[:, :N].transpose(0, 1)).relu().mean(0))
        return out


class Mixed(nn.Module):
    """Each record less the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x.mean((1, 2)) - x.mean((0, 1, 2)))
        return out


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]


MODELS = {
    "chain": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5)),
    "paddings": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 4, padding="same", dilation=2), nn.InstanceNorm2d(8, affine=True),
        nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect", stride=2), nn.BatchNorm2d(6).eval(), *head(6)),
    "ghost": lambda: nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(40, 48, 3, padding=1),
        nn.LayerNorm([48, 3, 3]), nn.Conv2d(48, 48, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(432, 5)),
    "positions": lambda: nn.Sequential(
        nn.Linear(12, 30), nn.RMSNorm(30), nn.GELU(), nn.Linear(30, 4), nn.Flatten(), nn.Linear(4 * 36, 5)),
    "signal": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 8, 3, stride=2, padding=1, bias=False), nn.Tanh(), nn.Conv1d(8, 4, 5, groups=4),
        nn.Flatten(), nn.LayerNorm(272), nn.Linear(272, 5)),
    "words": Words,
    "twice": Twice,
    "turned": Turned,
}  # fmt: skip
SLOW = ("twice", "turned")


def batch_for(name: str, rng: torch.Generator) -> Batch:
    x = torch.rand(N, 3, 12, 12, generator=rng, dtype=torch.float64)
    x = torch.randint(0, 20, (N, 9), generator=rng) if name == "words" else x
    return Batch(x, torch.arange(N) % 5)


def alike(fast: Records, slow: Records, model: nn.Module, rng: torch.Generator) -> None:
    directions = {n: torch.randn(4, *p.shape, generator=rng).double() for n, p in model.named_parameters()}
    weights = torch.rand(N, generator=rng).double()
    weights[2] = 0
    torch.testing.assert_close(fast.square_norms(), slow.square_norms())
    torch.testing.assert_close(fast.along(directions), slow.along(directions))
    torch.testing.assert_close(fast.weighted_sum(weights), slow.weighted_sum(weights))


@pytest.mark.parametrize("name", MODELS)
def test_the_fast_way_is_the_slow_one(name: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = MODELS[name]().double(), batch_for(name, rng)
    fast, slow = records_of(model, batch, CROSS_ENTROPY), _one_by_one(model, batch, CROSS_ENTROPY)
    assert isinstance(fast, Held if name in SLOW else Captured)
    alike(fast, slow, model, rng)
    monkeypatch.setattr("gradveil.protection.capture.HELD", 1)
    parts = _one_by_one(model, batch, CROSS_ENTROPY)
    assert isinstance(parts, InParts)
    alike(parts, slow, model, rng)


@pytest.mark.parametrize("fast", [True, False])
def test_a_record_of_weight_zero_never_counts(fast: bool, model: nn.Module, batch: Batch) -> None:
    spoilt = Batch(batch.inputs.clone(), batch.labels)
    spoilt.inputs[1] = float("nan")
    way = records_of if fast else _one_by_one
    records = way(model, spoilt, CROSS_ENTROPY)
    assert records.square_norms().isfinite().tolist() == [True, False, True]
    clean = way(model, batch, CROSS_ENTROPY).weighted_sum(torch.tensor([0.5, 0, 1]))
    torch.testing.assert_close(records.weighted_sum(torch.tensor([0.5, 0, 1])), clean)


@pytest.mark.parametrize(
    ("layers", "loss", "said"),
    [
        ([nn.BatchNorm2d(3), *head(3)], "cross_entropy", "batch norm in train mode"),
        ([nn.InstanceNorm2d(3, track_running_stats=True), *head(3)], "cross_entropy", "running statistics"),
        (head(3), "cross_entropy:weights=1/2/1/1/1", "not known to be a mean"),
        ([Mixed()], "cross_entropy", "depends on the others"),
    ],
)
def test_what_mixes_records_is_refused(layers: list[nn.Module], loss: str, said: str, rng: torch.Generator) -> None:
    model = nn.Sequential(*layers).double()
    with pytest.raises(DefenseError, match=said):
        records_of(model, batch_for("", rng), build(loss))


class Gate(nn.Module):
    """Mixes the examples of a batch as far as a weight or a buffer says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "weight":
            self.alpha = nn.Parameter(torch.zeros(1))
        else:
            self.register_buffer("alpha", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.alpha * x.mean(0, keepdim=True)


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_a_gate_that_is_opened_after_the_first_look_is_seen(kind: str, rng: torch.Generator) -> None:
    model, batch = nn.Sequential(Gate(kind), *head(3)).double(), batch_for("", rng)

    def two_rounds() -> None:
        for alpha in (0.0, 1.0):
            model[0].alpha.data.fill_(alpha)  # type: ignore[union-attr, operator]
            records_of(model, batch, CROSS_ENTROPY)

    with pytest.raises(DefenseError, match="depends on the others"):
        two_rounds()


def test_dropout_is_not_taken_for_mixing(rng: torch.Generator) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), *head(4)).double()
    assert isinstance(records_of(model, batch_for("", rng), CROSS_ENTROPY), Captured)


def test_the_fast_way_is_compared_without_tf32_which_could_make_a_right_one_look_wrong() -> None:
    model, rounds = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), []
    model.register_forward_pre_hook(lambda *_: rounds.append(torch.backends.cudnn.allow_tf32))
    before = torch.backends.cudnn.allow_tf32
    records_of(model, Batch(torch.rand(N, 12), torch.arange(N) % 5), CROSS_ENTROPY)
    assert not any(rounds[:-1])
    assert rounds[-1] == before  # the gradients themselves are as the user wants them
