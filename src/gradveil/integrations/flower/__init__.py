"""Flower: defend, guard and audit an app that exists already, or run gradveil's own.

Everything here uses Flower's Message API (``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``). Names are
loaded on first use, so that the settings of a command are in place before Flower is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.integrations.flower.checks import checked, monitored
    from gradveil.integrations.flower.grids import audited
    from gradveil.integrations.flower.mods import guard_mod, leak_guard, update_mod, weights_guard
    from gradveil.integrations.flower.secure_aggregation import secure_mod, secured
    from gradveil.integrations.local_training import defended

_PUBLIC = {
    "audited": "gradveil.integrations.flower.grids",
    "checked": "gradveil.integrations.flower.checks",
    "defended": "gradveil.integrations.local_training",
    "guard_mod": "gradveil.integrations.flower.mods",
    "monitored": "gradveil.integrations.flower.checks",
    "leak_guard": "gradveil.integrations.flower.mods",
    "secure_mod": "gradveil.integrations.flower.secure_aggregation",
    "secured": "gradveil.integrations.flower.secure_aggregation",
    "update_mod": "gradveil.integrations.flower.mods",
    "weights_guard": "gradveil.integrations.flower.mods",
}

__all__ = [
    "audited", "checked", "defended", "guard_mod", "leak_guard", "monitored", "secure_mod", "secured", "update_mod",
    "weights_guard",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
