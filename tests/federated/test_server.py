"""Averaging by hand, server optimisers by hand, and what is turned away."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradveil.federated.client import Sent
from gradveil.federated.server import SERVERS, Arrival, FedAdam, FedAvg, FedAvgM, average, merge, shares
from gradveil.tree import Params, parameters
from gradveil.types import Update


def model() -> nn.Module:
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 2.0]]))
        net.bias.fill_(0.5)
    return net


def arrival(client: int, g: list[float], n: int = 1, lr: float = 0.5) -> Arrival:
    gradient = {"weight": torch.tensor([g[:2]]).float(), "bias": torch.tensor(g[2:]).float()}
    return client, Sent(Update(gradient, n, 1, lr))


def test_the_weighted_mean_is_that_of_the_clients_weights() -> None:
    arrivals = [arrival(0, [1, 0, 0], n=1), arrival(1, [0, 2, 4], n=3)]
    parts = shares(arrivals, "samples", [1, 3])
    assert parts == [0.25, 0.75]
    target = average(parameters(model()), [sent.update for _, sent in arrivals], parts)
    # clients end at (0.5, 2, 0.5) and (1, 1, -1.5)
    assert target["weight"].tolist() == [[0.25 * 0.5 + 0.75 * 1, 0.25 * 2 + 0.75 * 1]]
    assert target["bias"].tolist() == [0.25 * 0.5 + 0.75 * -1.5]


def test_the_papers_rule_is_n_over_k_times_p_k_and_equals_the_mean_for_equal_clients() -> None:
    arrivals = [arrival(0, [1, 0, 0]), arrival(3, [0, 2, 4])]
    assert shares(arrivals, "paper", [1, 1, 1, 1]) == shares(arrivals, "uniform", [1, 1, 1, 1]) == [0.5, 0.5]
    parts = shares(arrivals, "paper", [1, 2, 2, 5])
    assert parts == pytest.approx([4 / 2 * 0.1, 4 / 2 * 0.5])
    target = average(parameters(model()), [sent.update for _, sent in arrivals], parts)
    assert target["weight"].tolist()[0] == pytest.approx([0.2 * 0.5 + 1.0 * 1, 0.2 * 2 + 1.0 * 1])


@given(n=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_shares_add_up_to_one_except_the_papers(n: list[int]) -> None:
    arrivals = [arrival(k, [0, 0, 0], n=size) for k, size in enumerate(n)]
    for weighting in ("samples", "uniform", "paper"):  # with all devices present the paper's add up as well
        assert sum(shares(arrivals, weighting, n)) == pytest.approx(1)  # type: ignore[arg-type]


def run(server: FedAvg | FedAvgM | FedAdam, steps: list[float]) -> list[float]:
    """The path of one weight that starts at 0 when the clients' average lies a step away each time."""
    weights: Params = {"w": torch.zeros(1, dtype=torch.float64)}
    memory: dict[str, Params] = {}
    path = []
    for step in steps:
        weights, memory = server.move(weights, {"w": weights["w"] + step}, memory)
        path.append(float(weights["w"]))
    return path


def test_server_optimisers_follow_their_formulas() -> None:
    assert run(FedAvg(), [1, 2]) == [1, 3]
    assert run(FedAvgM(lr=0.5, momentum=0.0), [1, 2]) == [0.5, 1.5]
    assert run(FedAvgM(lr=1.0, momentum=0.5), [1, 2, 0]) == pytest.approx([1, 1 + 2.5, 1 + 2.5 + 1.25])
    m1, v1 = 0.1, 0.99 * 1e-6 + 0.01
    first = 0.01 * m1 / (v1**0.5 + 1e-3)
    m2, v2 = 0.9 * m1 + 0.1 * 2, 0.99 * v1 + 0.01 * 4
    assert run(FedAdam(), [1, 2]) == pytest.approx([first, first + 0.01 * m2 / (v2**0.5 + 1e-3)])
    assert SERVERS.names() == ["fedadam", "fedavg", "fedavgm"]


def bad(**changes: torch.Tensor | None) -> Arrival:
    good = arrival(0, [1, 2, 3])[1].update.gradient
    return 0, Sent(Update({name: v for name, v in (good | changes).items() if v is not None}))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (bad(bias=torch.tensor([float("nan")])), "not finite"),
        (bad(weight=torch.tensor([[1.0, float("-inf")]])), "not finite"),
        (bad(bias=torch.zeros(2)), "malformed"),
        (bad(bias=None), "malformed"),
        (bad(other=torch.zeros(1)), "malformed"),
        (bad(bias=torch.zeros(1, dtype=torch.int64)), "malformed"),
        ((0, Sent(Update(bad()[1].update.gradient, num_examples=0))), "malformed"),
        ((0, Sent(bad()[1].update, {"mean": torch.zeros(1)})), "malformed"),
    ],
)
def test_a_bad_arrival_is_counted_and_never_averaged(thing: Arrival, reason: str) -> None:
    good = arrival(1, [1, 1, 1])
    merged = merge(model(), [thing, good, thing], "samples", [1, 1])
    assert (merged.accepted, merged.rejected) == (1, {reason: 2})
    alone = merge(model(), [good], "samples", [1, 1])
    assert (alone.accepted, alone.rejected) == (1, {})
    assert all(torch.equal(merged.target[name], value) for name, value in alone.target.items())
    assert torch.equal(alone.target["weight"], torch.tensor([[0.5, 1.5]]))
    nobody = merge(model(), [thing], "samples", [1, 1])
    assert (nobody.target, nobody.accepted, nobody.rejected) == ({}, 0, {reason: 1})


def test_bad_buffers_are_turned_away() -> None:
    net = nn.BatchNorm1d(2)
    update = Update({"weight": torch.zeros(2), "bias": torch.zeros(2)})
    good = (0, Sent(update, {"running_mean": torch.zeros(2)}))
    wrong = (0, Sent(update, {"running_mean": torch.zeros(3)}))
    nan = (0, Sent(update, {"running_mean": torch.tensor([0.0, float("nan")])}))
    merged = merge(net, [good, wrong, nan], "uniform", [1])
    assert merged.rejected == {"malformed": 1, "not finite": 1}
    assert merged.buffers["running_mean"].tolist() == [0, 0]
