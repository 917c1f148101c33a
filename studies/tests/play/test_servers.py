"""What the servers of the playground get, step by step, and how a run is ended."""

from dataclasses import replace

import pytest
import torch

from gradveil import pace
from gradveil.attacks.base import build as build_attack
from gradveil.errors import GradveilError
from gradveil.types import Batch, Observation
from gradveil_studies.play import servers
from gradveil_studies.play.servers import CONTROL, MOST_ROUNDS, LiveRun, Rebuilt, blind_guess, trials
from gradveil_studies.play.stage import PlayStage, spec_of, stage


@pytest.fixture(scope="module")
def digits() -> PlayStage:
    return stage("digits")


@pytest.fixture
def one(digits: PlayStage) -> Batch:
    return digits.chosen(7)


def played(at: PlayStage, one: Batch, spec: str, rounds: int = 1) -> dict[str, Rebuilt]:
    """By tier and name, what each server ended with."""
    *_, last = LiveRun(at, trials(at, one, spec, rounds)).frames()
    return {f"{g.trial.server.tier} {g.trial.server.name}": g for g in last}


def test_pictures_come_before_the_end_and_get_better(digits: PlayStage, one: Batch) -> None:
    frames = list(LiveRun(digits, trials(digits, one, "none")).frames())
    assert frames[0][0].state == "waiting"
    early = next(got for (got,) in frames if got.shown is not None)
    last = frames[-1][0]
    _, _, blind = blind_guess(digits, one)
    assert early.state == "searching"
    assert early.steps == 1
    assert last.state == "done"
    assert last.error < 1e-6 < early.error
    assert 0.01 < blind < 0.1
    assert last.shown is not None
    assert torch.allclose(last.shown, one.inputs[0], atol=1e-3)


def test_a_server_that_knows_the_defence_undoes_what_a_naive_one_does_not(digits: PlayStage, one: Batch) -> None:
    got = played(digits, one, spec_of("representation", 3))
    assert got["adaptive drop"].error < 1e-6 < 0.01 < got["oblivious oblivious"].error


def test_noise_averages_out_over_rounds(digits: PlayStage, one: Batch) -> None:
    got = played(digits, one, spec_of("gaussian", 6), rounds=MOST_ROUNDS)
    assert got["multi-round whiten"].error < got["adaptive whiten"].error / 3
    assert got["adaptive whiten"].error < got["oblivious oblivious"].error


def test_beside_a_defence_stands_the_same_attack_without_it(digits: PlayStage, one: Batch) -> None:
    *_, (control, oblivious, *_) = LiveRun(digits, trials(digits, one, spec_of("veil", 6))).frames()
    assert control.trial.about == CONTROL
    assert control.trial.attack == oblivious.trial.attack
    assert control.error < 1e-6 < oblivious.error


def test_where_nothing_is_drawn_further_rounds_bring_no_server(digits: PlayStage, one: Batch) -> None:
    assert all(t.server.tier != "multi-round" for t in trials(digits, one, "pruning:share=0.8", 3))
    with pytest.raises(GradveilError, match=r"33 rounds are not offered. Choose 1 to 32"):
        trials(digits, one, "none", 33)


def test_a_run_that_is_stopped_keeps_what_it_has_and_begins_nothing_more(digits: PlayStage, one: Batch) -> None:
    found = trials(digits, one, spec_of("gaussian", 3))

    def stopping(seen: Observation) -> Observation:
        run.stop()  # while the first server is at work
        return seen

    found[0] = replace(found[0], server=replace(found[0].server, view=stopping))
    run = LiveRun(digits, found)
    *_, got = run.frames()
    assert [one.state for one in got] == ["stopped"] * 3
    assert got[0].steps == 1
    assert [one.shown is None for one in got] == [False, True, True]


def test_who_stops_listening_ends_the_run(digits: PlayStage, one: Batch) -> None:
    run = LiveRun(digits, trials(digits, one, "none"))
    frames = run.frames()
    next(frames)
    frames.close()
    assert run._limit.left <= 0


def test_runs_share_no_network(digits: PlayStage, one: Batch) -> None:
    """A run that was stopped may still be at its last step when the next one begins."""
    models = [trial.view.model for _ in range(2) for trial in trials(digits, one, "pruning:share=0.8")]
    assert len({id(model) for model in (*models, digits.model)}) == 5


def test_an_attack_that_cannot_run_says_why(digits: PlayStage, one: Batch) -> None:
    (trial,) = trials(digits, one, "none")
    *_, (got,) = LiveRun(digits, [replace(trial, attack="tableak")]).frames()
    assert got.state == "refused"
    assert "rows of tables" in got.why


def test_what_breaks_in_the_thread_is_raised_where_somebody_listens(
    digits: PlayStage, one: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(servers, "measure", broken)
    with pytest.raises(ZeroDivisionError):
        list(LiveRun(digits, trials(digits, one, "none")).frames())


@pytest.mark.parametrize("attack", ["dlg:steps=1,inner=3,restarts=2", "newton:steps=3"])
def test_loops_show_where_they_stand_with_the_example_first(digits: PlayStage, one: Batch, attack: str) -> None:
    (trial,) = trials(digits, one, "none")
    points: list[torch.Tensor] = []
    with pace.Limit(watch=points.append):
        build_attack(attack).reconstruct(trial.view, torch.Generator().manual_seed(0))
    assert len(points) == 3
    assert all(point.ndim == 1 and len(point) >= one.inputs.numel() for point in points)
    assert not torch.equal(points[0], points[-1])


def test_rows_and_sentences_come_back_without_a_defence() -> None:
    for name in ("breast_cancer", "manual"):
        at = stage(name)
        got = played(at, at.chosen(3), "none")["oblivious oblivious"]
        assert got.error == 0.0 < blind_guess(at, at.chosen(3))[2]
