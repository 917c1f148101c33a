"""The public names, grouped by what they are for; ``__init__.py`` loads each on first use from where this says."""

# ruff: noqa: I001
from gradveil import attacks as attacks
from gradveil import defenses as defenses

# what moves: a client's examples, what it sends, what the server sees, what an attack brings back
from gradveil.types import Batch
from gradveil.types import Update
from gradveil.types import Observation
from gradveil.types import Reconstruction
from gradveil.types import GaussianPrior

# by name: `gradveil list` has all of them
from gradveil.data import load as dataset
from gradveil.data.partition import partition
from gradveil.models import build as model
from gradveil.protection.defense import build as defense
from gradveil.attacks.base import build as attack
from gradveil.losses import build as loss

# defend
from gradveil.protection.counted import counted
from gradveil.protection.protect import protect
from gradveil.protection.protect import guard_of
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import PlannedRun
from gradveil.federated.client import step_gradient
from gradveil.defenses.decoy import save_prior
from gradveil.representation.scores import leak_scores
from gradveil.auditing.incoming import check_model

# train
from gradveil.federated.client import local_update
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import simulate
from gradveil.federated.settings import Training

# audit, certify
from gradveil.auditing.audit import audit
from gradveil.threats.setup import AuditConfig
from gradveil.report.page import write_report
from gradveil.auditing.update_files import read_update
from gradveil.auditing.update_files import write_update
from gradveil.auditing.update_files import read_examples
from gradveil.auditing.update_files import write_examples
from gradveil.representation.certify import certify
from gradveil.privacy.accountant import spend_from
from gradveil.verification.verify import verify

# add a method of your own
from gradveil.attacks.base import Attack
from gradveil.attacks.base import ATTACKS
from gradveil.protection.defense import Defense
from gradveil.protection.defense import DEFENSES
from gradveil.countermeasures import Countermeasure
from gradveil.privacy import noise as draws
from gradveil.data import Dataset

# what goes wrong
from gradveil.errors import GradveilError
from gradveil.errors import DefenseError

__version__: str

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
