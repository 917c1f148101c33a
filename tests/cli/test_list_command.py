import json
import subprocess
import sys


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradveil", "list", *args], capture_output=True, text=True, check=False
    )


def test_every_kind_is_listed_with_a_line_and_its_settings() -> None:
    rows = json.loads(run("--json").stdout)
    kinds = {row["kind"] for row in rows}
    assert {"dataset", "partition", "model", "defense", "attack", "metric", "engine"} <= kinds
    assert all(row["about"] for row in rows)
    ours = next(row for row in rows if row["name"] == "representation")
    assert ours["settings"]["share"] == 0.4


def test_one_kind_alone_and_an_unknown_one() -> None:
    assert {row["kind"] for row in json.loads(run("attack", "--json").stdout)} == {"attack"}
    wrong = run("atack")
    assert wrong.returncode == 2
    assert "known: dataset" in wrong.stderr
