"""The film of an attack: its last frame is the audit's own answer, and it costs nothing but itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.auditing import work as work_module
from gradveil.auditing.audit import Audit, audit
from gradveil.auditing.work import FILM, FRAMES, Watcher
from gradveil.report.page import write_report
from gradveil.threats.rows import read
from gradveil.threats.setup import AuditConfig

MASKED = "random_mask:share=0.4"


@pytest.fixture
def brief(small: AuditConfig) -> AuditConfig:
    return replace(small, rounds=1, images=2, meter_seconds=0.0, tiers=("oblivious", "adaptive"))


def audited(folder: Path, config: AuditConfig) -> Audit:
    return audit(config=config, defenses=[MASKED], attacks=["newton"], out=folder)


def test_the_last_frame_is_what_the_audit_itself_found(tmp_path: Path, brief: AuditConfig) -> None:
    found = audited(tmp_path / "run", brief)
    films = [row for row in found.rows if row["kind"] == "film"]
    assert [(row["defense"], row["tier"]) for row in films] == [
        ("none", "oblivious"),
        (MASKED, "oblivious"),
        (MASKED, "adaptive"),
    ]
    frames = found.store.arrays(FILM)
    for place, row in enumerate(films):
        own = ("round", "weights", "defense", "tier", "server", "attack", "example")
        (mine,) = [m for m in read(found.rows, "attack") if all(getattr(m, key) == row[key] for key in own)]
        answer = found.store.arrays(mine.unit)["found"][mine.index]
        assert frames[str(place)][-1] == pytest.approx(answer, abs=1e-3)
        assert row["errors"][-1] == pytest.approx(mine.mse, rel=0.05, abs=1e-9)
        assert 2 <= len(row["steps"]) == len(row["errors"]) == len(frames[str(place)]) <= FRAMES
        assert row["steps"][:-1] == sorted(set(row["steps"][:-1]))
        assert not np.allclose(frames[str(place)][0], frames[str(place)][-1])  # something is seen to happen
    page = write_report(tmp_path / "run").read_text()
    assert page.count('class="film"') == 3


def test_a_film_that_takes_too_long_is_left_out_and_not_tried_again(
    tmp_path: Path, brief: AuditConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_module, "FILM_SECONDS", 0.0)
    found = audited(tmp_path / "run", brief)
    assert [row["steps"] for row in found.rows if row["kind"] == "film"] == [[]]
    assert found.store.done(FILM)
    assert 'class="film"' not in write_report(tmp_path / "run").read_text()


def test_frames_lie_further_and_further_apart() -> None:
    watcher = Watcher()
    for step in range(1, 1001):
        watcher(torch.tensor([float(step)]))
    assert watcher.steps[:5] == [1, 2, 3, 4, 6]
    assert [int(point) for point in watcher.points] == watcher.steps
    assert len(watcher.steps) < 30
