"""What can be promised beside what was tried: certificates and the leak meter, on the images under attack."""

import math

from gradveil.certificates.base import SCOPE, Certificate, Kind
from gradveil.certificates.meter import ASSUMPTIONS
from gradveil.certificates.summary import Promise, metered, promises
from gradveil.errors import GradveilError
from gradveil.experiments.panel import victim_truth
from gradveil.experiments.scene import Scene
from gradveil.experiments.store import Row

KINDS: tuple[Kind, ...] = ("local", "global")
MOST = 8  # clients that the leak meter reads


def promise_rows(scene: Scene, defense: str) -> list[Row]:
    """Return the certificates of the layers that a defence perturbs, and what the leak meter reads, as rows."""
    rows: list[Row] = []
    try:
        found = promises(scene.model, scene.truth, scene.defenses[defense], scene.seeds("promise", defense), KINDS)
        rows += [_certificate_row(defense, promise) for promise in found]
        rows += _meter_rows(scene, defense)
    except (GradveilError, RuntimeError, ValueError) as error:  # what cannot be read does not stop the audit
        rows.append(_meter_row(defense, "", None, f"Not read: {' '.join(str(error).split())[:200]}"))
    return rows


def _certificate_row(defense: str, promise: Promise) -> Row:
    row = {"kind": "certificate", "defense": defense, "layer": promise.layer, "certificate": promise.kind}
    certificate = promise.certificate
    if certificate is None:
        return row | {"mse": None, "sound": False, "says": promise.words(), "assumptions": []}
    return row | {
        "mse": _mean_mse(certificate),
        "sound": certificate.sound,
        "says": promise.words(),
        "assumptions": [text for text in certificate.assumptions if text != SCOPE] + [SCOPE],
    }


def _mean_mse(certificate: Certificate) -> float:
    return float(certificate.to_mse().mean())


def _meter_rows(scene: Scene, defense: str) -> list[Row]:
    """Return the mean reading per server over the attacked clients."""
    readings: dict[str, list[float]] = {}
    for victim in range(min(MOST, scene.config.images // scene.config.examples)):
        rng = scene.seeds("defense", defense, "first", victim)
        truth, classes = victim_truth(scene, victim), scene.dataset.num_classes
        for one in metered(scene.model, truth, scene.defenses[defense], classes, rng, scene.public.prior):
            readings.setdefault(one.server, []).append(one.leak.mse)
    said = "No server gets under this on average, to first order."
    return [_meter_row(defense, server, math.fsum(values) / len(values), said) for server, values in readings.items()]


def _meter_row(defense: str, server: str, mse: float | None, says: str) -> Row:
    row = {"kind": "meter", "defense": defense, "server": server, "mse": mse, "says": says}
    return row | {"assumptions": [] if mse is None else list(ASSUMPTIONS)}
