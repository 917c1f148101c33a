"""The leak meter of an audit: last, within a stated time, left out where nobody wants it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from gradveil.attacks.base import Attack
from gradveil.auditing import certificates
from gradveil.auditing.audit import audit
from gradveil.auditing.certificates import certificate_rows
from gradveil.auditing.run_folder import RunFolder
from gradveil.data import load
from gradveil.defenses.noise import Gaussian
from gradveil.defenses.representation import RandomMask
from gradveil.models import build
from gradveil.threats.setup import AuditConfig, AuditSetup, build_setup

Command = Callable[..., tuple[int, str, str]]
AUDIT = (
    "audit", "--model", "logistic", "--rounds", "1", "--images", "2", "--clients", "2", "--batch-size", "16",
    "--partition", "iid:devices=10,per_device=20", "--defense", "pruning:share=0.5", "--attack", "analytic",
)  # fmt: skip


@pytest.fixture
def scene(small: AuditConfig) -> AuditSetup:
    data = load("digits")
    return build_setup(small, data, build("probe", data.input_shape, 10), {"mask": RandomMask()}, {})


def test_the_meter_comes_after_training_and_attacks_and_shows_how_far_it_is(
    tmp_path: Path, small: AuditConfig, divide: Attack
) -> None:
    seen: list[tuple[str, int, int]] = []
    run = audit(config=small, attacks=[divide], out=tmp_path / "run", progress=lambda *step: seen.append(step))
    units = list(dict.fromkeys(row["unit"].partition("/")[0] for row in run.rows))
    assert units == ["truth", "probe", "train", "attack", "film", "promise"]
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == [
        "training", "local steps", "attacks", "leak meter"
    ]  # fmt: skip
    assert seen[-1] == ("leak meter", 10, 10)  # two defences: certificates and four clients each


@pytest.mark.parametrize(
    ("seconds", "certificates_known", "said"),
    [
        (0.5, False, "Not measured: the time limit of 0.5 s was reached."),
        (2, True, "Not measured: the time limit of 2 s was reached."),
        (6, True, "this server gets. Of 2 of 4 clients: the time limit of 6 s was reached."),
        (1000, True, "Says nothing: no noise limits what this server gets."),
    ],
)
def test_what_the_time_does_not_allow_is_said(
    scene: AuditSetup, monkeypatch: pytest.MonkeyPatch, seconds: float, certificates_known: bool, said: str
) -> None:
    clock = count()  # a second passes with every look at it
    monkeypatch.setattr(certificates.time, "monotonic", lambda: float(next(clock)))
    limited = replace(scene, config=replace(scene.config, meter_seconds=seconds))
    rows = certificate_rows(limited, ["none", "mask"])
    promised = [row for row in rows["mask"] if row["kind"] == "certificate"]
    assert {row["certificate"]: row["mse"] is not None for row in promised} == dict.fromkeys(
        ("local", "global"), certificates_known
    )
    (meter,) = [row for row in rows["none"] if row["kind"] == "meter"]
    assert meter["says"].endswith(said)
    assert meter["mse"] is None
    assert rows["mask"][-1]["kind"] == "meter"


def test_without_the_meter_the_report_says_so_and_it_can_be_run_later(command: Command, tmp_path: Path) -> None:
    code, _, err = command(*AUDIT, "--out", "run", "--no-meter")
    assert code == 0, err
    assert "leak meter" not in err
    before = (tmp_path / "run" / "rows.jsonl").read_text()
    assert '"meter"' not in before
    assert (tmp_path / "run" / "report.html").read_text().count("Not run.") == 2
    code, _, err = command(*AUDIT, "--out", "run", "--resume")
    assert code == 0, err
    assert (tmp_path / "run" / "rows.jsonl").read_text().startswith(before)
    new = RunFolder.open(tmp_path / "run").rows[before.count("\n") :]
    assert {row["unit"] for row in new} == {"promise/none", "promise/pruning:share=0.5"}
    assert "Not run." not in (tmp_path / "run" / "report.html").read_text()


def test_the_time_limit_is_a_number_of_seconds(command: Command) -> None:
    code, _, err = command(*AUDIT, "--meter-seconds", "-1")
    assert code == 2
    assert err == "gradveil: meter_seconds=-1.0: give a number from 0.\n"


def test_rows_of_a_table_are_no_gaussian_and_have_no_figure(small: AuditConfig) -> None:
    data = load("made_up_patients:rows=200")
    setup = build_setup(small, data, build("mlp", data.input_shape, 2), {"noise": Gaussian(scale=0.1)}, {})
    meters = [row for row in certificate_rows(setup, ["noise"])["noise"] if row["kind"] == "meter"]
    assert [(row["mse"], row["says"]) for row in meters] == [
        (None, "Not read: it takes examples for Gaussian, which categories and words are not.")
    ]
