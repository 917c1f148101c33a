"""The convergence item: its fast path is the general simulation, and its verdicts follow from its rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.errors import DataError
from gradveil.federated.simulate import Training, simulate
from gradveil.models import build
from gradveil.seeds import Seeds
from gradveil_studies.paper import convergence
from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.convergence import Convergence, Devices, local_steps, logistic_rounds, smoothed
from gradveil_studies.paper.theorem2 import LogisticProblem, brightest_removed


@pytest.mark.parametrize("defense", ["none", "representation:count=6"])
@pytest.mark.parametrize("sampling", ["with", "without"])
def test_the_fast_path_is_the_general_simulation(defense: str, sampling: str) -> None:
    dataset = load("digits")
    clients = partition(dataset.train.labels, "classes:devices=6,classes=2,per_class=10", 0)
    training = Training(
        rounds=3, clients=4, epochs=2, batch_size=8, lr=0.5, sampling=sampling,  # type: ignore[arg-type]
        weighting="uniform", weight_decay=0.01,
    )  # fmt: skip
    model = build("logistic:init=zeros", dataset.input_shape, dataset.num_classes)
    inputs = dataset.train.batch().inputs.flatten(1)
    seen = inputs if defense == "none" else brightest_removed(inputs, 6)
    start = torch.zeros(dataset.num_classes, inputs.shape[1] + 1)
    fast = logistic_rounds(inputs, seen, dataset.train.labels, clients, training, Seeds(3), start)
    slow = simulate(model, dataset, clients, training, defense, Seeds(3))
    for w, round_ in zip(fast, slow, strict=True):
        fc = round_.model.get_submodule("fc")
        torch.testing.assert_close(w, torch.cat([fc.weight, fc.bias[:, None]], 1).detach(), rtol=1e-4, atol=1e-6)
        assert float(w.abs().max()) > 0.01


def test_step_sizes_may_fall_and_a_constant_one_is_the_plain_run() -> None:
    dataset = load("digits")
    clients = partition(dataset.train.labels, "classes:devices=6,classes=2,per_class=10", 0)
    inputs = dataset.train.batch().inputs.flatten(1)
    start = torch.zeros(10, inputs.shape[1] + 1)
    asked: list[int] = []

    def run(lr: float, pace: Callable[[int], float] | None = None) -> torch.Tensor:
        training = Training(
            rounds=2, clients=3, epochs=2, batch_size=8, lr=lr, sampling="with", weighting="uniform", weight_decay=0.01,
        )  # fmt: skip
        *_, last = logistic_rounds(
            inputs, inputs, dataset.train.labels, clients, training, Seeds(3), start, pace
        )  # fmt: skip
        return last

    def pace(t: int) -> float:
        asked.append(t)
        return 0.5

    assert torch.equal(run(1.0, pace), run(0.5))
    assert asked == list(range(2 * 2 * 3))  # t counts local steps over all rounds: 20 examples, batches of 8
    assert not torch.equal(run(1.0, lambda t: 0.5 / (1 + t)), run(0.5))


def test_devices_of_different_sizes_are_refused() -> None:
    dataset = load("digits")
    clients = partition(dataset.train.labels, "dirichlet:devices=4,alpha=0.5", 0)
    inputs = dataset.train.batch().inputs.flatten(1)
    rounds = logistic_rounds(
        inputs, inputs, dataset.train.labels, clients, Training(), Seeds(0), torch.zeros(10, inputs.shape[1] + 1)
    )
    with pytest.raises(DataError, match="different sizes"):
        next(iter(rounds))


def row(kind: str, defense: str, round_: int, loss: float, lr: float = 0.01) -> Row:
    figures = {"loss": loss, "gradient": 0.1, "bias": 0.2}
    return {
        "kind": kind,
        "defense": defense,
        "round": round_,
        "seed": 0,
        "epochs": 10,
        "devices": 10,
        "lr": lr,
    } | figures


def constants() -> Row:
    return {
        "kind": "constants", "smoothness": 30.0, "convexity": 1e-4, "gradient": 48.0, "output": 1.4, "spread": 0.2,
        "distance": 25.0, "displacement": 7.0, "parts": [0.5, 0.5], "sigmas": [2.0, 2.0], "lowest": 0.2, "start": 2.3,
        "uncertain": 1e-9,
    }  # fmt: skip


def test_the_verdicts_follow_from_the_rows() -> None:
    falling = [row("E=10", d, t, 1.0 / t + (d == "ours") * 0.1) for d in ("none", "ours") for t in (1, 2, 10)]
    rising = [row("long", "ours", t, loss, 0.1) for t, loss in ((1, 1.0), (200, 0.46), (600, 0.59))]
    paper, paper_smooth, long, long_smooth, price, gap, bias = Convergence().verdicts([constants(), *falling, *rising])
    assert paper.status == paper_smooth.status == "reproduced"
    assert long_smooth.status == "not reproduced"
    assert "added after the runs" in long_smooth.rule
    assert "added after" not in long.rule
    assert long.status == "not reproduced"
    assert "1.283" in long.ours
    assert price.status == "not reproduced"
    assert "2.00 x" in price.ours
    assert gap.status == bias.status == "reproduced"
    assert bias.ours == "at most 0.2, bound 9.8"
    above = row("long", "ours", 700, 0.3 + 0.1**2 / (2 * 1e-4), 0.1)
    assert "held at 9 of 10" in Convergence().verdicts([constants(), *falling, *rising, above])[5].ours
    table = Convergence().summary([constants(), *falling, *rising])
    assert [line["rounds"] for line in table] == [10, 10, 600]
    assert table[1]["F - F*"] == "0.0000"
    assert table[2]["lowest loss (round)"] == "0.4600 (200)"
    assert table[0]["theorem A (estimate)"].endswith("+ 0")
    assert float(table[1]["printed bound"]) > 1e6


def test_one_noisy_round_is_no_turn_and_undefended_runs_are_the_control() -> None:
    noisy = [1.0 - 0.02 * i + 0.05 * (i % 2) for i in range(20)]
    assert smoothed([1.0, 2.0, 3.0, 4.0], 5) == [1.5, 2.5, 3.5]
    rows = [row("long", d, 20 * i, loss, 0.1) for d in ("none", "ours") for i, loss in enumerate(noisy)]
    assert noisy[-1] > 1.02 * min(noisy)
    as_stated, smooth = Convergence().verdicts(rows)
    assert (as_stated.status, smooth.status) == ("not reproduced", "reproduced")
    assert as_stated.ours.endswith("above 1.02 in 1 of 1 runs; undefended 1.047, 1 of 1")
    assert smooth.ours == "last / lowest loss 1.000, above 1.02 in 0 of 1 runs; undefended 1.000, 0 of 1"


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kinds = [(kind, d, t) for kind in ("E=10", "schedule") for d in ("none", "ours") for t in (1, 2)]
    rows = [constants(), *(row(kind, d, t, 1.0 / t) for kind, d, t in kinds)]
    assert Convergence().draw(rows, tmp_path / "figure")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_units_are_all_settings_with_and_without_the_defence() -> None:
    units = Convergence().units(Context())
    assert len(units) == len(set(units)) == 1 + 8 + 4
    assert len(Convergence().units(Context(scale="full"))) == 1 + 24 + 4
    assert local_steps(5) == 35


@pytest.mark.slow
def test_a_short_run_on_mnist_falls_and_the_defence_is_biased(data_folder: Path) -> None:
    item = Convergence(devices="classes:devices=10,classes=2,per_class=60")
    place = Context(str(data_folder))
    plain, ours = (item.run(f"E=5 K=5 {d} seed=0", place) for d in ("none", "ours"))
    assert plain[-1]["loss"] < 0.6 * plain[0]["loss"]
    assert plain[-1]["loss"] < ours[-1]["loss"] < ours[0]["loss"]
    assert min(r["bias"] for r in ours) > 0.01


def test_the_schedule_is_that_of_the_theorems(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load("digits")
    clients = partition(dataset.train.labels, "classes:devices=6,classes=2,per_class=10", 0)
    rows = torch.cat([torch.from_numpy(c) for c in clients])
    inputs, labels = dataset.train.batch(rows).inputs.flatten(1), dataset.train.labels[rows]
    problem = LogisticProblem(inputs, labels, torch.arange(6).repeat_interleave(20), 1e-4)
    mine = [chunk.numpy() for chunk in torch.arange(120).split(20)]
    place = Devices(problem, brightest_removed(inputs, 6), mine)
    paces = []

    def watched(*arguments: Any) -> Iterator[torch.Tensor]:
        paces.append(arguments[-1])
        return iter([problem.start()] * 20)

    monkeypatch.setattr(convergence, "world", lambda *_: place)
    monkeypatch.setattr(convergence, "logistic_rounds", watched)
    found = Convergence().run("schedule ours", Context())
    gamma = 8 * problem.smoothness() / 1e-4
    assert paces[0](0) == pytest.approx(2 / (1e-4 * gamma))
    assert paces[0](700) == pytest.approx(2 / (1e-4 * (gamma + 700)))
    assert {r["kind"] for r in found} == {"schedule"}
    assert found[-1]["round"] == 20
    assert Convergence().run("long none", Context())[0]["lr"] == 0.1
    assert paces[1] is None
    assert "lr=2/(μ(γ+t)) ours" in Convergence().summary(found)[0]["setting"]
