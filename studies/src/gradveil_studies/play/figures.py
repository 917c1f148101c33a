"""What can be promised of a defence at a strength, and what it was measured to cost."""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from gradveil.auditing.certificates import AT_FLOOR, layer_certificates, promise_rows
from gradveil.errors import GradveilError
from gradveil.metrics import short
from gradveil.modalities.tokens import Tokens
from gradveil.privacy.plan import PlannedRun
from gradveil.seeds import Seeds
from gradveil.threats.meter import leak_meter
from gradveil.threats.trial import Trial
from gradveil.types import Batch
from gradveil_studies.play.stage import PlayStage

NOT_MEASURED = "not measured"
PROMISES_NOTHING = "None: this defence proves nothing about what a server can get."


def certificate(stage: PlayStage, one: Batch, spec: str, rounds: int = 1) -> list[str]:
    """Return what is proved of the example against every server, in sentences."""
    if spec == "none":
        return ["None: everything is sent."]
    defense = stage.defense(spec)
    run = PlannedRun(1, None, 1, rounds, rounds, 1)
    rows = promise_rows(spec, defense, run, stage.public.batch, one.labels, stage.public.choices)
    looks = ("one update", "the whole run")[: 1 if rounds == 1 else 2]
    ids = isinstance(stage.dataset.modality, Tokens)  # a floor on the squared error of ids says nothing
    said = [
        f"{'After one update' if row['layer'] == 'one update' else f'After {rounds} updates'}: {row['says']}"
        for row in rows
        if row["layer"] in looks and not (ids and row["certificate"] == "floor")
    ]
    if said:
        return said
    layered = layer_certificates(stage.model, one, defense, Seeds(0)("certificate"), ("global",))
    known = [f"Layer {c.layer}: {c.words()}" for c in layered]
    return [*known, "It does not bind a server that leaves this layer out."] if known else [PROMISES_NOTHING]


def leak(stage: PlayStage, found: Sequence[Trial]) -> str:
    """Return the error that no server is expected to get under, to first order: the lowest over those that know."""
    if isinstance(stage.dataset.modality, Tokens):
        return "not read: ids of words have no slope"
    readings = {}
    for trial in [t for t in found if t.server.tier != "oblivious"] or found:
        try:
            reading = leak_meter(trial.view, trial.truth, stage.public.prior)  # type: ignore[arg-type]
        except GradveilError:
            continue
        readings[reading.mse] = reading
    if not readings:
        return "not read: no server's view has a slope"
    least = readings[min(readings)]
    return AT_FLOOR if least.at_floor else f"MSE {short(least.mse)} on average, to first order"


@cache
def measured_costs() -> dict[str, Any]:
    """Return what training was measured to reach; ``tools/play_accuracy.py`` wrote it."""
    return tomllib.loads(files("gradveil_studies.play").joinpath("accuracy.toml").read_text())


def cost(dataset: str, model: str, spec: str) -> str:
    """Return the accuracy that training reached under a defence, beside that without one."""
    known = measured_costs()
    if (dataset, model) != (known["dataset"], known["model"]) or spec not in known["accuracy"]:
        return NOT_MEASURED
    reached, plain = known["accuracy"][spec], known["accuracy"]["none"]
    said = f"{fmean(reached):.1%} (seeds: {min(reached):.1%} to {max(reached):.1%})"
    return said if spec == "none" else f"{said}, against {fmean(plain):.1%} without a defence"
