from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.attacks.base import Attack
from gradveil.auditing.audit import Audit, audit
from gradveil.auditing.certificates import certificate_rows
from gradveil.auditing.run_folder import RunFolder, from_toml
from gradveil.data import load
from gradveil.defenses.representation import RandomMask
from gradveil.models import build
from gradveil.report.page import write_report
from gradveil.threats.setup import AuditConfig, build_setup
from gradveil.types import Observation

PRUNED = "pruning:share=0.98"


def test_an_undefended_update_of_logistic_regression_gives_the_image_back(finished: Audit) -> None:
    (control,) = [x for x in finished.lines if (x.round, x.defense, x.attack) == ("first", "none", "Divide()")]
    assert control.mse.mean < 1e-8
    assert control.recovered.mean == control.identified.mean == control.label.mean == 1.0
    assert control.void is None


def test_every_attack_row_has_its_control_in_the_same_run(finished: Audit) -> None:
    rows = [row for row in finished.rows if row["kind"] == "attack"]
    controls = {(r["round"], r["weights"], r["attack"], r["example"]) for r in rows if r["defense"] == "none"}
    assert {(r["round"], r["weights"], r["attack"], r["example"]) for r in rows} == controls
    assert {r["round"] for r in rows} == {"first", "last"}


def test_every_defence_has_its_adaptive_rows_and_why(finished: Audit) -> None:
    rows = [row for row in finished.rows if row["kind"] == "attack" and row["defense"] == PRUNED]
    why = {row["server"]: row["why"] for row in finished.rows if row["kind"] == "defense"}
    tried = {row["server"] for row in rows}
    assert "oblivious" in tried
    assert why.keys() == tried - {"oblivious"}
    assert "mask" in why
    assert all(why.values())


def test_the_pruned_image_is_not_the_image_and_the_verdict_says_what_it_is(finished: Audit) -> None:
    oblivious = [x for x in finished.lines if (x.defense, x.server, x.attack) == (PRUNED, "oblivious", "Divide()")]
    assert all(x.mse.mean > 1e-3 for x in oblivious)
    (judged,) = [v for v in finished.verdicts if v.defense == PRUNED]
    assert judged.accuracy is not None
    assert judged.text.startswith("The oblivious server")


def test_an_attack_that_never_works_is_void_everywhere(finished: Audit) -> None:
    guesses = [x for x in finished.lines if x.attack == "Guess()"]
    assert guesses
    assert all(x.void is not None and not x.counts for x in guesses)


def test_blind_guesses_are_measured_on_the_same_images(finished: Audit) -> None:
    floors = [row for row in finished.rows if row["kind"] == "floor"]
    assert {row["guess"] for row in floors} == {"grey", "mean image", "class mean"}
    truth = finished.store.arrays("truth")["truth"]
    assert truth.shape == (4, 1, 8, 8)
    grey = [row["mse"] for row in floors if row["guess"] == "grey"]
    assert grey == pytest.approx(((truth - 0.5) ** 2).mean(axis=(1, 2, 3)).tolist(), rel=1e-5)


def test_rows_can_be_measured_again_from_the_images(finished: Audit) -> None:
    truth = finished.store.arrays("truth")["truth"]
    for row in [row for row in finished.rows if row["kind"] == "attack"]:
        found = finished.store.arrays(row["unit"])["found"][row["index"]]
        assert float(((found - truth[row["example"]]) ** 2).mean()) == pytest.approx(row["mse"], rel=1e-4, abs=1e-12)
        assert 0 <= found.min() <= found.max() <= 1


def test_the_same_seed_gives_the_same_rows_and_another_seed_does_not(
    tmp_path: Path, small: AuditConfig, divide: Attack, finished: Audit
) -> None:
    rows = [
        audit(config=replace(small, seed=seed), attacks=[divide], out=tmp_path / str(i)).rows
        for i, seed in enumerate((0, 0, 1))
    ]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]
    assert (tmp_path / "0" / "rows.jsonl").read_bytes() == (tmp_path / "1" / "rows.jsonl").read_bytes()


def test_the_global_random_state_is_left_alone(tmp_path: Path, small: AuditConfig, divide: Attack) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    audit(config=small, attacks=[divide], out=tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_audit_stopped_anywhere_ends_with_the_same_rows(
    tmp_path: Path, small: AuditConfig, divide: Attack, finished: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = audit(config=small, attacks=[divide], out=tmp_path / "whole")
    units = list(dict.fromkeys(row["unit"] for row in whole.rows))
    assert len(units) >= 4
    real, done, allowed = RunFolder.add, [], [0]

    def stops(self: RunFolder, unit: str, *args: object, **more: object) -> None:
        if len(done) == allowed[0]:
            raise KeyboardInterrupt
        done.append(unit)
        real(self, unit, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(RunFolder, "add", stops)
    for allowed[0] in range(len(units)):
        with pytest.raises(KeyboardInterrupt):
            audit(config=small, attacks=[divide], out=tmp_path / "part", resume=True)
    allowed[0] = len(units)
    assert audit(config=small, attacks=[divide], out=tmp_path / "part", resume=True).rows == whole.rows
    assert done == units  # nothing was done twice


def test_a_finished_audit_is_only_read(
    tmp_path: Path, small: AuditConfig, divide: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = audit(config=small, attacks=[divide], out=tmp_path / "run")
    for name in (
        "auditing.work.run",
        "auditing.audit.certificate_rows",
        "auditing.audit.floors",
        "auditing.work.simulate",
    ):
        monkeypatch.setattr(f"gradveil.{name}", lambda *_, **__: pytest.fail("done twice"))
    assert audit(config=small, attacks=[divide], out=tmp_path / "run", resume=True).rows == first.rows


def test_an_attack_is_handed_nothing_private(
    tmp_path: Path, small: AuditConfig, guess: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Observation] = []
    real = type(guess).reconstruct_many

    def spy(self: Attack, seen: list[Observation], rngs: list[torch.Generator]) -> object:
        handed.extend(seen)
        return real(self, seen, rngs)

    monkeypatch.setattr(type(guess), "reconstruct_many", spy)
    run = audit(config=small, attacks=[guess], out=tmp_path / "run")
    truth = run.store.arrays("truth")["truth"]
    assert handed
    for seen in handed:
        assert seen.labels is None
        assert seen.prior is not None
        assert not any(np.allclose(seen.prior.mean.numpy(), x.reshape(-1)) for x in truth)


def test_batches_are_paired_before_they_are_measured(tmp_path: Path, small: AuditConfig, guess: Attack) -> None:
    run = audit(config=replace(small, examples=2), attacks=[guess], out=tmp_path / "run")
    rows = [row for row in run.rows if row["kind"] == "attack" and row["round"] == "first" and row["defense"] == "none"]
    assert sorted(row["example"] for row in rows if row["attack"] == "Guess()") == [0, 1, 2, 3]


def test_one_round_is_looked_at_once(tmp_path: Path, small: AuditConfig, guess: Attack) -> None:
    run = audit(config=replace(small, rounds=1), attacks=[guess], out=tmp_path / "run")
    assert {row["round"] for row in run.rows if row["kind"] == "attack"} == {"first"}


def test_the_run_folder_holds_its_settings(finished: Audit) -> None:
    config = from_toml(AuditConfig, finished.store.config)
    assert config.defenses == (PRUNED,)
    assert config.attacks == ("Divide()", "Guess()")
    assert config.model == "logistic"


def test_what_can_be_promised_stands_beside_what_was_tried(finished: Audit) -> None:
    meter = {(row["defense"], row["server"]): row for row in finished.rows if row["kind"] == "meter"}
    assert meter["none", "plain"]["mse"] is None  # an undefended update gives the input away
    assert "no noise limits" in meter["none", "plain"]["says"]
    assert (PRUNED, "mask") in meter
    assert not [row for row in finished.rows if row["kind"] == "certificate"]  # pruning perturbs no representation


def test_certificates_of_a_perturbed_layer_say_what_they_rest_on(tmp_path: Path, small: AuditConfig) -> None:
    data = load("digits")
    scene = build_setup(small, data, build("probe", data.input_shape, 10), {"r": RandomMask()}, {})
    rows = [row for row in certificate_rows(scene, ["r"])["r"] if row["kind"] == "certificate"]
    assert {row["certificate"]: row["sound"] for row in rows} == {"local": False, "global": True}
    assert all(row["mse"] > 0 for row in rows)
    assert all("does not need" in row["assumptions"][-1] for row in rows)


def test_certificates_of_a_table_speak_of_rows(small: AuditConfig) -> None:
    data = load("breast_cancer")
    model = build("mlp", data.input_shape, 2, modality=data.modality)
    scene = build_setup(small, data, model, {"r": RandomMask()}, {})
    rows = [row for row in certificate_rows(scene, ["r"])["r"]]
    told = [text for row in rows for text in (row["says"], *row["assumptions"])]
    assert any("answers with a row X′" in text for text in told)
    assert not any("image" in text for text in told)


def test_a_model_that_no_certificate_can_read_does_not_stop_the_audit(
    small: AuditConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object, **__: object) -> None:
        raise RuntimeError("no rule for this\nlayer")

    monkeypatch.setattr("gradveil.auditing.certificates.metered", unreadable)
    data = load("digits")
    scene = build_setup(small, data, build("logistic", data.input_shape, 10), {}, {})
    (row,) = certificate_rows(scene, ["none"])["none"]
    assert row["mse"] is None
    assert row["says"] == "Not read: no rule for this layer"


def test_tables_of_numbers_are_audited_as_rows(tmp_path: Path, small: AuditConfig, divide: Attack) -> None:
    def make_data() -> tuple[np.ndarray, np.ndarray]:
        return np.random.default_rng(0).random((80, 12), dtype=np.float32), np.arange(80) % 2

    run = audit(
        config=small, dataset=make_data, model=lambda: torch.nn.Linear(12, 2), attacks=[divide], out=tmp_path / "run"
    )
    assert {v.defense: v.outcome for v in run.verdicts}["none"] == "recovered"
    assert "Rows recovered" in write_report(run.folder).read_text()
