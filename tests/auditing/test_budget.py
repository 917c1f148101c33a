"""An audit in limited time, on a clock that only work moves on: what fits is done, the rest is said."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, nn

from gradveil import pace
from gradveil.attacks.base import Attack, default_panel
from gradveil.auditing.audit import Audit, audit
from gradveil.auditing.gate import gates, left_out, not_run
from gradveil.auditing.work import AttackRunner
from gradveil.errors import GradveilError
from gradveil.modalities import IMAGE
from gradveil.models import build
from gradveil.report.page import render
from gradveil.step_rule import StepRule
from gradveil.threats.setup import AuditConfig, AuditSetup
from gradveil.types import Observation, Reconstruction, Update

NOW = [0.0]
STEP = 1.0  # second of an attack on one update
STEPS = 10
A_ROUND = 30.0  # seconds of training under one defence


@dataclass(frozen=True)
class Slow(Attack):
    """Read the input of the last layer off its gradient, after ten steps that each take a second; noise before."""

    works: bool = True

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        late, k = pace.step(0, STEPS) and False, 0
        while k < STEPS and not late:
            NOW[0] += STEP * len(seen)
            k += 1
            late = pace.step(k, STEPS) and k < STEPS
        return [self._one(s, r, late) for s, r in zip(seen, rngs, strict=True)]

    def _one(self, s: Observation, rng: Generator, late: bool) -> Reconstruction:
        if late or not self.works:
            noise = torch.rand(s.num_examples, *s.input_shape, generator=rng)
            return Reconstruction(noise, None, 1.0, False, {"out_of_time": 1.0} if late else {})
        weight = next(g for n, g in s.update.gradient.items() if n.endswith("weight"))
        bias = next(g for n, g in s.update.gradient.items() if n.endswith("bias"))
        c = int(bias.abs().argmax())
        return Reconstruction((weight[c] / bias[c]).reshape(1, *s.input_shape).clamp(0, 1), None, 0.0, True)


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but for what attacks and training add to it."""
    NOW[0] = 0.0
    monkeypatch.setattr(pace, "clock", lambda: NOW[0])

    def trained(scene: AuditSetup, defense: str, rounds: int, tell: Any) -> Any:
        NOW[0] += A_ROUND * rounds * sum(map(len, scene.clients)) / len(scene.dataset.train)
        return _train(scene, defense, rounds, tell)

    from gradveil.auditing import work

    _train = work._train
    monkeypatch.setattr(work, "_train", trained)
    monkeypatch.setattr(AttackRunner, "round_cost", lambda *_: A_ROUND)


def run(small: AuditConfig, folder: Path, minutes: float | None, attack: Attack | None = None, **more: Any) -> Audit:
    began = NOW[0]
    config = replace(small, minutes=minutes, meter_seconds=0.0, images=2, gallery=20)
    found = audit(config=config, attacks=[attack or Slow()], out=folder, **more)
    assert minutes is None or NOW[0] - began <= 60 * minutes
    return found


def measured(found: Audit) -> dict[tuple[Any, ...], Any]:
    keys = ("round", "weights", "defense", "server", "attack", "example")
    return {tuple(r[k] for k in keys): (r["mse"], r["identified"]) for r in found.rows if r["kind"] == "attack"}


def test_with_enough_time_all_is_tried_as_without_a_limit(small: AuditConfig, tmp_path: Path) -> None:
    free, limited = run(small, tmp_path / "a", None), run(small, tmp_path / "b", 1000)
    assert measured(free) == measured(limited)
    assert not not_run(limited.rows)
    assert [v.text for v in free.verdicts] == [v.text for v in limited.verdicts]
    assert next(row["defense"] for row in limited.rows if row["kind"] == "attack") == "none"  # before training
    kinds = [row["kind"] for row in limited.rows]
    assert kinds.index("attack") < kinds.index("accuracy")


def test_what_does_not_fit_is_not_tried_and_said(small: AuditConfig, tmp_path: Path) -> None:
    pictures: list[float] = []
    found = run(small, tmp_path / "run", 1.0, written=lambda store: pictures.append(NOW[0]))
    rounds = {row["round"] for row in found.rows if row["kind"] == "attack"}
    assert rounds == {"first"}
    assert pictures[0] <= 60
    assert not any(row["kind"] == "accuracy" for row in found.rows)
    late = [row for row in found.rows if row["kind"] == "skip"]
    assert {row["round"] for row in late if row["out_of_time"]} >= {"last"}
    assert any("a round of training takes about 0:01:00" in part["why"] for part in not_run(found.rows))
    assert found.headline.endswith("The time was over before all was tried.")
    assert {v.defense for v in found.verdicts} == {"none", *small.defenses}
    assert "What was not tried" in render(found.store)
    assert left_out(found.rows)


def test_more_time_on_resume_tries_the_rest(small: AuditConfig, tmp_path: Path) -> None:
    free = run(small, tmp_path / "free", None)
    for minutes in (0.5, 1.0, 2.0, 1000):
        found = run(small, tmp_path / "run", minutes, resume=(tmp_path / "run").exists())
    assert not not_run(found.rows)
    first, every = ({k: v for k, v in measured(one).items() if k[0] == "first"} for one in (found, free))
    assert first == every
    assert measured(found).keys() == measured(free).keys()  # at the weights that the shorter run trained
    before = NOW[0]
    run(small, tmp_path / "run", None, resume=True)  # nothing is left to do
    assert NOW[0] == before


def test_without_a_limit_a_limited_run_goes_on(small: AuditConfig, tmp_path: Path) -> None:
    run(small, tmp_path / "run", 1.0)
    found = run(small, tmp_path / "run", None, resume=True)
    assert measured(found) == measured(run(small, tmp_path / "free", None))
    assert not not_run(found.rows)


def test_a_control_without_time_is_void_and_never_safe(small: AuditConfig, tmp_path: Path) -> None:
    found = run(small, tmp_path / "run", 0.2)  # 12 s, of which 8 are for work: an attack takes 10
    assert found.lines
    assert all("out of time on" in str(line.void) for line in found.lines)
    assert {v.outcome for v in found.verdicts} <= {"void", "not_run"}
    assert {gate.result for gate in gates(found.rows, "recovered").values()} == {"uninformative"}
    assert "stopped before it was done" in str(not_run(found.rows))


def test_defences_wait_where_the_control_fails(small: AuditConfig, tmp_path: Path) -> None:
    found = run(small, tmp_path / "run", 0.35, Slow(works=False))
    tried = [row["defense"] for row in found.rows if row["kind"] == "attack"]
    assert tried[0] == "none"
    assert sorted(tried, key=lambda name: name != "none") == tried
    assert {v.outcome for v in found.verdicts} <= {"void", "not_run"}


def test_fewer_rounds_are_trained_where_all_do_not_fit(small: AuditConfig, tmp_path: Path) -> None:
    found = run(replace(small, rounds=9), tmp_path / "run", 5)
    rounds = [row["round"] for row in found.rows if row["kind"] == "accuracy" and row["defense"] == "none"]
    assert 2 <= max(rounds) < 9
    said = dict(left_out(found.rows))["training"]
    assert said.startswith(f"Trained for {max(rounds)} of 9 rounds on 22% of each client's records: more do not fit")


def test_an_attack_with_steps_to_spare_is_shortened(
    small: AuditConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = pace.step

    def slow(done: int, total: int) -> bool:
        NOW[0] += 0.6
        return step(done, total)

    monkeypatch.setattr(pace, "step", slow)
    config = replace(small, minutes=8.0, meter_seconds=0.0, images=1, rounds=1, attacks=("gs:steps=400",))
    found = audit(config=config, out=tmp_path / "run")
    assert NOW[0] <= 8 * 60
    used = {row["attack"] for row in found.rows if row["kind"] == "attack"}
    steps = sorted(int(name.removeprefix("gs:steps=")) for name in used)
    assert 50 <= steps[0] <= steps[-1] < 400
    short = f"gs:steps={steps[-1]}"
    assert any(part["why"].startswith(f"shortened to {short}") for part in not_run(found.rows))


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_minutes_are_a_length_of_time(minutes: float) -> None:
    with pytest.raises(GradveilError, match="give a number above 0"):
        AuditConfig(minutes=minutes)


def test_attacks_by_default_suit_the_model() -> None:
    small, large = build("lenet", (3, 32, 32), 10, 0), build("resnet18", (3, 32, 32), 10, 0)
    one, two, many = (Update({}, num_steps=steps) for steps in (1, 2, 200))
    adam = replace(one, rule=StepRule(optimizer="adam"))
    assert default_panel(small, one, IMAGE) == ("newton", "gs:steps=300", "dlg:steps=15,restarts=3")
    assert default_panel(large, one, IMAGE) == default_panel(small, adam, IMAGE) == ("gs",)
    assert default_panel(small, two, IMAGE) == ("newton", "surrogate:steps=400", "fedavg:steps=400")
    assert default_panel(large, two, IMAGE) == ("surrogate:steps=400", "fedavg:steps=400")
    assert default_panel(large, many, IMAGE) == ("surrogate:steps=400",)


def test_transformers_are_held_against_the_spans_of_their_inputs() -> None:
    vit, one = build("vit_tiny", (1, 8, 8), 10), Update({})
    assert default_panel(vit, one, IMAGE) == ("patches", "newton", "gs:steps=300", "dlg:steps=15,restarts=3")
    for client in (Update({}, num_steps=2), replace(one, rule=StepRule(optimizer="adam"))):
        assert "patches" not in default_panel(vit, client, IMAGE)
    assert "patches" not in default_panel(build("lenet"), one, IMAGE)


def test_batches_of_fully_connected_networks_are_unmixed() -> None:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5))
    smooth = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Sigmoid(), nn.Linear(32, 5))
    batch, several = Update({}, 8), Update({}, 8, num_steps=2)
    assert default_panel(dense, batch, IMAGE)[:2] == default_panel(dense, several, IMAGE)[:2] == ("spear", "cocktail")
    assert default_panel(smooth, batch, IMAGE)[0] == "cocktail"
    adam = replace(batch, rule=StepRule(optimizer="adam"))
    for model, client in ((dense, Update({})), (dense, adam), (build("lenet"), batch)):
        assert not {"spear", "cocktail"} & set(default_panel(model, client, IMAGE))
