"""What a client would have to change: each change's noise is the plan's own, and options add up."""

from dataclasses import replace

import pytest

from gradveil.auditing.changes import AS_IT_IS, change_rows
from gradveil.auditing.run_folder import Row
from gradveil.privacy.plan import TWO_POINTS, Plan, PlannedRun
from gradveil.threats.setup import AuditConfig, build_setup, fitting_model, load_dataset


def rows_of(config: AuditConfig) -> list[Row]:
    data = load_dataset(config.dataset, None)
    model = fitting_model(config.model, data, "cross_entropy", 0)
    return change_rows(build_setup(config, data, model, {}, {}))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(AuditConfig(model="lenet"))


def test_every_change_is_planned_for_this_client(rows: list[Row]) -> None:
    first = rows[0]
    assert first["what"] == AS_IT_IS
    run = PlannedRun(**first["run"])
    assert (run.records, run.batch_size, run.cohort, run.rounds) == (144, 8, 5, 10)
    planned = Plan(run, run.z(0.5), "local", first["parameters"])
    assert first["together"] == first["alone"] == planned.noise_to_signal
    for row in rows[1:]:
        run = PlannedRun(**row["run"])
        planned = Plan(run, run.z(0.5), row["tier"], row["parameters"])
        assert row["together"] == pytest.approx(planned.noise_to_signal)


def test_one_step_takes_as_many_rounds_as_there_were_steps(rows: list[Row]) -> None:
    """A change that saves noise by training less would be no advice."""
    one = next(row for row in rows if "--batch-size 0" in row["how"])
    assert one["options"]["rounds"] == 10 * 18
    assert one["run"]["participations"] == 18 * rows[0]["run"]["participations"]


def test_settings_come_before_data_and_cohorts_and_the_last_suffices(rows: list[Row]) -> None:
    settings = [row["by_settings"] for row in rows]
    assert settings == sorted(settings, reverse=True)
    falling = [row["together"] for row in rows if row["by_settings"]]
    assert falling == sorted(falling, reverse=True)
    assert rows[-1]["together"] <= TWO_POINTS


def test_more_records_than_a_batch_stay_in_one_step() -> None:
    rows = rows_of(AuditConfig(model="logistic", partition="iid:devices=90", batch_size=32, rounds=3))
    assert rows[0]["run"]["records"] < 32
    assert rows[-1]["together"] <= TWO_POINTS
    assert all(PlannedRun(**row["run"]).steps == 1 for row in rows)


def test_the_last_layer_alone_is_for_trained_weights(rows: list[Row]) -> None:
    assert not any("trains" in row["options"] and row["options"]["trains"] == "head" for row in rows)
    assert any("--trains head" in row["how"] for row in rows)  # it is shown, planned by itself


def test_a_cohort_that_suffices_needs_no_change() -> None:
    config = replace(AuditConfig(model="logistic"), clients=60, batch_size=None, rounds=1, partition="iid:devices=60")
    first = rows_of(config)[0]
    assert first["by_settings"]
    assert first["together"] == pytest.approx(0.5 * 650**0.5 / (24 * 60**0.5), rel=0.05)
