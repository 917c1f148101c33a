"""Each example runs as it is, in a process of its own, and says what it should."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradveil.report.dossier import check

EXAMPLES = Path(__file__).parents[1] / "examples"


def said(script: str, folder: Path, *words: str, minutes: float = 8) -> str:
    env = os.environ | {"GRADVEIL_ACCOUNTS": str(folder / "accounts"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60 * minutes, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_plan_a_run(tmp_path: Path) -> None:
    assert "epsilon 8: z = 1.90 a release" in said("plan_a_run.py", tmp_path)


def test_protect_a_loop(tmp_path: Path) -> None:
    out = said("protect_loop.py", tmp_path)
    assert "50 steps defended, 0 not" in out
    assert float(out.split("accuracy ")[1]) > 0.6


@pytest.mark.slow
def test_audit_an_update(tmp_path: Path) -> None:
    rows = dict(line.rsplit(" mean squared error ", 1) for line in said("audit_update.py", tmp_path).splitlines())
    errors = {name.strip(): float(value) for name, value in rows.items()}
    assert errors["none"] < 1e-6 < 0.05 < errors["veil:z=1,clip=1"]


@pytest.mark.parametrize(("script", "epsilon"), [("simulate_with_veil.py", "10"), ("text_classifier.py", "3")])
def test_simulations_end_in_a_page_with_what_was_spent(script: str, epsilon: str, tmp_path: Path) -> None:
    out = said(script, tmp_path, "--out", "run")
    assert f"ε = {epsilon} at δ = 1e-05" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"which is ε = {epsilon} at δ = 1e-05" in page


def filed(run: Path, *said: str) -> None:
    """The example ends in a dossier that says these things, misses nothing, and is as it was made."""
    made = json.loads((run / "dossier" / "dossier.json").read_text())
    assert made["missing"] == []
    text = json.dumps(made, ensure_ascii=False)
    assert all(one in text for one in said)
    assert check(run / "dossier")["intact"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
def test_ten_hospitals_on_flower(tmp_path: Path) -> None:
    out = said("hospital/run.py", tmp_path, "--out", "run", "--minutes", "1.5")
    assert "round 6: 10 accepted" in out
    page = (tmp_path / "run" / "protected" / "report.html").read_text()
    assert "6 rounds: 60 updates were averaged and 0 refused" in page
    assert "which is ε = 8 at δ = 1e-05" in page
    assert "(simulated noise)" in page
    filed(tmp_path / "run", "ten hospitals", "right at most 80 times in 100", "the noise was simulated")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nvflare") is None, reason="NVFlare is not installed")
def test_images_under_a_frozen_backbone_on_nvflare(tmp_path: Path) -> None:
    said("xray/job.py", tmp_path, "--out", "run", "--workspace", str(tmp_path / "flare"), "--minutes", "1")
    page = (tmp_path / "run" / "protected" / "report.html").read_text()
    assert "8 rounds: 16 updates were averaged and 0 refused" in page
    assert "which is ε = 8 at δ = 1e-05" in page
    filed(tmp_path / "run", "two sites", "Noise in these runs: secret")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_notes_with_low_rank_factors_and_a_trainer(tmp_path: Path) -> None:
    said("notes/lora.py", tmp_path, "--out", "run", "--minutes", "1.5")
    page = (tmp_path / "run" / "protected" / "report.html").read_text()
    assert "10 rounds: 60 updates were averaged and 0 refused" in page
    filed(tmp_path / "run", "six sites", "Noise in these runs: secret")
