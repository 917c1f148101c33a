"""A defence that ends with an error of its own is a line of the report, and the audit goes on."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Generator, nn

from gradveil.auditing.audit import audit
from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import Defense
from gradveil.threats.setup import AuditConfig
from gradveil.tree import Params

QUICK = AuditConfig(
    rounds=1, clients=1, images=2, meter_seconds=0, tiers=("oblivious", "adaptive"), attacks=("newton",)
)


@dataclass(frozen=True)
class Raises(Defense):
    """Ends with an error at once, or only on gradients that are its own numbers' later on."""

    error: type[Exception] = KeyError

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        raise self.error("no entry")

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@pytest.mark.parametrize("error", [KeyError, RuntimeError, ZeroDivisionError])
def test_the_audit_ends_and_says_so(error: type[Exception], tmp_path: Path) -> None:
    found = audit(defenses=[Raises(error)], config=replace(QUICK), out=tmp_path / "run")
    (judged,) = (v for v in found.verdicts if v.defense != "none")
    assert any("ends with an error of its own" in said and error.__name__ in said for said in judged.errors)
    assert judged.outcome not in ("nothing", "recovered")
