"""Messages of every kind, with wrong and hostile values, into the real client app: a sound answer, or an error."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from faults.conftest import Count, times
from gradveil.errors import GradveilError
from gradveil.integrations.flower.app import make_client_app
from gradveil.integrations.flower.records import ASKED
from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data
from gradveil.integrations.flower.site import STATEMENT
from gradveil.privacy.accountant import Account
from integrations.flower_parts import context

RUN = FlowerSettings(
    partition="iid:devices=3,per_device=6", clients=3, rounds=9, model="logistic", batch_size=0,
    defense="veil:z=100,quantile=0.9",
)  # fmt: skip
COST = 1 / 100**2
VALUES: list[Any] = [
    0, 1, -1, 2**31, 2**63 - 1, -(2**63), 10**30, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf, True, "", "1",
    "nan", "x" * 10000, b"", b"\x00\xff", [1.0, 2.0], [1], ["a"], [], [b"x"],
]  # fmt: skip
NAMES = [*ASKED, "public-map", "num-examples", "num-steps", "noise", "secret", "defense", "account", "evaluate"]


def values(draws: random.Random) -> ConfigRecord:
    record = ConfigRecord({"lr": 0.1, "server-round": 1, "public-clip": 1.0})
    for _ in range(draws.randrange(3)):
        name, value = draws.choice(NAMES), draws.choice(VALUES)
        try:
            record[name] = value
        except (TypeError, ValueError):  # Flower's own records do not hold it
            continue
    return record


def arrays(draws: random.Random, state: dict[str, torch.Tensor]) -> ArrayRecord:
    record = {name: Array(value.numpy()) for name, value in state.items()}
    name = draws.choice([*record])
    kind = draws.randrange(12)
    if kind == 0:
        del record[name]
    elif kind == 1:
        record["more"] = record[name]
    elif kind == 2:
        record[name] = Array(record[name].numpy().astype(draws.choice(["f8", "f2", "i8", "c8", "u1", "?"])))
    elif kind == 3:
        record[name] = Array(np.full(record[name].numpy().shape, draws.choice([math.nan, math.inf, 1e38]), np.float32))
    elif kind == 4:
        record[name] = Array(record[name].numpy().reshape(-1)[:1])
    elif kind == 5:
        raw = bytearray(record[name].data)
        raw[draws.randrange(len(raw))] ^= 1 << draws.randrange(8)
        record[name].data = bytes(raw)
    elif kind == 6:
        record[name].data = record[name].data[: draws.randrange(len(record[name].data))]
    return ArrayRecord(record)


def mutated(draws: random.Random, state: dict[str, torch.Tensor]) -> Message:
    content = RecordDict({"arrays": arrays(draws, state), "config": values(draws)})
    if draws.randrange(20) == 0:
        del content[draws.choice(["arrays", "config"])]
    if draws.randrange(20) == 0:
        content["more"] = draws.choice([values(draws), MetricRecord({"x": 1.0}), arrays(draws, state)])
    kind = draws.choice(["train"] * 8 + ["train.other", "evaluate", "query"])
    return Message(content, dst_node_id=7, message_type=kind)


def test_mutated_messages_get_a_sound_answer_or_none_and_every_answer_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path))
    draws, app, own = random.Random(0), make_client_app(RUN), context({"partition-id": 0})
    state = build_model(RUN, load_data("digits", "", RUN.partition, 0)[0]).state_dict()
    answered, number = 0, times(300, 20_000)
    for at in range(number):
        sent = mutated(draws, state)
        before = Account.read(tmp_path / "0.json", "0").spent if answered else 0.0
        try:
            out = app(sent, own)
        except (GradveilError, ValueError, RuntimeError):  # which Flower tells the server
            continue
        if out.has_error() or "node" in out.content.config_records:
            continue
        answered += 1
        assert sent.metadata.message_type == "train", at
        assert {*out.content} == {"arrays", "metrics", STATEMENT}, at
        assert dict(out.content["metrics"]) == {"num-examples": 6, "num-steps": 1}, at
        assert out.content["arrays"].keys() == state.keys(), at
        assert Account.read(tmp_path / "0.json", "0").spent == pytest.approx(before + COST), at
    assert answered > number / 10
    lines = (tmp_path / "0.json.journal").read_text().splitlines()
    assert len(lines) >= answered
    count("mutated messages to the client app", number)
