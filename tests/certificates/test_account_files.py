"""Account files that were put back, copied, cut off, mixed up or planted: counted, or refused in one line."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.errors import BudgetError
from gradveil.privacy.accountant import Account, spend_from


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An account that has paid three times."""
    where = tmp_path / "site" / "account.json"
    for number in (1, 2, 3):
        spend_from(where, "a", 0.25, 2.0, noise="secret", note=f"run 1, round {number}")
    return where


def journal(path: Path) -> Path:
    return path.with_name("account.json.journal")


def test_every_payment_is_a_line_that_says_what_for(path: Path) -> None:
    lines = [json.loads(line) for line in journal(path).read_text().splitlines()]
    assert [(line["release"], line["spent"], line["note"]) for line in lines] == [
        (1, 0.25, "run 1, round 1"),
        (2, 0.5, "run 1, round 2"),
        (3, 0.75, "run 1, round 3"),
    ]
    assert path.stat().st_mode & 0o077 == 0 or os.getuid() == 0
    assert Account.read(path, "a") == Account("a", 0.75, 2.0, "secret")


def test_an_older_account_file_put_back_forgets_nothing(path: Path) -> None:
    older = path.read_bytes()
    spend_from(path, "a", 0.25)
    path.write_bytes(older)
    assert Account.read(path, "a").spent == 1.0
    assert spend_from(path, "a", 0.25).spent == 1.25
    path.unlink()
    assert spend_from(path, "a", 0.25).spent == 1.5
    path.write_text(json.dumps({"client": "a", "spent": 0.0, "limit": None}))  # one of an earlier version, or by hand
    assert spend_from(path, "a", 0.25) == Account("a", 1.75, 2.0, "secret")


def test_an_older_journal_put_back_or_cut_off_or_removed_is_refused(path: Path) -> None:
    older = journal(path).read_bytes()
    spend_from(path, "a", 0.25)
    for content in (older, older[: len(older) // 2], b"", None):
        if content is None:
            journal(path).unlink()
        else:
            journal(path).write_bytes(content)
        with pytest.raises(BudgetError, match=r"counts 4 payments and its journal [0-3].* Nothing is sent\."):
            spend_from(path, "a", 0.25)


def test_a_copy_that_another_node_would_spend_from_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(path.parent, other)
    with pytest.raises(BudgetError, match=r"is a copy of the journal .* Nothing is sent\."):
        spend_from(other / "account.json", "a", 0.25)
    (other / "account.json").unlink()
    with pytest.raises(BudgetError, match="is a copy of the journal"):
        spend_from(other / "account.json", "a", 0.25)
    assert spend_from(path, "a", 0.25).spent == 1.0  # the one it was copied from goes on
    path.parent.rename(tmp_path / "moved")
    assert spend_from(tmp_path / "moved" / "account.json", "a", 0.25).spent == 1.25  # as it does where it is moved


def test_files_of_two_accounts_are_not_mixed(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "b" / "account.json"
    for _ in range(3):
        spend_from(other, "a", 0.125)
    path.write_bytes(other.read_bytes())
    with pytest.raises(BudgetError, match=r"of two accounts\. Nothing is sent"):
        spend_from(path, "a", 0.25)
    with pytest.raises(BudgetError, match="of client a, not of b: nothing is sent"):
        spend_from(other, "b", 0.25)


def test_a_line_that_a_kill_cut_off_was_never_paid_for_anything(path: Path) -> None:
    with journal(path).open("ab") as file:
        file.write(b'{"release": 4, "client": "a", "spe')
    assert spend_from(path, "a", 0.25).spent == 1.0
    assert [json.loads(line)["release"] for line in journal(path).read_text().splitlines()] == [1, 2, 3, 4]


def test_the_noise_of_an_account_is_its_worst() -> None:
    fresh = Account("a")
    assert (fresh.noise, fresh.spend(0.1, "secret").noise) == (None, "secret")
    assert fresh.spend(0.1, "secret").spend(0.1, "simulated").noise == "simulated"
    assert fresh.spend(0.1, "simulated").spend(0.1, "secret").noise == "simulated"
    assert fresh.spend(0.1).spend(0.1, "secret").noise is None  # what went before is not known
    assert Account.from_json({"client": "a", "spent": 1, "limit": None}, "a").noise is None
    with pytest.raises(BudgetError, match="noise=loud"):
        Account.from_json({"client": "a", "spent": 1, "limit": None, "noise": "loud"}, "a")


def symlink(path: Path, outside: Path) -> None:
    outside.write_text("precious")
    path.symlink_to(outside)


def dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def hard(path: Path, outside: Path) -> None:
    outside.write_text(json.dumps({"client": "a", "spent": 0.0, "limit": None}) + "\n")
    os.link(outside, path)


def fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path, outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


def folder(path: Path, outside: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [symlink, dangling, hard, fifo, sparse, folder])
@pytest.mark.parametrize("name", ["account.json", "account.json.journal", ".account.json.lock"])
def test_what_is_no_plain_file_is_refused_at_once(
    plant: Callable[[Path, Path], None], name: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    plant(tmp_path / name, outside)
    before = outside.read_bytes() if outside.exists() else None
    began = time.monotonic()
    if name.endswith("lock") and plant in (hard, sparse):  # nothing is read there
        return
    with pytest.raises(Exception, match=r"[Nn]othing is sent") as raised:
        spend_from(tmp_path / "account.json", "a", 0.25)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 5
    assert (outside.read_bytes() if outside.exists() else None) == before
