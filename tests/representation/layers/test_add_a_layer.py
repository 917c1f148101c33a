"""The guide's file, put beside the others, is all that a new layer type takes."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from docpages import blocks, section
from gradveil.errors import CertificateError
from gradveil.representation import rules
from gradveil.representation.jacobian import FunctionJacobian, Tape
from gradveil.representation.problem import step_chain
from gradveil.representation.recorder import walkable
from gradveil.representation.rules.base import PLAIN, RULES
from gradveil.representation.scores import linearise

GUIDE = section("how-to/extend.md", "## A layer type")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table as the package fills it, and put back after the test."""
    for table in (RULES, PLAIN):
        for key in ("pixel_shuffle", "softshrink", nn.PixelShuffle):
            monkeypatch.setitem(table, key, None)  # remembered
            del table[key]


@pytest.fixture
def network() -> Iterator[tuple[nn.Sequential, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3), nn.PixelShuffle(2), nn.Softshrink(0.1), nn.Flatten(), nn.Linear(36, 3)
        yield nn.Sequential(*layers).double(), torch.rand(2, 1, 5, 5, dtype=torch.float64)


@pytest.mark.usefixtures("without")
def test_a_file_in_the_folder_is_enough(
    network: tuple[nn.Sequential, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = network
    assert isinstance(linearise(model, "4", x), FunctionJacobian)
    with pytest.raises(CertificateError, match="Cannot walk through 'pixel_shuffle'"):
        step_chain(model, "4", x)

    linear, activation, *_ = blocks(GUIDE, "python")
    (tmp_path / "shuffle_of_the_guide.py").write_text(linear + activation)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    import_module("gradveil.representation.rules.shuffle_of_the_guide")

    tape, plain = linearise(model, "4", x), FunctionJacobian(model, "4", x)
    assert isinstance(tape, Tape)
    assert walkable(model, "2", x) is not None
    t, g = torch.randn(3, *x.shape, dtype=x.dtype), torch.randn(3, *plain.r.shape, dtype=x.dtype)
    assert_close(tape.push(t), plain.push(t))
    assert_close(tape.pull(g), plain.pull(g))
    assert_close(step_chain(model, "4", x)(x), model[:-1](x))
