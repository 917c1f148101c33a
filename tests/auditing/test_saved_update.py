from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradveil.auditing.audit import Audit
from gradveil.auditing.gate import left_out
from gradveil.auditing.saved_update import UpdateAuditConfig, audit_update
from gradveil.auditing.update_files import write_examples, write_update
from gradveil.data import load
from gradveil.errors import SpecError, UpdateError
from gradveil.federated.client import local_update
from gradveil.models import build
from gradveil.report.page import write_report
from gradveil.threats.verdict import NOT_HERE
from gradveil.tree import parameters

ATTACK = "newton"
PRUNED = "pruning:share=0.5"


@pytest.fixture
def case(tmp_path: Path) -> UpdateAuditConfig:
    """An update of one digit under pruning, its truth, and the weights around it, as files."""
    data = load("digits")
    model = build("lenet", data.input_shape, data.num_classes, seed=3)
    truth = data.train.batch([3])
    update = local_update(model, truth, PRUNED, lr=0.1, rng=torch.Generator().manual_seed(0))
    write_update(tmp_path / "update.safetensors", update)
    write_examples(tmp_path / "truth.safetensors", truth)
    before = {n: p.clone() for n, p in parameters(model).items()}
    save_file(before, tmp_path / "before.safetensors")
    save_file({n: p - 0.1 * update.gradient[n] for n, p in before.items()}, tmp_path / "after.safetensors")
    return UpdateAuditConfig(
        update=str(tmp_path / "update.safetensors"),
        weights=str(tmp_path / "before.safetensors"),
        truth=str(tmp_path / "truth.safetensors"),
        defense=PRUNED,
        attacks=(ATTACK,),
        dataset="digits",
    )


def assert_other_tiers_are_not_run(run: Audit, page: str) -> None:
    """What one update cannot show is said, with the reason."""
    assert run.verdicts
    for verdict in run.verdicts:
        beyond = {t.tier: t for t in verdict.tiers if t.tier not in ("oblivious", "adaptive")}
        assert {t.outcome for t in beyond.values()} == {"not_run"}
        assert {tier: t.text for tier, t in beyond.items()} == {t: f"was not run: {why}" for t, why in NOT_HERE.items()}
    servers = ("an informed server", "a multi-round server", "a malicious server")
    assert dict(left_out(run.rows)) == dict(zip(servers, NOT_HERE.values(), strict=True))
    assert all(why in page for why in NOT_HERE.values())


def test_a_saved_update_is_attacked_naively_and_adaptively_beside_its_control(
    tmp_path: Path, case: UpdateAuditConfig
) -> None:
    run = audit_update(case, tmp_path / "run")
    tried = {(x.defense, x.server): x for x in run.lines}
    assert tried.keys() == {("none", "oblivious"), (PRUNED, "oblivious"), (PRUNED, "mask"), (PRUNED, "simulate")}
    assert tried["none", "oblivious"].mse.mean < 1e-3
    assert tried[PRUNED, "mask"].mse.mean < 1e-3
    assert {v.defense: v.outcome for v in run.verdicts}[PRUNED] == "recovered"
    page = write_report(run.folder).read_text()
    assert "What this update gives away" in page
    assert "Gets the images back" in page
    assert_other_tiers_are_not_run(run, page)


def test_a_pair_of_state_dicts_tells_the_same_as_the_gradients(tmp_path: Path, case: UpdateAuditConfig) -> None:
    pair = replace(
        case, update=str(tmp_path / "after.safetensors"), before=case.weights, weights=None, lr=0.1, num_examples=1
    )
    one, two = audit_update(case, tmp_path / "one"), audit_update(pair, tmp_path / "two")
    for a, b in zip(one.lines, two.lines, strict=True):
        assert (a.defense, a.server, a.grade) == (b.defense, b.server, b.grade)


def test_without_the_truth_there_are_pictures_and_a_control_from_stand_ins(
    tmp_path: Path, case: UpdateAuditConfig
) -> None:
    run = audit_update(replace(case, truth=None), tmp_path / "run")
    measured = [row for row in run.rows if row["kind"] == "attack" and row["mse"] is not None]
    assert {row["defense"] for row in measured} == {"none"}
    assert len(measured) == 4
    assert {row["defense"] for row in run.rows if row["kind"] == "attack" and row["mse"] is None} == {PRUNED}
    assert "truth was not given" in run.headline
    assert "stand-ins" in run.headline
    page = write_report(run.folder).read_text()
    assert "Stand-ins" in page
    assert_other_tiers_are_not_run(run, page)


def test_without_truth_and_data_nothing_is_claimed(tmp_path: Path, case: UpdateAuditConfig) -> None:
    run = audit_update(replace(case, truth=None, dataset=None, input_shape=(1, 8, 8)), tmp_path / "run")
    assert run.verdicts == []
    assert "no control" in run.headline
    assert "no control" in write_report(run.folder).read_text()


def test_an_undefended_update_is_its_own_control(tmp_path: Path, case: UpdateAuditConfig) -> None:
    run = audit_update(replace(case, defense="none"), tmp_path / "run")
    assert {(row["defense"], row["server"]) for row in run.rows if row["kind"] == "attack"} == {("none", "oblivious")}


def test_a_finished_audit_is_not_done_again(
    tmp_path: Path, case: UpdateAuditConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = audit_update(case, tmp_path / "run")
    monkeypatch.setattr("gradveil.auditing.saved_update.run", lambda *_: pytest.fail("done twice"))
    assert audit_update(case, tmp_path / "run", resume=True).rows == first.rows


def test_a_truth_of_another_size_or_shape_is_refused(tmp_path: Path, case: UpdateAuditConfig) -> None:
    with pytest.raises(UpdateError, match="made from 2"):
        audit_update(replace(case, num_examples=2), tmp_path / "run")
    write_examples(tmp_path / "small.safetensors", load("digits").train.batch([1, 2]))
    with pytest.raises(UpdateError, match="has 2 examples"):
        audit_update(replace(case, truth=str(tmp_path / "small.safetensors")), tmp_path / "run")
    with pytest.raises(SpecError, match="shape of the inputs is not known"):
        audit_update(replace(case, truth=None, dataset=None), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_saved_update_has_a_limit_of_time_as_well(tmp_path: Path, case: UpdateAuditConfig) -> None:
    found = audit_update(replace(case, minutes=1e-4), tmp_path / "run")
    assert {row["why"] for row in found.rows if row["kind"] == "skip"} == {"out of time"}
    assert not found.lines
    assert {v.outcome for v in found.verdicts} == {"not_run"}
    found = audit_update(case, tmp_path / "run", resume=True)
    assert not [row for row in found.rows if row["kind"] == "skip"]
    assert found.lines
