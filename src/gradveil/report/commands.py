"""Commands that a report recommends: with every setting of the run, so that they run as they are printed."""

import shlex
from collections.abc import Mapping
from typing import Any

from gradveil.threats.setup import AuditConfig

SAME = ("model", "dataset", "data", "seed", "partition", "clients", "epochs", "batch_size", "lr", "loss")
SAME_AS = (*SAME, "optimizer", "momentum", "weight_decay", "proximal", "clip", "trains")  # of training and of audits
AUDITS = ("images", "examples", "weights", "device", "minutes")
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
            said += _option(name, 0 if name == "batch_size" and value is None else value)
    return shlex.join([*said, "--defense", defense])


def _option(name: str, value: Any) -> list[str]:
    return [] if value in (None, "") else [f"--{name.replace('_', '-')}", str(value)]
