"""Networks that people have, on a machine that may be busy: every kind of server gets an answer within the budget.

Time is counted, not measured: each look at the clock takes a fixed time, so that what fits hangs on no machine.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradveil import pace
from gradveil.auditing.audit import Audit, audit
from gradveil.models import build
from gradveil.threats.setup import AuditConfig

MINUTES = 1.0
TICK = 0.03  # seconds between two looks at the clock
REASONS = ("same in every round", "cannot be read off", "needs", "has no", "too few", "not plan")
NOTES = "The patient in room {0} has a fever of {0} degrees and was given {1} on day {2} by the nurse. "


def pictures() -> tuple[np.ndarray, np.ndarray]:
    rng, labels = np.random.default_rng(0), np.arange(300) % 5
    low = rng.random((300, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    return (0.8 * low + 0.04 * labels[:, None, None, None]).astype(np.float32), labels


def masks() -> tuple[np.ndarray, np.ndarray]:
    images, _ = pictures()
    return images, (images.mean(1) > 0.4).astype(np.int64)


def table() -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(0).random((400, 200)).astype(np.float32)
    return rows, (rows[:, :9].sum(1) > 4.8).astype(np.int64)  # a third of them


class Dense(nn.Module):
    """A U-Net with one step down, and batch norm."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(19, classes, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.up(self.down(x)), x], 1))


def resnet(num_classes: int) -> nn.Module:
    return build("resnet18:width=4", (3, 32, 32), num_classes)


def cnn(num_classes: int) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 32))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, num_classes))


def mlp(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, num_classes))


def vit(num_classes: int) -> nn.Module:
    return build("vit_tiny:depth=2,width=48,heads=2", (3, 32, 32), num_classes)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by being looked at."""
    looks = count()
    monkeypatch.setattr("gradveil.pace.clock", lambda: TICK * next(looks))


def within(folder: Path, **given: object) -> Audit:
    config = AuditConfig(minutes=MINUTES, trained=False, meter_seconds=0.0, images=2)
    began = pace.clock()
    found = audit(config=config, defenses=["pruning:share=0.8", "gaussian:scale=0.1"], out=folder, **given)  # type: ignore[arg-type]
    assert pace.clock() - began <= 66 * MINUTES  # the end of what had begun
    return found


def answered(found: Audit, tiers: tuple[str, ...]) -> None:
    """Each of these tiers has an outcome on each defence; where it was not run, why it cannot be is said.

    Nothing is attacked under a defence whose control was not, and the first pictures come before defences are probed.
    """
    tried = [row for row in found.rows if row["kind"] == "attack"]
    where = [(row["defense"] == "none", (row["round"], row["weights"], row["attack"])) for row in tried]
    assert {of for is_control, of in where if not is_control} <= {of for is_control, of in where if is_control}
    units = [row["unit"].partition("/")[0] for row in found.rows]
    assert units.index("piece") < units.index("probe")
    for verdict in found.verdicts:
        for tier in verdict.tiers:
            if tier.tier in tiers and not (verdict.defense == "none" and tier.tier in ("adaptive", "multi-round")):
                said = tier.outcome != "not_run" or any(reason in tier.text for reason in REASONS)
                assert said, (verdict.defense, tier.tier, tier.text)
            if tier.outcome == "void":
                assert "what would settle it" in tier.text


ALWAYS = ("informed", "malicious")  # closed forms and lists: on any machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "data"), [(resnet, pictures), (cnn, pictures), (mlp, pictures), (vit, pictures), (Dense, masks)]
)
def test_every_tier_gets_an_answer(make: Callable[[int], nn.Module], data: object, tmp_path: Path) -> None:
    found = within(tmp_path / "run", model=lambda num_classes: make(num_classes), dataset=data)
    answered(found, ALWAYS)
    plain = next(v for v in found.verdicts if v.defense == "none")
    informed = {t.tier: t.outcome for t in plain.tiers}["informed"]
    assert informed == ("recovered" if plain.outcome == "recovered" else "identified")  # it can do what others can
    assert "could not be assessed" not in found.headline
    if make is mlp:  # what a first layer gives away is read off at once
        assert plain.outcome == "recovered"
        answered(found, ("oblivious", "adaptive", *ALWAYS))


@pytest.mark.slow
def test_a_wide_table_is_answered(tmp_path: Path) -> None:
    found = within(tmp_path / "run", dataset=table)
    answered(found, ("oblivious", "adaptive", "informed", "malicious"))
    assert {v.defense: v.outcome for v in found.verdicts}["none"] == "recovered"


@pytest.mark.slow
def test_notes_are_answered(tmp_path: Path) -> None:
    drugs = ("aspirin", "morphine", "insulin", "penicillin")
    text = "".join(NOTES.format(i, drugs[i % 4], i % 9) for i in range(200))
    (tmp_path / "notes.txt").write_text(text)
    found = within(
        tmp_path / "run", dataset=f"text:path={tmp_path}/notes.txt,length=16", model="gpt_tiny:width=32,heads=2,depth=1"
    )
    answered(found, ("oblivious", "adaptive", "informed"))
    assert {v.defense: v.outcome for v in found.verdicts}["none"] == "recovered"
