"""Commands that a report recommends: with every setting of the run, so that they run as they are printed."""

import shlex
from collections.abc import Mapping
from typing import Any

from gradveil.threats.setup import AuditConfig

SAME = ("model", "dataset", "data", "seed", "partition", "clients", "epochs", "batch_size", "lr", "loss")
SAME_AS = (*SAME, "optimizer", "momentum", "weight_decay", "proximal", "clip", "trains")  # of training and of audits
AUDITS = ("images", "examples", "weights", "device", "minutes")
PLANS = ("cohort", "records", "batch_size", "epochs", "rounds", "participations", "tier", "parameters")
_DEFAULT = AuditConfig()


def audit_command(config: Mapping[str, Any], defense: str | None, **other: Any) -> str:
    """Return an audit as the run's was, of one defence: its settings where they are not the default."""
    chosen = {**config, **other}
    said = ["gradveil", "audit"]
    for name in (*SAME_AS, *AUDITS):
        if name in chosen and chosen[name] != getattr(_DEFAULT, name):
            said += _option(name, chosen[name])
    if chosen.get("trained"):
        said += _option("rounds", chosen.get("rounds", _DEFAULT.rounds))
    return shlex.join([*said, *(["--defense", defense] if defense else [])])


def train_command(config: Mapping[str, Any], defense: str) -> str:
    """Return a training with the run's clients and local steps; of ``train`` other settings are the default."""
    said = ["gradveil", "train"]
    for name in (*SAME_AS, "device"):
        value = config.get(name, getattr(_DEFAULT, name))
        if name in ("clients", "lr", "batch_size") or value != getattr(_DEFAULT, name) or name in ("model", "dataset"):
            said += _option(name, value)
    return shlex.join([*said, "--defense", defense])


def plan_command(config: Mapping[str, Any], change: Mapping[str, Any] | None) -> str:
    """Return a plan of a client after a change, or of this model and data where none was planned."""
    said = ["gradveil", "plan", "--promise", "reconstruction"]
    if change is not None:
        run = {**change["run"], "tier": change["tier"], "parameters": change["parameters"]}
        return shlex.join([*said, *(word for name in PLANS for word in _option(name, run[name]))])
    known = {name: config.get(name) for name in ("model", "dataset", "data")}
    both = known["model"] and known["dataset"]
    return shlex.join([*said, *(word for name in known if both for word in _option(name, known[name]))])


def _option(name: str, value: Any) -> list[str]:
    value = 0 if name == "batch_size" and value is None else value  # all of them
    return [] if value in (None, "") else [f"--{name.replace('_', '-')}", str(value)]
