"""The audit that runs without any argument: what it must show."""

from pathlib import Path

import pytest

from gradveil.auditing.audit import audit
from gradveil.report.page import write_report
from gradveil.threats.rows import best_floor
from gradveil.threats.setup import AuditConfig

OURS = "representation:share=0.4"


@pytest.mark.slow
def test_the_default_audit_says_what_a_naive_and_a_knowing_server_get(tmp_path: Path) -> None:
    run = audit(config=AuditConfig(images=2, meter_seconds=5), out=tmp_path / "run")
    floor = best_floor(run.rows)
    judged = {v.defense: v for v in run.verdicts}
    assert floor is not None
    assert list(judged) == ["none", OURS, "random_mask:share=0.4", "pruning:share=0.8", "gaussian:scale=0.1"]
    assert judged["none"].outcome == "recovered"
    assert judged["none"].accuracy is not None
    assert judged["none"].accuracy > 0.8

    ours = judged[OURS]
    oblivious = [x for x in run.lines if (x.defense, x.server, x.round) == (OURS, "oblivious", "first")]
    assert min(x.mse.mean for x in oblivious) > 2 * floor.mse.mean  # far above the blind guess
    assert ours.adaptive is not None
    assert ours.adaptive.control is not None
    assert ours.adaptive.mse.mean < 1e-6  # near the control
    assert ours.adaptive.control < 1e-6
    assert "worse than a blind guess" in ours.text
    assert "but a server that knows the defence gets the images back" in ours.text

    tiers = {t.tier: t.outcome for t in judged[OURS].tiers}
    assert tiers["adaptive"] == "recovered"
    assert set(tiers.values()) <= {"recovered", "recognised", "identified", "traces", "nothing", "not_run"}
    controls = {(x.round, x.weights, x.attack) for x in run.lines if x.defense == "none"}
    assert {(x.round, x.weights, x.attack) for x in run.lines} == controls
    assert {x.round for x in run.lines} == {"first", "last"}
    for defense in judged:
        if defense != "none":
            assert any(x.server != "oblivious" for x in run.lines if x.defense == defense)
    assert "Gets the images back" in write_report(run.folder).read_text()
