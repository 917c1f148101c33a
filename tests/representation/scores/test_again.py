"""A pass that was recorded is run again by its calls: the same numbers, on other examples and weights, or none."""

import gc
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.models import build
from gradveil.modules import find_layer, representation
from gradveil.protection.protect import protect
from gradveil.representation.layers.recorder import record
from gradveil.representation.scores import api, leak_scores
from gradveil.representation.scores.fast import replay as again
from gradveil.representation.scores.fast.replay import Program
from reference.score_models import BUILDERS, make

METHOD = "moment"


@pytest.fixture
def recordings() -> Iterator[list[int]]:
    """How many examples each pass had that a recorder looked at."""
    made: list[int] = []

    def counted(model: nn.Module, layer: str, x: Tensor, **settings: bool) -> object:
        made.append(len(x))
        return record(model, layer, x, **settings)

    with patch.object(api, "record", counted):
        yield made


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


@pytest.mark.parametrize(
    "name", [*sorted(set(BUILDERS) - {"instance norm", "branching"}), "resnet18:width=2", "vit_tiny:depth=1"]
)
def test_a_program_gives_the_tape_of_a_new_recording(name: str) -> None:
    if name in BUILDERS:
        model, layer, x = make(name)
    else:
        model, x = build(name, (3, 8, 8), 10).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
        layer = find_layer(model)
    with torch.no_grad():
        program = Program.of(model, record(model, layer, x, calls=True))
        moved(model)
        x = x.flip(0) * 0.9
        fresh = record(model, layer, x).linearise()
        assert program is not None
        with torch.random.fork_rng():
            tape = program(x)
    assert tape is not None
    assert not isinstance(fresh, str)
    assert torch.equal(tape.r, fresh.r)
    assert torch.equal(tape.spread(), fresh.spread())
    assert torch.equal(
        tape.pull(torch.ones(1, *tape.r.shape).double()), fresh.pull(torch.ones(1, *tape.r.shape).double())
    )


class Switching(nn.Module):
    """Does something else when it is told to, which no weight shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.fc = nn.Linear(4, 6), nn.Linear(6, 3)
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.by * self.a(x)))
        return out


def test_one_recording_serves_all_steps_of_a_guarded_loop(recordings: list[int]) -> None:
    model, plain = Switching(), Switching()
    plain.load_state_dict(model.state_dict())
    x, y = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with protect(net, f"representation:share=0.4,method={METHOD}"):
            for _ in range(4):
                if net is plain:
                    again._PROGRAMS.clear()
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
    assert recordings == [5] + [5] * 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_model_that_does_something_else_is_recorded_anew(recordings: list[int]) -> None:
    model, x = Switching(), torch.rand(3, 4)
    for by in (1.0, 1.0, 3.0, 3.0):
        model.by = by
        found = leak_scores(model, "fc", x, METHOD, seen=representation(model, "fc", x))
        assert torch.allclose(found, leak_scores(model, "fc", x, METHOD))
    assert recordings == [3] * 6  # four without anything seen, one at first, one when it changed


def test_other_shapes_and_modes_are_other_passes(recordings: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Sequential(nn.Tanh(), nn.Hardswish()), nn.Linear(6, 3))
    x = torch.rand(4, 4)
    for mode, count in ((True, 4), (True, 2), (False, 4), (True, 4), (False, 4)):
        model.train(mode)
        torch.manual_seed(0)
        seen = representation(model, "3", x[:count])
        found = leak_scores(model, "3", x[:count], METHOD, seen=seen)
        assert torch.equal(found == 0, seen == 0)  # the masks of that random state
    assert recordings == [4, 2, 4]


def test_a_pass_is_recorded_anew_from_time_to_time(recordings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_RENEWED", 3)
    model, x = Switching(), torch.rand(3, 4)
    for _ in range(7):
        leak_scores(model, "fc", x, METHOD, seen=representation(model, "fc", x))
    assert recordings == [3] * 3


def test_values_that_python_saw_are_not_taken_for_granted(recordings: list[int]) -> None:
    class Reading(Switching):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.a(x) * float(self.a.weight.detach().norm()))
            return out

    model, x = Reading(), torch.rand(3, 4)
    for _ in range(3):
        leak_scores(model, "fc", x, METHOD, seen=representation(model, "fc", x))
    assert recordings == [3] * 3


def test_a_program_does_not_keep_its_model() -> None:
    model, x = Switching(), torch.rand(3, 4)
    leak_scores(model, "fc", x, METHOD, seen=representation(model, "fc", x))
    before = len(again._PROGRAMS)
    del model
    gc.collect()
    assert len(again._PROGRAMS) == before - 1
