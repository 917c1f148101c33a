"""Accounts of simulated sites lie in the test's own folder, and never in the home of who runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this test's accounts."""
    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path / "accounts"))
    monkeypatch.delenv("GRADVEIL_NOISE", raising=False)
    return tmp_path / "accounts"
