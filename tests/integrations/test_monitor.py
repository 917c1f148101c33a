"""A run of one's own leaves a folder that the report draws: what leaked, was refused and spent, and the halt."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from gradveil.auditing.run_folder import ROUNDS
from gradveil.errors import SpecError
from gradveil.integrations.flower import guard_mod, leak_guard, monitored
from gradveil.integrations.flower.checks import MonitoredGrid
from gradveil.integrations.monitor import METRICS, NODES, MonitorSettings, NodeReport, RunMonitor, add_figures
from gradveil.privacy.bounds import epsilon_of
from gradveil.report.page import write_report
from gradveil.types import Batch
from integrations.flower_parts import SIMULATED, Nodes, ReadOff, client_app, context, linear_model, reply

RECORDS = {"slots": 3, "records": 3}


def batch(seed: int, count: int = 1) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.arange(count))


def run(grid: MonitoredGrid, rounds: int) -> dict[str, torch.Tensor]:
    found = FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1).start(
        grid=grid, initial_arrays=ArrayRecord(linear_model().state_dict()), num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.1}),
    )  # fmt: skip
    state: dict[str, torch.Tensor] = found.arrays.to_torch_state_dict()
    return state


def test_leaks_and_refusals_stand_by_round_and_node_and_are_drawn(tmp_path: Path) -> None:
    leaky = client_app(linear_model, batch(1), [leak_guard(ReadOff(), max_psnr=1000)])
    noisy = client_app(
        linear_model, batch(2), [leak_guard(ReadOff(), max_psnr=1000), guard_mod("gaussian:scale=9,on=update")]
    )
    held = client_app(linear_model, batch(3), [leak_guard(ReadOff())])

    def broken(msg: Message) -> Message:
        return reply(msg, {n: v * math.nan for n, v in msg.content["arrays"].to_torch_state_dict().items()})

    nodes = Nodes({
        1: lambda m: leaky(m, context()), 2: lambda m: noisy(m, context()), 3: lambda m: held(m, context()), 4: broken,
        5: lambda m: None,
    })  # fmt: skip
    said: list[str] = []
    grid = monitored(nodes, tmp_path / "run", say=said.append, max_psnr=60.0, max_change=0)
    run(grid, 2)
    grid.monitor.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / ROUNDS).read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[0]["accepted"] == 1  # node 2: of the others one leaks more than the server takes
    assert rows[0]["rejected"] == {"leak": 2, "not finite": 1, "no reply": 1}
    assert (rows[0]["leak-node"], rows[0]["leak-psnr"]) == ("1", 120.0)  # refused, but it had arrived
    each = {
        (row["round"], row["node"]): row for row in map(json.loads, (tmp_path / "run" / NODES).read_text().splitlines())
    }
    assert len(each) == 10
    assert each[2, "2"]["defense"] == "gaussian:scale=9.0,on=update"
    assert each[2, "2"]["leak_psnr"] < 30
    assert each[1, "4"]["reason"] == "not finite"
    assert json.loads((tmp_path / "run" / METRICS).read_text())["rounds"] == rows
    assert len(said) == 2
    assert "2 refused (leak)" in said[0]
    page = write_report(tmp_path / "run").read_text()
    assert "2 rounds: 2 updates were averaged and 8 refused" in page
    assert page.count("not finite") >= 2
    assert "<code>gaussian:scale=9.0,on=update</code>" in page


def test_what_is_spent_is_told_and_the_run_halts_at_its_budget(tmp_path: Path) -> None:
    app = client_app(linear_model, batch(1, 3), [guard_mod("veil:z=2,clip=1", settings=RECORDS)])
    own = context(SIMULATED)
    said: list[str] = []
    grid = monitored(Nodes({1: lambda m: app(m, own)}), tmp_path / "run", budget=1.0, say=said.append, simulation=True)
    state = run(grid, 6)
    grid.monitor.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / ROUNDS).read_text().splitlines()]
    assert [row["mu"] for row in rows] == pytest.approx([0.5, math.sqrt(0.5), math.sqrt(0.75), 1.0])
    assert rows[-1]["epsilon"] == pytest.approx(epsilon_of(1.0, 1e-5))
    assert "μ = 1 of 1 is spent" in rows[-1]["halted"]
    assert not any("halted" in row for row in rows[:-1])
    assert set(state) == set(linear_model().state_dict())
    page = write_report(tmp_path / "run").read_text()
    assert "a record lost at most μ = 1 of 1" in page
    assert "no further round is begun" in page
    with pytest.raises(Exception, match="--resume"):
        monitored(Nodes({}), tmp_path / "run", budget=1.0)
    again = monitored(Nodes({1: lambda m: app(m, own)}), tmp_path / "run", budget=1.0, resume=True, simulation=True)
    assert again.monitor.halted
    run(again, 1)
    assert len((tmp_path / "run" / ROUNDS).read_text().splitlines()) == 4


def test_nodes_of_a_round_that_was_not_finished_are_dropped(tmp_path: Path) -> None:
    settings = MonitorSettings("mine")
    first = RunMonitor(tmp_path / "run", settings)
    first.add(1, NodeReport("a", True, spent=0.25))
    first.end(1, loss=0.5)
    first.add(2, NodeReport("a", True, spent=9.0))
    first.close()
    again = RunMonitor(tmp_path / "run", settings, resume=True)
    assert again.last == 1
    assert again.mu == 0.5
    assert len((tmp_path / "run" / NODES).read_text().splitlines()) == 1


@pytest.mark.parametrize("wrong", [{"budget": -1.0}, {"delta": 0.0}, {"max_psnr": -3.0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SpecError):
        MonitorSettings("flower", **wrong)  # type: ignore[arg-type]


def test_figures_may_come_later_and_the_page_says_what_the_promise_means(tmp_path: Path) -> None:
    monitor = RunMonitor(tmp_path / "run", MonitorSettings("own", "veil:z=1,clip=1"))
    for number in (1, 2):
        monitor.add(number, NodeReport("a", True, noise="simulated", spent=number / 2))
        monitor.end(number)
    monitor.close()
    add_figures(tmp_path / "run", 2, accuracy=0.5, auc=math.nan)
    first, last = monitor.folder.rounds
    assert "accuracy" not in first
    assert (last["accuracy"], last["auc"], last["mu"]) == (0.5, None, 1.0)
    page = write_report(tmp_path / "run").read_text()
    assert "<td>0.5000</td>" in page
    assert "right at most 69 times in 100" in page  # Φ(1/2)
    assert "The noise was simulated, which protects nobody." in page
    assert "gradveil.counted" not in page


def test_a_promise_that_says_little_is_not_called_fine(tmp_path: Path) -> None:
    monitor = RunMonitor(tmp_path / "run", MonitorSettings("own", "veil:z=1,clip=1"))
    monitor.add(1, NodeReport("a", True, noise="secret", spent=9.0))
    monitor.end(1)
    monitor.close()
    page = write_report(tmp_path / "run").read_text()
    assert "A record lost more than μ = 2" in page
    assert "telling which records a step is of (gradveil.counted)" in page
    assert "Nothing stands out" not in page
