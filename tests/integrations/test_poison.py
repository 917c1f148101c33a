"""Replies that are finite and false: each is refused, counted by its reason, and never averaged."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.errors import SpecError
from gradveil.integrations.flower.checks import CheckedGrid, checked
from gradveil.integrations.flower.settings import build_strategy
from gradveil.tree import Params
from integrations.flower_parts import Nodes, message, reply

Answer = Callable[[Message], Message]


def moved(by: float, examples: float = 2) -> Answer:
    """A client all of whose weights move by this."""
    return lambda msg: reply(msg, {n: v + by for n, v in state(msg).items()}, examples)


def state(msg: Message) -> Params:
    found: Params = msg.content["arrays"].to_torch_state_dict()
    return found


def changed(change: Callable[[Message], None]) -> Answer:
    """An honest reply, and what is then done to it."""

    def answer(msg: Message) -> Message:
        out = moved(1.0)(msg)
        change(out)
        return out

    return answer


def retyped(kind: torch.dtype) -> Answer:
    return lambda msg: reply(msg, {n: (v + 1).to(kind) for n, v in state(msg).items()})


def with_array(array: Callable[[Array], Array]) -> Answer:
    """One tensor's bytes are not what they should be."""

    def change(out: Message) -> None:
        record = out.content["arrays"]
        record["5.bias"] = array(record["5.bias"])

    return changed(change)


def bytes_of(value: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, value)
    return file.getvalue()


def lying(kind: str, shape: tuple[int, ...], data: bytes) -> Callable[[Array], Array]:
    return lambda _: Array(kind, shape, "numpy.ndarray", data)


def enormous() -> bytes:
    file = BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (10**11,)}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
    return file.getvalue() + bytes(20)


POISON: dict[str, tuple[Answer, str]] = {
    "+1e6": (moved(1e6), "too far"),
    "+1e30": (moved(1e30), "too far"),
    "+3e38": (moved(3e38), "too far"),
    "-1e30": (moved(-1e30), "too far"),
    "NaN": (moved(float("nan")), "not finite"),
    "int64": (retyped(torch.int64), "wrong type"),
    "float64": (retyped(torch.float64), "wrong type"),
    "float16": (retyped(torch.float16), "wrong type"),
    "complex": (retyped(torch.complex64), "wrong type"),
    "bool": (retyped(torch.bool), "wrong type"),
    "1e18 examples": (moved(1.0, 1e18), "too many examples"),
    "10**18 examples": (moved(1.0, 10**18), "too many examples"),
    "-1 examples": (moved(1.0, -1), "malformed"),
    "NaN examples": (moved(1.0, float("nan")), "malformed"),
    "a list of examples": (changed(lambda m: m.content["metrics"].update({"num-examples": [1, 2]})), "malformed"),
    "a metric more": (changed(lambda m: m.content["metrics"].update({"loss": 1.0})), "other metrics"),
    "no examples said": (changed(lambda m: m.content["metrics"].clear()), "other metrics"),
    "two metric records": (changed(lambda m: m.content.update({"more": MetricRecord({"a": 1})})), "other metrics"),
    "a leak that is a list": (changed(lambda m: m.content["metrics"].update({"leak-psnr": [1.0]})), "malformed"),
    "two models": (changed(lambda m: m.content.update({"more": ArrayRecord(state(m))})), "malformed"),
    "another shape": (with_array(lambda _: Array(np.zeros(4, np.float32))), "malformed"),
    "an empty tensor": (with_array(lambda _: Array(np.zeros(0, np.float32))), "malformed"),
    "no bytes": (with_array(lying("float32", (5,), b"")), "malformed"),
    "cut bytes": (with_array(lying("float32", (5,), bytes_of(np.zeros(5, np.float32))[:-3])), "malformed"),
    "noise for bytes": (with_array(lying("float32", (5,), bytes(range(200)))), "malformed"),
    "a pickle": (with_array(lying("float32", (5,), bytes_of(np.array([{}] * 5)))), "malformed"),
    "int64 inside": (with_array(lying("float32", (5,), bytes_of(np.zeros(5, np.int64)))), "wrong type"),
    "a torn header": (with_array(lying("float32", (5,), enormous().replace(b"}", b"("))), "malformed"),
    "400 GB by its header": (with_array(lying("float32", (5,), enormous())), "malformed"),
    "400 GB, and says so": (with_array(lying("float32", (10**11,), enormous())), "malformed"),
}


def run(answers: list[Answer], model: nn.Module, **bounds: float) -> tuple[CheckedGrid, Params]:
    grid = checked(Nodes(dict(enumerate(answers, start=1))), **bounds)
    result = FedAvg(fraction_evaluate=0.0, min_available_nodes=len(answers)).start(
        grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=1, train_config=ConfigRecord({"lr": 0.1})
    )
    found: Params = result.arrays.to_torch_state_dict()
    return grid, found


@pytest.mark.parametrize("case", POISON)
@pytest.mark.parametrize("honest", [1, 4])
def test_poison_is_refused_and_the_average_is_that_of_the_others(case: str, honest: int, model: nn.Module) -> None:
    poison, reason = POISON[case]
    answers = [*(moved(1.0 + i / 10) for i in range(honest)), poison]
    grid, after = run(answers, model)
    assert grid.counts[0]["reasons"] == {reason: 1}, grid.last_reason
    assert grid.counts[0]["kept"] == honest
    expected = 1.0 + (honest - 1) / 20
    for name, value in model.state_dict().items():
        torch.testing.assert_close(after[name], value + expected)


def test_without_the_checks_the_poison_gets_through(model: nn.Module) -> None:
    """The drill is one: Flower by itself averages these."""
    for case in ("+1e30", "int64", "10**18 examples"):
        nodes = Nodes({1: moved(1.0), 2: moved(1.0), 3: POISON[case][0]})
        if case == "10**18 examples":
            nodes.answers[3] = moved(5.0, 10**18)
        result = FedAvg(fraction_evaluate=0.0).start(
            grid=nodes, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=1
        )
        after = result.arrays.to_torch_state_dict()["5.bias"]
        assert not torch.allclose(after.float(), model.state_dict()["5.bias"] + 1.0), case


def test_bounds_are_the_runs(model: nn.Module) -> None:
    answers = [moved(1.0, 10), moved(1.0, 10), moved(15.0, 500)]
    assert run(answers, model)[0].counts[0]["reasons"] == {"too far": 1}
    assert "reasons" not in run(answers, model, max_change=20)[0].counts[0]
    assert "reasons" not in run(answers, model, max_change=0)[0].counts[0]
    grid, _ = run(answers, model, max_change=0, max_examples=499)
    assert grid.counts[0]["reasons"] == {"too many examples": 1}
    assert "500 examples, and a client can have 499 at most" in grid.last_reason
    with pytest.raises(SpecError, match="max_change"):
        checked(Nodes({}), max_change=float("nan"))


def test_honest_replies_of_all_kinds_are_kept(model: nn.Module) -> None:
    """Clients that did not move, that moved a little, of very different sizes."""
    grid, _ = run([moved(0.0, 1), moved(0.0, 1), moved(1.0, 90), moved(0.2, 3)], model)
    assert grid.counts[0]["kept"] == 4


def test_a_poisoned_majority_is_not_recognised(model: nn.Module) -> None:
    """What the page says: the median is that of most, so most must be honest."""
    grid, _ = run([moved(1.0), moved(1e6), moved(1e6)], model)
    assert grid.counts[0]["kept"] == 3


def test_running_statistics_and_counters(model: nn.Module) -> None:
    """Flower's average makes floats of counters: clients may send them as they are; statistics have a bound."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def trained(shift: float) -> Answer:
        def answer(msg: Message) -> Message:
            own = {n: v + 0.1 for n, v in state(msg).items()}
            own["1.num_batches_tracked"] = torch.tensor(7)
            return reply(msg, own | {"1.running_var": own["1.running_var"] + shift})

        return answer

    grid = checked(Nodes({1: trained(0.0), 2: trained(0.1), 3: trained(1e6)}))
    FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=3)
    assert [row["reasons"] for row in grid.counts] == [{"too far": 1}] * 3
    assert "running statistics" in grid.last_reason


def test_a_reply_that_answers_nothing_is_not_averaged(model: nn.Module) -> None:
    stray = moved(1.0)(message(model, node=9, kind="evaluate"))
    grid, _ = run([moved(1.0), lambda msg: stray], model)
    assert grid.counts[0]["reasons"] == {"malformed": 1}


def test_the_round_is_said_in_one_line(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    from gradveil.integrations.flower.records import LOG

    LOG.propagate = True
    try:
        run([moved(1.0), moved(1.0), moved(1e30), moved(1.0, 1e18)], model)
    finally:
        LOG.propagate = False
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Round 1")]
    assert said == ["Round 1: 2 of 4 replies refused: 1 too many examples, 1 too far."]


ROBUST = ["fedmedian", "fedtrimmedavg:beta=0.2", "krum:num_malicious_nodes=1"]


@pytest.mark.parametrize("strategy", ["fedavg", *ROBUST, "multikrum:num_malicious_nodes=1,num_nodes_to_select=3"])
def test_a_robust_rule_stands_one_that_is_within_the_bounds(strategy: str, model: nn.Module) -> None:
    """Nine times the median, the other way: allowed by the bound, and enough to turn the plain mean round."""
    grid = checked(Nodes({i: moved(1.0) for i in range(1, 7)} | {7: moved(-9.0)}))
    result = build_strategy(strategy, 7).start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=1)
    assert grid.counts[0]["kept"] == 7
    step = float((result.arrays.to_torch_state_dict()["5.bias"] - model.state_dict()["5.bias"]).mean())
    assert step == pytest.approx(-3 / 7 if strategy == "fedavg" else 1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "clients", "said"),
    [
        ("fedtrimmedavg", 4, "leaves out nobody of 4 clients. Give beta=0.25"),
        ("fedtrimmedavg:beta=0.7", 4, "beta"),
        ("bulyan:num_malicious_nodes=1", 6, "bulyan needs 7 clients"),
    ],
)
def test_a_rule_that_would_do_nothing_is_refused(spec: str, clients: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build_strategy(spec, clients)
