"""One recommendation, by what was found: what holds, what to try next, or that nothing can be concluded."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing.run_folder import Row
from gradveil.cli.main import whole_command
from gradveil.report.advice import Advice, advice, change_table, tiers_tried, verdict_sentence
from gradveil.report.page import write_report
from gradveil.threats.rows import modality_of
from gradveil.threats.verdict import verdicts
from report.conftest import SCENE, Scene, write_run

CONFIG = {"model": "lenet", "dataset": "digits", "clients": 5, "batch_size": 8, "lr": 0.3}
BROKEN = "representation:share=0.4"
HOLDS = "gaussian:std=0.1"
OTHERS: list[Row] = [
    {"kind": "tier", "tier": t, "why": "it cannot be"} for t in ("informed", "multi-round", "malicious")
]


def scene(accuracy: float) -> Scene:
    return {"none": SCENE["none"], BROKEN: SCENE[BROKEN], HOLDS: (accuracy, SCENE[HOLDS][1])}


def advised(folder: Path, *defenses: str, accuracy: float = 0.7, more: Sequence[Row] = (), **config: Any) -> Advice:
    named = {**SCENE, **scene(accuracy)}
    rows = [*write_run(folder, {name: named[name] for name in defenses}).rows, *more]
    found = advice(verdicts(rows), CONFIG | config, rows)
    assert found is not None
    return found


def change(together: float, what: str = "secure aggregation", how: str = "veil:tier=aggregate", **options: Any) -> Row:
    run = {"records": 144, "batch_size": None, "epochs": 1, "rounds": 10, "participations": 5, "cohort": 13}
    return {"kind": "change", "what": what, "how": how, "alone": None, "together": together, "limit": 0.06,
            "options": options, "by_settings": bool(how), "run": run, "tier": "aggregate",
            "parameters": 490}  # fmt: skip


def test_what_holds_is_recommended_with_its_cost_and_its_command(tmp_path: Path) -> None:
    found = advised(tmp_path / "run", "none", BROKEN, HOLDS, accuracy=0.9, more=OTHERS)
    assert found.text.startswith("Train with Gaussian noise, std 0.1")
    assert found.cost.startswith("3.0 points of accuracy")  # 0.93 - 0.9
    assert "90.0%, against 93.0% without a defence" in found.cost
    local = "--clients 5 --batch-size 8 --lr 0.3 --rounds 10"
    assert found.command == f"gradveil train --model lenet --dataset digits {local} --defense {HOLDS}"


def test_what_costs_too_much_is_not_recommended(tmp_path: Path) -> None:
    found = advised(tmp_path / "run", "none", BROKEN, HOLDS, more=OTHERS)
    assert found.text.startswith("No defence here keeps both")
    assert found.cost.startswith("23.0 points of accuracy")
    assert found.command == "gradveil plan --promise reconstruction --model lenet --dataset digits"


def test_a_promise_is_recommended_where_its_noise_is_planned_to_cost_little(tmp_path: Path) -> None:
    """The changes up to the first that suffices are options of the command; what was planned stands as its cost."""
    alone = [change(0.4, "as it is", ""), change(0.05, tier="aggregate", batch_size=None), change(0.01, trains="head")]
    found = advised(tmp_path / "run", "none", BROKEN, more=alone)
    assert "Audit veil next, with the changes below up to secure aggregation" in found.text
    assert "noise at 0.05 of the signal" in found.cost
    assert found.command.endswith("--batch-size 0 --rounds 10 --defense veil:promise=reconstruction,tier=aggregate")
    assert "--trains" not in found.command


def test_where_settings_are_not_enough_no_defence_keeps_both(tmp_path: Path) -> None:
    rows = [change(0.4), change(0.05, "a cohort of 13 clients", "", tier="aggregate")]
    found = advised(tmp_path / "run", "none", BROKEN, more=rows)
    assert (
        "No defence here keeps both, privacy and accuracy: it takes the changes below, up to a cohort of 13"
        in found.text
    )
    assert found.command.startswith("gradveil plan --promise reconstruction --cohort 13 --records 144 --batch-size 0")
    assert change_table(rows)[-1][-1] == "two points or less"
    assert change_table([]) == []


@pytest.mark.parametrize("server", ["informed", "multi-round", "malicious"])
def test_what_was_not_attacked_by_all_is_not_recommended(tmp_path: Path, server: str) -> None:
    some = [row for row in OTHERS if row["tier"] != server]
    found = advised(tmp_path / "run", "none", HOLDS, accuracy=0.92, more=some)
    assert found.text.startswith("Do not rely on Gaussian noise, std 0.1 yet")
    assert "not all attacks on it were tried" in found.text
    assert found.command.startswith("gradveil audit")
    assert found.command.endswith(f"--defense {HOLDS}")


@pytest.mark.parametrize("left", [{"out_of_time": True}, {"control_failed": "gs:steps=50"}])
def test_what_was_not_attacked_for_lack_of_time_is_not_recommended(tmp_path: Path, left: Row) -> None:
    late = {"kind": "skip", "defense": HOLDS, "tier": "adaptive", "attack": "gs", "why": "out of time", "round": "first",  # noqa: E501
            "weights": "start", "server": "mask", "example": 0, "unit": "not tried", **left}  # fmt: skip
    found = advised(tmp_path / "run", "none", HOLDS, accuracy=0.92, more=[*OTHERS, late])
    assert "not all attacks on it were tried" in found.text


def test_what_was_never_trained_with_is_not_recommended(tmp_path: Path) -> None:
    rows = [*write_run(tmp_path / "run", {name: scene(0.9)[name] for name in ("none", HOLDS)}).rows, *OTHERS]
    rows = [row for row in rows if row["kind"] != "accuracy"]
    found = advice(verdicts(rows), CONFIG, rows)
    assert found is not None
    assert "what it costs was not measured" in found.text
    assert "--rounds" in found.command


@pytest.mark.parametrize("defenses", [("none", HOLDS)])
def test_a_table_dealt_out_by_a_column_stays_so(tmp_path: Path, defenses: tuple[str, ...]) -> None:
    spec = "table:path=patients.csv,target=outcome,by=hospital"
    found = advised(tmp_path / "run", *defenses, dataset=spec, partition="natural")
    assert f"--dataset {spec} --partition natural" in found.command
    assert "--partition" not in advised(tmp_path / "other", *defenses).command


def test_every_setting_of_the_run_is_in_the_command(tmp_path: Path) -> None:
    settings = {"examples": 4, "epochs": 2, "clients": 3, "partition": "dirichlet:alpha=1", "lr": 0.05,
                "optimizer": "adam", "batch_size": 16, "images": 4, "weights": "mine.pt", "gallery": 50,
                "aggregator": "fedavgm", "rounds": 7, "trained": True}  # fmt: skip
    audit = advised(tmp_path / "a", "none", BROKEN, more=[change(0.05)], **settings).command
    audit_only = {"examples", "images", "weights", "gallery"}
    for name, value in settings.items():
        assert name == "trained" or f"--{name.replace('_', '-')} {value}" in audit
    train = advised(tmp_path / "b", "none", HOLDS, accuracy=0.92, more=OTHERS, **settings).command
    for name in settings.keys() - audit_only - {"trained"}:
        assert f"--{name.replace('_', '-')} {settings[name]}" in train
    plan = advised(tmp_path / "c", "none", HOLDS, more=OTHERS, **settings).command
    enough = advised(tmp_path / "d", "none", BROKEN, more=[change(0.4), change(0.05, how="")], **settings).command
    for command in (audit, train, plan, enough):  # a command line that cannot be read raises
        _, name, *words = shlex.split(command)
        whole_command(name).make_context(name, words)


def test_where_nothing_holds_veil_is_next(tmp_path: Path) -> None:
    found = advised(tmp_path / "run", "none", BROKEN, "pruning:share=0.8")
    assert found.text.startswith("Rely on none of these.")
    assert found.cost.startswith("Not measured in this audit")
    assert found.command.startswith("gradveil plan")


def test_a_defence_that_another_tier_broke_is_not_recommended(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run", {name: SCENE[name] for name in ("none", HOLDS)})
    rows = [dict(row) for row in store.rows]
    more = [
        row | {"server": "whiten", "tier": "multi-round", "mse": 1e-6, "identified": 1.0}
        for row in rows
        if row["kind"] == "attack" and row["defense"] == HOLDS and row["server"] == "whiten"
    ]
    found = advice(verdicts([*rows, *more]), CONFIG, [*rows, *more])
    assert found is not None
    assert found.text.startswith("Rely on none of these.")


def test_where_attacks_fail_without_a_defence_nothing_is_called_safe(tmp_path: Path) -> None:
    weak = (0.93, {("oblivious", "newton"): 0.2})
    store = write_run(tmp_path / "run", {"none": weak, HOLDS: (0.7, {("oblivious", "newton"): 0.3})})
    found = advice(verdicts(store.rows), CONFIG)
    assert found is not None
    assert "before you call this safe" in found.text


def test_the_page_says_against_whom_and_what_to_do(run_folder: Path) -> None:
    page = write_report(run_folder).read_text()
    assert "Against whom" in page
    assert "What to do" in page
    tried, missing = tiers_tried(verdicts(write_run(run_folder.parent / "again", SCENE).rows))
    assert [name.partition(" (")[0] for name in tried] == ["oblivious server", "adaptive server"]
    assert [name.partition(" (")[0] for name in missing] == [
        "informed server",
        "multi-round server",
        "malicious server",
    ]


@pytest.mark.parametrize(
    ("defenses", "sentence"),
    [
        (("none",), "Without a defence a server gets the images back."),
        (("none", BROKEN), "The defence does not keep the images from the server."),
        (("none", BROKEN, "pruning:share=0.8"), "None of the 2 defences keeps the images from the server."),
        (("none", HOLDS), "Nothing found by this panel; nothing is proved."),
        (
            ("none", BROKEN, HOLDS),
            "In 1 of 2 defences (Gaussian noise, std 0.1) nothing was found by this panel; nothing is proved.",
        ),
        (
            ("none", BROKEN, "<script>alert(1)</script>"),
            "No defence is shown to keep the images from the server: of 2, 1 gave them away, 1 could not be judged.",
        ),
    ],
)
def test_the_first_sentence_is_the_verdict(tmp_path: Path, defenses: tuple[str, ...], sentence: str) -> None:
    store = write_run(tmp_path / "run", {name: SCENE[name] for name in defenses})
    assert verdict_sentence(verdicts(store.rows), modality_of(store.rows)) == sentence
    store.close()
    page = write_report(tmp_path / "run").read_text()
    assert page.index(sentence) < page.index("What to do")
