"""Undefended clients: runs end to end at toy size by the command, verdicts follow from rows, time is kept to."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradveil.threats.panel import oblivious
from gradveil.threats.trial import Trial
from gradveil.types import Reconstruction
from gradveil_studies.cli import reproduce
from gradveil_studies.paper import clients as client_runs
from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.clients import (
    AttackedClient,
    ClientCell,
    Clients,
    all_cells,
    amount,
    by_cell,
    in_time,
    network,
    stage,
)


def run(out: Path, *words: str) -> dict[str, list[Row]]:
    app = typer.Typer()
    app.command()(reproduce.command)
    done = CliRunner().invoke(app, ["clients", "--jobs", "1", "--out", str(out), "--json", *words])
    assert done.exit_code == 0, done.output
    found: dict[str, list[Row]]
    (found,) = json.loads(done.stdout)
    return found


def test_the_command_runs_goes_on_and_keeps_what_it_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network.cache_clear()
    run(tmp_path, "--only", "train/mlp")
    network.cache_clear()
    monkeypatch.setattr(client_runs, "_trained", None)  # not trained again, but read
    first = run(tmp_path, "--only", "mlp*", "--resume")["table"]
    assert [(line["examples"], line["local training"], line["setting"]) for line in first] == [
        (1, "one step", "diagnostic"), (8, "2 epochs, momentum", "deployment"),
    ]  # fmt: skip
    assert (first[0]["verdict"], first[0]["strongest"], first[0]["control"]) == ("**recovered**", "analytic", "0")
    assert first[1]["weights"].startswith("trained (")
    assert all(float(line["floor"]) > 0 and line["server picks"] for line in first)
    rows = (tmp_path / "clients" / "rows.jsonl").read_text()
    second = run(tmp_path, "--only", "vit*", "--resume")
    assert [line["network"] for line in second["table"]] == ["vit_tiny", "mlp", "mlp"]
    assert (tmp_path / "clients" / "rows.jsonl").read_text().startswith(rows)
    assert (tmp_path / "clients" / "clients.svg").stat().st_size > 1000


def test_the_table_is_whole_and_says_which_settings_are_real() -> None:
    units = Clients().units(Context(scale="full"))
    assert len(units) == 4 + 4 * 3 * 3 * 2
    assert units[:4] == ["train/lenet", "train/resnet18", "train/vit_tiny", "train/mlp"]
    real = [cell for cell in all_cells() if cell.setting == "deployment"]
    assert {(cell.schedule, cell.weights) for cell in real} == {("momentum", "trained"), ("adam", "trained")}


def rows_of(cell: ClientCell, mse: float, *, converged: bool = False, late: bool = False) -> list[Row]:
    head = {"network": cell.network, "examples": cell.examples, "schedule": cell.schedule, "weights": cell.weights}
    many = cell.examples
    about = {"attack": "gs", "spec": "gs", "took": 2.0, "gallery": 100, "objective": 0.1, "mismatch": 0.2}
    told = {"mse": [mse] * many, "identified": [0.0] * many, "label": [1.0] * many}
    rows = [
        {"kind": "client", "accuracy": 0.5, "floors": {"grey": [0.2] * many, "mean image": [0.1] * many}},
        {"kind": "attack", "converged": converged, "out_of_time": late} | about | told,
        {"kind": "attack", "converged": True, "out_of_time": False} | about | told
        | {"attack": "dlg", "mismatch": 0.1, "mse": [0.3] * many},
        {"kind": "skip", "attack": "newton", "spec": "newton", "why": "refused", "took": 0.0},
    ]  # fmt: skip
    return [head | {"client": 0} | row for row in rows]


@pytest.mark.parametrize(
    ("mse", "converged", "late", "verdict"),
    [
        (0.009, True, False, "**recovered**"),
        (0.04, False, False, "traces"),
        (0.09, False, False, "uninformative (gs did not converge on 8 of 8; dlg found another answer)"),
        (0.09, True, False, "uninformative (gs found another answer; dlg found another answer)"),
        (0.09, False, True, "uninformative (gs out of time on 8 of 8; dlg found another answer)"),
    ],
)
def test_a_line_says_what_was_got_or_why_nothing(mse: float, converged: bool, late: bool, verdict: str) -> None:
    rows = rows_of(ClientCell("resnet18", 8, "adam", "trained"), mse, converged=converged, late=late)
    (line,) = Clients().summary(rows)
    assert line["verdict"] == verdict
    assert (line["strongest"], line["server picks"], line["floor"]) == ("gs", "dlg", "0.1")
    assert line["MSE by attack"] == f"gs {mse:g}, dlg 0.3, newton –"
    assert (line["weights"], line["seconds"]) == ("trained (50%)", "4")
    laboratory, today = (v.status for v in Clients().verdicts(rows))
    assert laboratory == "not measured"
    assert today == ("not reproduced" if verdict == "**recovered**" else "reproduced")


def test_lines_stand_beside_those_that_they_are_compared_with() -> None:
    cells = [
        ClientCell("mlp", 1, "step", "trained"),
        ClientCell("lenet", 8, "adam", "trained"),
        ClientCell("mlp", 1, "step", "untrained"),
    ]
    found = by_cell([row for cell in cells for row in rows_of(cell, 0.001)])
    assert [f.cell.name for f in found] == ["lenet/8/adam/trained", "mlp/1/step/untrained", "mlp/1/step/trained"]
    assert Clients().verdicts([row for cell in cells for row in rows_of(cell, 0.001)])[0].status == "reproduced"


def test_an_attack_that_has_no_time_for_its_steps_takes_fewer_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_runs, "TRY", 0.1)
    context = Context()
    much, cell = amount(context, 0.2, 1), ClientCell("vit_tiny", 8, "step", "untrained")
    shared, (model, _) = stage(much.dataset, context), network("vit_tiny", "untrained", much, context)
    client = AttackedClient(cell, 0, model, shared.truth[:8], shared, context)
    seen = client.sent(client.truth, "client")
    found, spec = in_time(lambda s: Trial(seen, oblivious(), s, context.seeds("a")), "gs:steps=1000000,tol=0", 0.2)
    assert isinstance(found, Reconstruction)
    assert "out_of_time" in found.details
    assert 1 <= int(spec.partition("steps=")[2].partition(",")[0]) < 1_000_000
    assert client.mismatch(seen, found) == pytest.approx(found.details["relative_residual"], abs=1e-3)
