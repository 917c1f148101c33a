"""A client that is killed at any write, or any moment, has never sent more than its account says."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Count, times
from gradveil.privacy.accountant import Account, NoAccount, spend_from

Work = Callable[[], None]  # up to where the update leaves
COST = 0.25
POINTS = ("open", "pwrite", "ftruncate", "fsync", "replace", "mkdir")


def arm(fault: str, at: int) -> None:
    """Kill this process before or after a call that changes the disk, or when half of a line is written."""
    passed = 0

    def faulty(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            here = passed == at
            if here and fault == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if here and fault == "torn" and name == "pwrite":
                call(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                if here and fault == "after":
                    os.kill(os.getpid(), signal.SIGKILL)

        return acting

    for name in POINTS:
        setattr(os, name, faulty(name, getattr(os, name)))


def client(
    path: Path, rounds: int, fault: str = "", at: int = 0, after: float | None = None, work: Work | None = None
) -> tuple[int, bool]:
    """Run a client in a process of its own; return how often it has sent, and whether it was killed."""
    ours, its = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            os.close(ours)
            if fault:
                arm(fault, at)
            for _ in range(rounds):
                if work is None:
                    spend_from(path, "ward", COST, noise="secret")
                else:
                    work()
                os.write(its, b"x")  # the update leaves
            os._exit(0)
        os._exit(1)
    os.close(its)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    sent = 0
    while some := os.read(ours, 1000):
        sent += len(some)
    os.close(ours)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return sent, os.WIFSIGNALED(status)


def spent(path: Path, name: str = "ward") -> float:
    with suppress(NoAccount):
        return Account.read(path, name).spent
    return 0.0


@pytest.mark.parametrize("fault", ["before", "after", "torn"])
def test_killed_at_every_write_the_account_is_never_behind(fault: str, tmp_path: Path, count: Count) -> None:
    rounds, at, killed = times(2, 4), 0, True
    while killed or fault == "torn":
        at += 1
        path = tmp_path / str(at) / "of" / "account.json"
        sent, killed = client(path, rounds, fault, at)
        if not killed:  # fewer points than that; a torn line is one at a ``pwrite`` alone
            if at > 40 * rounds:
                break
            continue
        paid = spent(path) / COST
        assert sent <= paid <= sent + 1, (at, sent, paid)
        count("accounts: killed at a write")
        assert spend_from(path, "ward", COST).spent == pytest.approx((paid + 1) * COST)  # and it goes on
    assert at > 20


def test_killed_at_any_moment_again_and_again(tmp_path: Path, count: Count) -> None:
    path, sent, kills = tmp_path / "account.json", 0, times(20, 400)
    moments = random.Random(1)
    for number in range(kills):
        more, killed = client(path, 10**6, after=moments.uniform(0.0, 0.05))
        assert killed
        sent += more
        assert sent <= spent(path) / COST <= sent + number + 1
        count("accounts: killed at a random moment")
    assert sent > 0


@pytest.mark.parametrize("fault", ["before", "after", "torn"])
def test_a_flower_client_that_is_killed_at_any_write_has_paid_for_what_it_sent(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """Flower stores the state of a node after the reply was sent: on 0f6420f two of two kills lost what was spent."""
    pytest.importorskip("flwr")
    from gradveil.integrations.flower.app import make_client_app
    from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data
    from integrations.flower_parts import context, message

    own = {"partition": "iid:devices=2,per_device=4", "clients": 2, "model": "logistic", "batch_size": 0}
    run = FlowerSettings(**own, defense="veil:z=2,clip=1", rounds=9)
    app, model = make_client_app(run), build_model(run, load_data("digits", "", run.partition, 0)[0])

    def work() -> None:  # the state of the node is never stored
        assert not app(message(model), context({"partition-id": 0})).has_error()

    work_in = tmp_path / "before"
    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(work_in))
    work()  # once here, so that everything is loaded
    for at in range(1, 40, times(3, 1)):
        monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path / str(at)))
        sent, killed = client(tmp_path, times(1, 3), fault, at, work=work)
        paid = spent(tmp_path / str(at) / "0.json", "0") / COST
        assert sent <= paid <= sent + 1
        count("accounts: a Flower client killed at a write", killed)


def test_two_processes_never_pay_with_the_same_budget(tmp_path: Path, count: Count) -> None:
    path, each = tmp_path / "account.json", times(20, 200)
    pids = []
    for _ in range(4):
        if not (pid := os.fork()):
            with suppress(BaseException):
                for _ in range(each):
                    spend_from(path, "ward", COST)
                os._exit(0)
            os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert spent(path) == 4 * each * COST
    assert len((tmp_path / "account.json.journal").read_text().splitlines()) == 4 * each
    count("accounts: payments by four processes at once", 4 * each)
