import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.integrations.flower.grids import audited
from gradveil.integrations.flower.records import withhold
from gradveil.types import Batch
from integrations.flower_parts import LR, Nodes, ReadOff, client_app, context, linear_model, reply

SHAPE = {"input_shape": (1, 8, 8), "num_classes": 5}


def nodes(batch: Batch, count: int) -> Nodes:
    """Each node holds one image."""
    parts = [Batch(batch.inputs[[i % 3]], batch.labels[[i % 3]]) for i in range(count)]
    apps = [client_app(linear_model, part, []) for part in parts]
    return Nodes({i + 1: (lambda msg, app=app: app(msg, context())) for i, app in enumerate(apps)})


def start(grid: Nodes, model: nn.Module, rounds: int = 2) -> dict[str, torch.Tensor]:
    strategy = FedAvg(fraction_evaluate=0.0)
    arrays = ArrayRecord(model.state_dict())
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": LR}))
    state: dict[str, torch.Tensor] = result.arrays.to_torch_state_dict()
    return state


def test_the_strategy_gets_what_it_would_have_got(batch: Batch) -> None:
    model = linear_model()
    plainly = start(nodes(batch, 3), model)
    watched = start(audited(nodes(batch, 3), model, ReadOff(), **SHAPE), model)
    for name, value in plainly.items():
        torch.testing.assert_close(watched[name], value)


def test_a_sample_of_each_round_is_attacked_and_logged(batch: Batch, tmp_path: Path) -> None:
    model = linear_model()
    truth = {i + 1: Batch(batch.inputs[[i]], batch.labels[[i]]) for i in range(3)}
    grid = audited(
        nodes(batch, 3), model, ReadOff(), **SHAPE, sample=2, out=tmp_path / "leaks.jsonl",
        truth=lambda answer: truth[answer.metadata.src_node_id],
    )  # fmt: skip
    start(grid, model, rounds=4)

    assert [row["round"] for row in grid.rows] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(row["psnr"] > 60 and row["match"] > 0.999 and row["label"] == 1 for row in grid.rows)
    assert len({row["node"] for row in grid.rows}) == 3
    assert [json.loads(line) for line in (tmp_path / "leaks.jsonl").read_text().splitlines()] == grid.rows


def test_without_the_truth_the_match_is_logged(batch: Batch) -> None:
    model = linear_model()
    grid = audited(nodes(batch, 2), model, ReadOff(), **SHAPE)
    start(grid, model, rounds=1)
    assert grid.rows[0]["match"] > 0.999
    assert "psnr" not in grid.rows[0]


def test_the_server_that_knows_the_defence_is_played_too(batch: Batch) -> None:
    model = linear_model()
    grid = audited(nodes(batch, 2), model, ReadOff(), **SHAPE, defense="pruning:share=0.5")
    start(grid, model, rounds=1)
    assert [row["server"] for row in grid.rows][:2] == ["plain", "mask"]


def test_big_odd_and_failed_replies_do_not_stop_the_audit(batch: Batch) -> None:
    model = linear_model()
    big = client_app(linear_model, Batch(batch.inputs.repeat(9, 1, 1, 1), batch.labels.repeat(9)), [])
    grid = audited(
        Nodes(
            {
                1: lambda msg: big(msg, context()),
                2: lambda msg: reply(msg, {"1.weight": torch.zeros(1)}),
                3: lambda msg: withhold(msg, "no"),
                4: lambda msg: None,
            }
        ),
        model, ReadOff(), **SHAPE, sample=9,
    )  # fmt: skip
    grid.send_and_receive([m for m in messages(model, [1, 2, 3, 4])])
    assert grid.rows[0]["skipped"] == "more than 16 examples"
    assert "differ" in grid.rows[1]["error"]
    assert len(grid.rows) == 2


def test_of_a_large_update_a_sample_is_attacked_where_the_originals_are_known() -> None:
    rng = torch.Generator().manual_seed(5)
    many = Batch(torch.rand(20, 1, 8, 8, generator=rng), torch.arange(20) % 5)
    big = client_app(linear_model, many, [])
    model = linear_model()
    grid = audited(
        Nodes({1: lambda msg: big(msg, context())}), model, ReadOff(), **SHAPE, truth=lambda answer: many
    )  # fmt: skip
    grid.send_and_receive(messages(model, [1]))
    assert [row["others-known"] for row in grid.rows] == [19] * 4
    assert all(row["psnr"] > 60 and row["match"] > 0.999 for row in grid.rows)


def messages(model: nn.Module, to: list[int]):  # type: ignore[no-untyped-def]
    from integrations.flower_parts import message

    return [message(model, node=node) for node in to]
