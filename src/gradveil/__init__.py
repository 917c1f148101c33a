"""gradveil: what does a federated learning update leak, how do I stop it, and what can be promised?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradveil.attacks.base import ATTACKS, Attack
    from gradveil.attacks.base import build as attack
    from gradveil.attacks.inference import InferenceSettings, infer
    from gradveil.certificates.accountant import Account, spend_from
    from gradveil.certificates.certify import certify
    from gradveil.certificates.plan import PlannedRun
    from gradveil.countermeasures import Countermeasure
    from gradveil.data import Dataset
    from gradveil.data import load as dataset
    from gradveil.data.partition import partition
    from gradveil.defenses.base import DEFENSES, Defense
    from gradveil.defenses.base import build as defense
    from gradveil.defenses.decoy import save_prior
    from gradveil.defenses.guard.counted import counted
    from gradveil.defenses.guard.protect import guard_of, protect
    from gradveil.defenses.guard.step import step_gradient
    from gradveil.errors import DefenseError, GradveilError
    from gradveil.experiments.audit import audit
    from gradveil.experiments.incoming import check_model
    from gradveil.experiments.scene import AuditConfig
    from gradveil.experiments.update_files import read_examples, read_update, write_examples, write_update
    from gradveil.federated.client import evaluate, local_update
    from gradveil.federated.settings import Training
    from gradveil.federated.simulate import simulate
    from gradveil.losses import build as loss
    from gradveil.measured.verify import verify
    from gradveil.models import build as model
    from gradveil.privacy import draws
    from gradveil.report.page import write_report
    from gradveil.scores import leak_scores
    from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update

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
    "defense": "gradveil.defenses.base:build",
    "attack": "gradveil.attacks.base:build",
    "loss": "gradveil.losses:build",
    # defend
    "counted": "gradveil.defenses.guard.counted:counted",
    "protect": "gradveil.defenses.guard.protect:protect",
    "guard_of": "gradveil.defenses.guard.protect:guard_of",
    "Account": "gradveil.certificates.accountant:Account",
    "PlannedRun": "gradveil.certificates.plan:PlannedRun",
    "step_gradient": "gradveil.defenses.guard.step:step_gradient",
    "save_prior": "gradveil.defenses.decoy:save_prior",
    "leak_scores": "gradveil.scores:leak_scores",
    "check_model": "gradveil.experiments.incoming:check_model",
    # train
    "local_update": "gradveil.federated.client:local_update",
    "evaluate": "gradveil.federated.client:evaluate",
    "simulate": "gradveil.federated.simulate:simulate",
    "Training": "gradveil.federated.settings:Training",
    # audit, infer, certify
    "audit": "gradveil.experiments.audit:audit",
    "AuditConfig": "gradveil.experiments.scene:AuditConfig",
    "write_report": "gradveil.report.page:write_report",
    "read_update": "gradveil.experiments.update_files:read_update",
    "write_update": "gradveil.experiments.update_files:write_update",
    "read_examples": "gradveil.experiments.update_files:read_examples",
    "write_examples": "gradveil.experiments.update_files:write_examples",
    "infer": "gradveil.attacks.inference:infer",
    "InferenceSettings": "gradveil.attacks.inference:InferenceSettings",
    "certify": "gradveil.certificates.certify:certify",
    "spend_from": "gradveil.certificates.accountant:spend_from",
    "verify": "gradveil.measured.verify:verify",
    # add a method of your own
    "Attack": "gradveil.attacks.base:Attack",
    "ATTACKS": "gradveil.attacks.base:ATTACKS",
    "Defense": "gradveil.defenses.base:Defense",
    "DEFENSES": "gradveil.defenses.base:DEFENSES",
    "Countermeasure": "gradveil.countermeasures:Countermeasure",
    "draws": "gradveil.privacy:draws",
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
    "InferenceSettings",
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
    "infer",
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
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
