"""SecAgg+ under gradveil's app and any strategy of the Message API, without an engine."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from gradveil.errors import GradveilError
from gradveil.integrations.flower.app import Outcome, make_client_app, serve
from gradveil.integrations.flower.secure_client import masks, secure_mod
from gradveil.integrations.flower.settings import Cohort, FlowerSettings
from integrations.flower_parts import Nodes, client_app, context, linear_model, message

PLAIN = FlowerSettings(
    partition="iid:devices=4,per_device=9", model="logistic", clients=4, batch_size=None, lr=0.1, rounds=1
)
SECURE = replace(PLAIN, secure_aggregation=True, lost=0.5)


def run(settings: FlowerSettings, answers: dict[int, int] | None = None) -> Outcome:
    """Train with nodes that keep their state; some answer only so many training messages, and are silent after."""
    app, left = make_client_app(settings), dict(answers or {})
    states = {device: RecordDict() for device in range(4)}

    def answer(device: int) -> Any:
        def reply(msg: Any) -> Any:
            if msg.metadata.message_type == "train" and device in left:
                left[device] -= 1
                if left[device] < 0:
                    return None
            return app(msg, Context(1, 0, {"partition-id": device}, states[device], {}))

        return reply

    return serve(Nodes({device + 11: answer(device) for device in range(4)}), settings)


def apart(one: Outcome, other: Outcome) -> float:
    return max(float((one.state[name] - value).abs().max()) for name, value in other.state.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3, None])
def test_the_sum_is_the_mean_of_those_who_arrived(stage: int | None) -> None:
    secure = run(SECURE, {} if stage is None else {2: stage})
    plain = run(PLAIN, {2: 0} if stage in (0, 1, 2) else {})  # who is silent in the end only is in the sum
    assert apart(secure, plain) < 1e-6
    assert apart(secure, run(PLAIN, {1: 0})) > 1e-4
    (row,) = secure.rounds
    assert row["released"]
    assert row["accepted"] == (3 if stage in (0, 1, 2) else 4)


def test_a_sum_of_too_few_is_not_released_and_the_model_stays() -> None:
    settings = replace(SECURE, rounds=2, lost=0.25)
    outcome = run(settings, {0: 6, 1: 6})  # both are gone when the second round's updates are collected
    assert [row["released"] for row in outcome.rounds] == [True, False]
    assert outcome.rounds[1]["accepted"] == 0
    assert apart(outcome, run(replace(settings, rounds=1))) < 1e-6
    with pytest.raises(GradveilError, match=r"not released: 2 of 4 clients arrived, 3 are needed"):
        run(replace(settings, rounds=1), {0: 2, 1: 2})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": 1}, "A sum of one client"),
        ({"audit": "gs"}, "no single update to audit"),
        ({"strategy": "krum"}, "krum compares single updates"),
        ({"lost": 1.0}, "lost=1 is no share"),
        ({"secure_aggregation": False}, "secure-aggregation = true"),
    ],
)
def test_settings_that_do_not_fit_a_sum_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        replace(SECURE, **changes)


def test_a_client_sends_nothing_outside_of_a_sum(batch: Any) -> None:
    app = client_app(linear_model, batch, [secure_mod()])
    reply = app(message(linear_model()), context())
    assert "outside of secure aggregation" in reply.error.reason


def test_no_client_unmasks_a_sum_of_too_few() -> None:
    """A server that asks for the keys although too few have arrived gets none."""
    asked: list[int] = []

    class Pushy(Nodes):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            out = list(messages)
            for msg in out:
                said = msg.content.config_records.get(RECORD_KEY_CONFIGS, {})
                if Key.ACTIVE_NODE_ID_LIST in said:
                    said[Key.ACTIVE_NODE_ID_LIST] = said[Key.ACTIVE_NODE_ID_LIST][:1]
                    asked.append(msg.metadata.dst_node_id)
            return super().send_and_receive(out, timeout=timeout)

    app = make_client_app(SECURE)
    states = {device: RecordDict() for device in range(4)}
    nodes = {d + 11: (lambda m, d=d: app(m, Context(1, 0, {"partition-id": d}, states[d], {}))) for d in range(4)}
    with pytest.raises(GradveilError, match="1 clients arrived, and 2 are needed to unmask"):
        serve(Pushy(nodes), SECURE)
    assert asked


def test_masks_take_all_bits_of_the_seed() -> None:
    seed = bytes(range(32))
    swapped = seed[4:8] + seed[:4] + seed[8:]  # Flower's own generator cannot tell the two apart
    (one,), (same,), (other,) = (masks(s, 2**32, [(1000,)]) for s in (seed, seed, swapped))
    assert (one == same).all()
    assert (one != other).mean() > 0.99
    assert 0 <= one.min() < 2**27
    assert 2**32 - 2**27 < one.max() < 2**32


def test_no_sum_overflows() -> None:
    for size in (2, 3, 10, 1000):
        levels = Cohort(size).levels
        assert size * levels < 2**32
        assert levels == 2**30 or 2 * size * levels >= 2**32
