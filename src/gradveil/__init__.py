"""gradveil: what does a federated learning update leak, how do I stop it, and what can be promised?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradveil.attacks.base import build as attack
    from gradveil.certificates.certify import certify
    from gradveil.data import load as dataset
    from gradveil.data.partition import partition
    from gradveil.defenses.base import build as defense
    from gradveil.defenses.guard.protect import protect
    from gradveil.experiments.audit import audit
    from gradveil.models import build as model
    from gradveil.scores import leak_scores

# Loaded on first use, so that `import gradveil` and `gradveil --help` stay free of torch.
_PUBLIC = {
    "attack": "gradveil.attacks.base:build",
    "audit": "gradveil.experiments.audit:audit",
    "certify": "gradveil.certificates.certify:certify",
    "dataset": "gradveil.data:load",
    "defense": "gradveil.defenses.base:build",
    "leak_scores": "gradveil.scores:leak_scores",
    "model": "gradveil.models:build",
    "partition": "gradveil.data.partition:partition",
    "protect": "gradveil.defenses.guard.protect:protect",
}

__all__ = [
    "__version__",
    "attack",
    "audit",
    "certify",
    "dataset",
    "defense",
    "leak_scores",
    "model",
    "partition",
    "protect",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
