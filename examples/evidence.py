"""What every worked example ends in: an audit, a plan, a promise measured from outside, and the dossier of all."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import torch

import gradveil
from gradveil.integrations.monitor import MonitorSettings, RunMonitor


def scores(model: torch.nn.Module, data: gradveil.Dataset) -> dict[str, float]:
    """Return how good a model is, and how good always answering with the most frequent class is."""
    seen = gradveil.evaluate(model, data.test)
    outcome = seen.outcome
    return {"accuracy": seen.accuracy, "majority": outcome.majority, "auc": outcome.auc}  # type: ignore[union-attr]


def train_unprotected(
    out: Path, data: gradveil.Dataset, model: torch.nn.Module, partition: str, training: gradveil.Training
) -> None:
    """Train the same without a promise, simulated: what the promise costs is held against this."""
    monitor = RunMonitor(out, MonitorSettings("simulated", "none"))
    clients = gradveil.partition(data.train.labels, partition)
    for round_ in gradveil.simulate(model, data, clients, training, "none", seeds=0):
        monitor.end(round_.number, **scores(round_.model, data))
    monitor.close()


def command(*words: str, into: Path | None = None) -> None:
    """Run the command line as a person would; ``into`` keeps what it prints."""
    print("gradveil", *words, *([] if into is None else [">", str(into)]), flush=True)
    with contextlib.nullcontext() if into is None else into.open("w") as printed:
        subprocess.run([sys.executable, "-m", "gradveil", *words], check=True, stdout=printed)


def file_dossier(out: Path, home: Path, audit: list[str], plan: list[str], verify: list[str]) -> Path:
    """Audit, plan and measure, and file the dossier with the runs ``protected`` and ``unprotected`` in ``out``.

    ``home`` holds the example's own code, and ``about.toml`` with what no file of a run can say.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
    command("audit", *audit, "--quiet", "--out", str(out / "audit"))
    command("plan", *plan, "--json", into=out / "plan.json")
    command("verify", *verify, "--json", into=out / "verify.json")
    inputs = [str(out / name) for name in ("audit", "protected", "unprotected", "plan.json", "verify.json")]
    command("dossier", *inputs, "--about", str(home / "about.toml"), "--out", str(out / "dossier"))
    return out / "dossier" / "dossier.html"
