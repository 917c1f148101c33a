"""Specs of ``representation`` from when it was one method with many settings, as they are written in old rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradveil.errors import SpecError
from gradveil.protection.defense import DEFENSES, build
from gradveil.registry import describe
from gradveil_studies.paper.rows import same_defense

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BECAME = {
    "representation:share=0.4,method=moment": "representation:share=0.4,method=moment",
    "representation:share=0.25,scope=batch,method=loop": "representation:share=0.25,scope=batch,method=loop",
    "representation:p=1": "representation:p=1",
    "representation:q=0,mode=paper,score=diagonal": "representation",
    "representation:share=0.4,mode=authors": "representation_authors:share=0.4",
    "representation:mode=authors,offset=0.1": "representation_authors:offset=0.1",
    "representation:mode=authors,share=0.8,offset=0.1": "representation_authors:share=0.8,offset=0.1",
    "representation:score=greedy": "representation_subset",
    "representation:share=0.3,layer=5,score=greedy": "representation_subset:share=0.3,layer=5",
    "representation:share=0.3,layer=5,score=pseudoinverse": "representation_pseudoinverse:share=0.3,layer=5",
    "representation:q=2,p=inf": "representation_direction:q=2,p=inf",
    "representation:q=inf,rcond=0.1": "representation_direction:q=inf,rcond=0.1",
    "representation:q=2,share=0.5,layer=5,clip=true": "representation_direction:q=2,share=0.5,layer=5,clip=true",
    "representation:target_mse=1e-6,kind=global": "representation_certified:target_mse=1e-6,kind=global",
    "representation:target_mse=0.05,kind=local": "representation_certified:target_mse=0.05,kind=local",
    "representation:target_mse=1,p=inf": "representation_certified:target_mse=1,p=inf",
    "representation:mode=authors+gaussian:scale=0.1": "representation_authors+gaussian:scale=0.1",
}


@pytest.mark.parametrize(("old", "new"), BECAME.items())
def test_an_old_spec_builds_the_new_method(old: str, new: str, caplog: pytest.LogCaptureFixture) -> None:
    DEFENSES._told.clear()
    assert DEFENSES.current(old) == new
    assert describe(build(old)) == describe(build(new))
    assert len(caplog.records) == (old != new)
    assert same_defense(old) == same_defense(new)


@pytest.mark.parametrize(
    "old",
    ["q=3", "q=2,count=3", "q=2,score=greedy", "q=1,scope=batch", "mode=authors,q=2", "score=greedy,scope=batch",
     "rcond=-1", "target_mse=0.01,share=0.2", "target_mse=0.01,mode=authors", "target_mse=0.01,score=greedy"],
)  # fmt: skip
def test_settings_that_never_went_together_are_still_refused(old: str) -> None:
    with pytest.raises(SpecError, match="has no setting"):
        build(f"representation:{old}")


def test_the_defences_of_all_kept_rows_are_known_silently(caplog: pytest.LogCaptureFixture) -> None:
    DEFENSES._told.clear()
    rows = [json.loads(line) for path in RESULTS.glob("*/rows.jsonl") for line in path.open(encoding="utf-8")]
    specs = {row["defense"] for row in rows if row.get("defense", "(").partition(":")[0] in DEFENSES.names()}
    specs |= {spec for row in rows if (spec := row.get("defense", "")).startswith("representation")}
    assert "representation:share=0.4,mode=authors" in specs
    assert {same_defense(spec).partition(":")[0] for spec in specs} <= set(DEFENSES.names())
    assert not caplog.records


def test_the_command_line_prints_one_plain_line() -> None:
    """In a process of its own: pytest listens to logs, and then nothing is printed."""
    code = "from gradveil.protection.defense import build; build('representation:mode=authors')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "Defense representation:mode=authors is now called representation_authors.\n"
