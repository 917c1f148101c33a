"""The measured μ in an audit, in training and on the leaderboard."""

import json
from pathlib import Path

import pytest
from conftest import Command

import gradveil
from gradveil.auditing.audit import AuditConfig, audit
from gradveil.auditing.gate import summary
from gradveil.report.table import certificate_table
from gradveil.threats.rows import figure_errors
from gradveil_studies.leaderboard.standings import _measured


def test_an_audit_measures_what_a_defence_promises_and_its_report_says_both(tmp_path: Path) -> None:
    config = AuditConfig(model="logistic", images=1, rounds=1, clients=2, meter_seconds=20.0)
    found = audit(config=config, defenses=["veil:z=1,clip=1"], attacks=["analytic"], out=tmp_path / "run")
    told = summary(found, tmp_path / "page.html", None)
    (one,) = told["measured"]
    assert one["defense"] == "veil:z=1,clip=1"
    assert one["mu_proved"] == pytest.approx(1)
    assert one["low"] < 1 < one["high"] * 1.02
    assert one["verdict"] == "consistent"
    assert told["errors"] == []
    table = certificate_table(found.rows)
    assert table is not None
    (line,) = [row for row in table.rows if row[1] == "the measured μ (one release)"]
    assert line[3] == "–"
    assert line[4].endswith("1 proved: consistent.")


def test_a_promise_that_is_exceeded_is_an_error_of_the_audit() -> None:
    row = {"kind": "certificate", "certificate": "measured", "defense": "veil:z=1", "layer": "one release", "mse": None}
    beyond = row | {"mu_proved": 1.0, "reasons": ["μ is at least 1.8"], "assumptions": [], "says": ""}
    assert figure_errors([beyond]) == ["veil:z=1 exceeds its promise: μ is at least 1.8. 1 is proved."]
    assert figure_errors([beyond | {"reasons": []}]) == []


def test_training_measures_on_demand(command: Command, tmp_path: Path) -> None:
    words = f"--rounds 1 --model logistic --defense veil:promise=identification --verify --out {tmp_path / 'run'}"
    code, out, _ = command("train", *words.split(), "--json")
    assert code == 0
    found = json.loads(out)["measured"]
    assert found["verdict"] == "consistent"
    assert found["mu_proved"] == pytest.approx(1)
    code, _, err = command("train", "--verify", "--out", str(tmp_path / "other"))
    assert (code, "give one that does" in err) == (2, True)


def test_the_leaderboard_has_it_as_a_share_of_the_proved_one() -> None:
    share = _measured({"measured": {"mu_measured": 0.98, "low": 0.9, "high": 1.06}})
    assert share is not None
    assert (share.mean, share.low, share.high) == (0.98, 0.9, 1.06)
    assert _measured({}) is None
    assert gradveil.verify is not None
