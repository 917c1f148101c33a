"""A run on Flower that lost its nodes or its server: rounds end at a deadline, and the run is continued."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Context, Message, RecordDict

from gradveil.auditing.run_folder import FolderError
from gradveil.cli.main import entry
from gradveil.errors import DataError, GradveilError, SpecError
from gradveil.integrations.flower import grids
from gradveil.integrations.flower.app import make_client_app, serve
from gradveil.integrations.flower.settings import FlowerSettings
from integrations.flower_parts import Nodes


def settings(out: Path | None = None, **changes: Any) -> FlowerSettings:
    own = {"partition": "iid:devices=4,per_device=8", "clients": 3, "rounds": 4, "model": "logistic", "lr": 0.1}
    return FlowerSettings(**own | changes, out=str(out) if out else "")


class Party(Nodes):
    """Nodes for devices; some can be lost, or kill the server. Keeps how long it was asked to wait."""

    def __init__(self, run: FlowerSettings, devices: Iterable[int] = range(4)) -> None:
        app = make_client_app(run, simulation=True)
        self.trained: list[tuple[int, int]] = []  # round, device
        self.killed_in = 10**9  # the round in which the server dies
        self.lost: set[int] = set()  # devices that never answer
        self.waits: list[float | None] = []

        def answer(device: int):  # type: ignore[no-untyped-def]
            state = RecordDict()

            def reply(msg: Message) -> Message | None:
                if msg.metadata.message_type == "train":
                    now = int(msg.content["config"]["server-round"])
                    if now >= self.killed_in:
                        raise KeyboardInterrupt
                    if device in self.lost:
                        return None
                    self.trained.append((now, device))
                out: Message = app(msg, Context(1, 0, {"partition-id": device}, state, {}))
                return out

            return reply

        super().__init__({device + 100: answer(device) for device in devices})

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        self.waits.append(timeout)
        return super().send_and_receive(messages, timeout=timeout)


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


@pytest.mark.parametrize(
    "strategy", ["fedavg", "fedavgm:server_momentum=0.9", "fedadam:eta=0.05", "fedyogi", "fedadagrad", "fedmedian"]
)
def test_a_continued_run_ends_where_the_unbroken_one_does(strategy: str, tmp_path: Path) -> None:
    whole = serve(Party(run := settings(tmp_path / "whole", strategy=strategy)), run)
    run = settings(tmp_path / "broken", strategy=strategy)
    party = Party(run)
    party.killed_in = 3
    with pytest.raises(KeyboardInterrupt):
        serve(party, run)
    assert len(rows(tmp_path / "broken")) == 2

    run = settings(tmp_path / "broken", strategy=strategy, resume=True)
    after = Party(run)
    outcome = serve(after, run)

    assert {number for number, _ in after.trained} == {3, 4}
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert [row["round"] for row in outcome.rounds] == [1, 2, 3, 4]
    for name, value in whole.state.items():
        assert torch.equal(outcome.state[name], value), name


def test_a_round_that_was_written_and_not_saved_is_done_again_once(tmp_path: Path) -> None:
    run = settings(tmp_path, rounds=2)
    serve(Party(run), run)
    path = tmp_path / "rounds.jsonl"  # killed after the line, before the checkpoint; a line cut off
    path.write_text(path.read_text() + json.dumps({"round": 3, "accepted": 3, "rejected": {}}) + '\n{"round": 4')
    run = settings(tmp_path, rounds=3, resume=True)
    serve(Party(run), run)
    assert [row["round"] for row in rows(tmp_path)] == [1, 2, 3]
    finished = Party(run)
    assert len(serve(finished, run).rounds) == 3  # nothing is left to do
    assert not finished.trained


def test_what_records_have_spent_is_not_forgotten(tmp_path: Path) -> None:
    own = {"defense": "veil:z=2,clip=1,limit=0.5", "clients": 4, "batch_size": 0}  # two rounds of μ² = 1/4 for each
    run = settings(tmp_path, rounds=2, **own)
    serve(Party(run), run)
    run = settings(tmp_path, rounds=3, resume=True, **own)
    with pytest.raises(GradveilError, match="budget"):
        serve(Party(run), run)


def test_a_folder_is_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings(tmp_path / "run", rounds=1)
    serve(Party(run), run)
    with pytest.raises(FolderError, match="already holds a run"):
        serve(Party(run), run)
    run = settings(tmp_path / "run", resume=True, model="lenet")
    with pytest.raises(DataError, match="another model"):
        serve(Party(run), run)
    monkeypatch.setattr("sys.argv", ["gradveil", "train", "--out", str(tmp_path / "here"), "--rounds", "1"])
    with pytest.raises(SystemExit) as done:
        entry()
    assert not done.value.code
    run = settings(tmp_path / "here", resume=True)
    with pytest.raises(DataError, match="not of a run on Flower"):
        serve(Party(run), run)
    with pytest.raises(SpecError, match="Give out"):
        settings(resume=True)


def test_a_lost_node_does_not_hold_up_the_round() -> None:
    run = settings(deadline=7.5, clients=4)
    party = Party(run)
    party.lost = {2}
    outcome = serve(party, run)
    assert [(row["accepted"], row["rejected"]) for row in outcome.rounds] == [(3, {"dropped": 1})] * 4
    assert {wait for wait in party.waits if wait is not None} >= {7.5}
    assert max(wait for wait in party.waits if wait is not None) <= 7.5  # nothing waits for longer, or for ever
    assert None not in party.waits


def test_a_round_with_too_few_sound_replies_leaves_the_model(tmp_path: Path) -> None:
    run = settings(clients=4, rounds=2, min_replies=3)
    party = Party(run)
    party.lost = {0, 1}
    with pytest.raises(GradveilError, match="2 sound replies came, and a round needs 3"):
        serve(party, run)
    with pytest.raises(SpecError, match="min_replies=5"):
        settings(min_replies=5)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_round_waits_for_nodes_until_the_deadline_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "time", clock := Clock())
    run = settings(deadline=30, clients=4, rounds=2, min_replies=2)
    outcome = serve(Party(run, [0, 3]), run)
    assert clock.now == pytest.approx(60, abs=2)
    for row in outcome.rounds:
        assert (sorted(row["clients"]), row["accepted"], row["rejected"]) == ([0, 3], 2, {"not connected": 2})
    with pytest.raises(GradveilError, match=r"Round 1: 1 nodes are connected after 30 s, and it takes 2\."):
        serve(Party(run, [3]), run)


def test_a_node_that_does_not_say_which_device_it_is_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "time", Clock())
    run = settings(deadline=30)
    party = Party(run)
    asked = []
    party.answers[999] = lambda msg: asked.append(msg)  # type: ignore[assignment, return-value]
    outcome = serve(party, run)
    assert len(asked) == 1  # enough others are there
    assert all(row["accepted"] == 3 for row in outcome.rounds)
