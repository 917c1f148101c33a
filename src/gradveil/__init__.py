"""gradveil: what does a federated learning update leak, how do I stop it, and what can be promised?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gradveil import attacks as attacks
    from gradveil import defenses as defenses
    from gradveil.attacks.base import ATTACKS, Attack
    from gradveil.attacks.base import build as attack
    from gradveil.auditing.audit import audit
    from gradveil.auditing.incoming import check_model
    from gradveil.auditing.update_files import read_examples, read_update, write_examples, write_update
    from gradveil.countermeasures import Countermeasure
    from gradveil.data import Dataset
    from gradveil.data import load as dataset
    from gradveil.data.partition import partition
    from gradveil.defenses.decoy import save_prior
    from gradveil.errors import DefenseError, GradveilError
    from gradveil.federated.client import evaluate, local_update, step_gradient
    from gradveil.federated.settings import Training
    from gradveil.federated.simulate import simulate
    from gradveil.losses import build as loss
    from gradveil.models import build as model
    from gradveil.privacy import noise as draws
    from gradveil.privacy.accountant import Account, spend_from
    from gradveil.privacy.plan import PlannedRun
    from gradveil.protection.counted import counted
    from gradveil.protection.defense import DEFENSES, Defense
    from gradveil.protection.defense import build as defense
    from gradveil.protection.protect import guard_of, protect
    from gradveil.report.page import write_report
    from gradveil.representation.certify import certify
    from gradveil.representation.scores import leak_scores
    from gradveil.threats.setup import AuditConfig
    from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update
    from gradveil.verification.verify import verify

# Loaded on first use, so that `import gradveil` and `gradveil --help` stay free of torch.
_PUBLIC = {
    # what moves: a client's examples, what it sends, what the server sees, what an attack brings back
    "Batch": "gradveil.types:Batch",
    "Update": "gradveil.types:Update",
    "Observation": "gradveil.types:Observation",
    "Reconstruction": "gradveil.types:Reconstruction",
    "GaussianPrior": "gradveil.types:GaussianPrior",
    # by name: `gradveil list` has all of them
    "dataset": "gradveil.data:load",
    "partition": "gradveil.data.partition:partition",
    "model": "gradveil.models:build",
    "defense": "gradveil.protection.defense:build",
    "attack": "gradveil.attacks.base:build",
    "loss": "gradveil.losses:build",
    # defend
    "counted": "gradveil.protection.counted:counted",
    "protect": "gradveil.protection.protect:protect",
    "guard_of": "gradveil.protection.protect:guard_of",
    "Account": "gradveil.privacy.accountant:Account",
    "PlannedRun": "gradveil.privacy.plan:PlannedRun",
    "step_gradient": "gradveil.federated.client:step_gradient",
    "save_prior": "gradveil.defenses.decoy:save_prior",
    "leak_scores": "gradveil.representation.scores:leak_scores",
    "check_model": "gradveil.auditing.incoming:check_model",
    # train
    "local_update": "gradveil.federated.client:local_update",
    "evaluate": "gradveil.federated.client:evaluate",
    "simulate": "gradveil.federated.simulate:simulate",
    "Training": "gradveil.federated.settings:Training",
    # audit, certify
    "audit": "gradveil.auditing.audit:audit",
    "AuditConfig": "gradveil.threats.setup:AuditConfig",
    "write_report": "gradveil.report.page:write_report",
    "read_update": "gradveil.auditing.update_files:read_update",
    "write_update": "gradveil.auditing.update_files:write_update",
    "read_examples": "gradveil.auditing.update_files:read_examples",
    "write_examples": "gradveil.auditing.update_files:write_examples",
    "certify": "gradveil.representation.certify:certify",
    "spend_from": "gradveil.privacy.accountant:spend_from",
    "verify": "gradveil.verification.verify:verify",
    # add a method of your own
    "Attack": "gradveil.attacks.base:Attack",
    "ATTACKS": "gradveil.attacks.base:ATTACKS",
    "Defense": "gradveil.protection.defense:Defense",
    "DEFENSES": "gradveil.protection.defense:DEFENSES",
    "Countermeasure": "gradveil.countermeasures:Countermeasure",
    "draws": "gradveil.privacy:noise",
    "Dataset": "gradveil.data:Dataset",
    # what goes wrong
    "GradveilError": "gradveil.errors:GradveilError",
    "DefenseError": "gradveil.errors:DefenseError",
}

__all__ = [
    "ATTACKS",
    "DEFENSES",
    "Account",
    "Attack",
    "AuditConfig",
    "Batch",
    "Countermeasure",
    "Dataset",
    "Defense",
    "DefenseError",
    "GaussianPrior",
    "GradveilError",
    "Observation",
    "PlannedRun",
    "Reconstruction",
    "Training",
    "Update",
    "__version__",
    "attack",
    "audit",
    "certify",
    "check_model",
    "counted",
    "dataset",
    "defense",
    "draws",
    "evaluate",
    "guard_of",
    "leak_scores",
    "local_update",
    "loss",
    "model",
    "partition",
    "protect",
    "read_examples",
    "read_update",
    "save_prior",
    "simulate",
    "spend_from",
    "step_gradient",
    "verify",
    "write_examples",
    "write_report",
    "write_update",
]


def __getattr__(name: str) -> Any:
    if name in ("attacks", "defenses"):
        return import_module(f"gradveil.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
