"""Flower: defend, guard and check an app that exists already, or run gradveil's own.

Everything here uses Flower's Message API (``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``). Names are
loaded on first use, so that the settings of a command are in place before Flower is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.integrations.flower.checks import checked, monitored
    from gradveil.integrations.flower.mods import guard_mod, leak_guard, weights_guard
    from gradveil.integrations.flower.secure_aggregation import secure_mod, secured

_PLACES = {
    "checks": ("checked", "monitored"),
    "mods": ("guard_mod", "leak_guard", "weights_guard"),
    "secure_aggregation": ("secure_mod", "secured"),
}
__all__ = ["checked", "guard_mod", "leak_guard", "monitored", "secure_mod", "secured", "weights_guard"]


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
