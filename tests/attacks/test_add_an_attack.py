"""The guide's code runs as it stands and does what the guide says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import test_contracts as contracts
from docpages import blocks, section
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, build, default_panel
from gradveil.types import Observation, Reconstruction

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


seen = contracts.seen


@pytest.mark.parametrize("modality", ["image", "table", "tokens"])
def test_one_class_is_an_attack_on_any_kind_of_example(modality: str, seen: Observation) -> None:
    """It is found, in the panel of what it declares, and the contract tests have a scene for it."""

    @ATTACKS.register("zeros")
    @dataclass(frozen=True)
    class Zeros(Attack):
        """Answer zeros."""

        kind = "closed form"
        applies_to = (AppliesTo((modality,), default=""),)

        def reconstruct(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
            return Reconstruction(torch.zeros(seen.num_examples, *seen.input_shape), seen.labels, 0.0, True)

    try:
        scene = contracts.ready("zeros", seen)
        assert scene.modality.spec_name == modality
        assert "zeros" in default_panel(scene.model, scene.update, scene.modality)
        contracts.test_an_attack_returns_finite_images_within_the_data_range("zeros", seen)
        contracts.test_an_attack_repeats_from_its_generator_and_leaves_the_global_one("zeros", seen)
    finally:
        del ATTACKS._classes["zeros"]


def test_an_attack_without_an_answer_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="Empty overrides neither reconstruct nor reconstruct_many"):

        class Empty(Attack):
            """Does nothing."""
