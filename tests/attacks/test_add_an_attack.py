"""The guide's code runs as it stands and does what the guide says."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from docpages import blocks, section
from gradveil.attacks.base import ATTACKS, build

GUIDE = section("how-to/extend.md", "## An attack")


@pytest.fixture
def guide() -> Iterator[dict[str, Any]]:
    known = set(ATTACKS.names())
    names: dict[str, Any] = {"__name__": "guide"}
    with torch.random.fork_rng():
        for block in blocks(GUIDE, "python"):
            exec(compile(block, "extend.md", "exec", dont_inherit=True), names)
    yield names
    for name in set(ATTACKS._classes) - known:
        del ATTACKS._classes[name]


def test_the_guides_attacks_work(guide: dict[str, Any]) -> None:
    blind = build("blind:shade=0.4").reconstruct(guide["seen"], torch.Generator())
    assert blind.inputs.unique().tolist() == pytest.approx([0.4])
    assert guide["found"].converged
    assert guide["found"].labels.tolist() == [2]
    assert guide["error"] < 1e-3 < float((blind.inputs - guide["truth"]).square().mean())
