"""Attacks: what an update gives away. ``attacks.Newton(steps=40)(model, update, like=dataset)`` rebuilds its inputs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.attacks.analytic import Analytic
    from gradveil.attacks.base import AppliesTo, Attack, Malicious
    from gradveil.attacks.candidates import Candidates
    from gradveil.attacks.cocktail import Cocktail
    from gradveil.attacks.diffusion import Diffusion
    from gradveil.attacks.dlg import DLG, IDLG
    from gradveil.attacks.fedavg import FedAvgInversion, Surrogate
    from gradveil.attacks.fishing import Fishing
    from gradveil.attacks.gradinversion import GradInversion
    from gradveil.attacks.gs import GS
    from gradveil.attacks.inverter import Inverter
    from gradveil.attacks.newton import Newton
    from gradveil.attacks.patches import PatchSpan
    from gradveil.attacks.planted import Imprint, Trap
    from gradveil.attacks.rep import Rep
    from gradveil.attacks.rowwise import Rowwise
    from gradveil.attacks.span import SpanCheck, Words
    from gradveil.attacks.spear import Spear
    from gradveil.attacks.tableak import TabLeak
    from gradveil.attacks.tag import EmbeddingMatching

_FILES = {  # loaded on first use
    "Analytic": "analytic",
    "AppliesTo": "base",
    "Attack": "base",
    "Candidates": "candidates",
    "Cocktail": "cocktail",
    "DLG": "dlg",
    "Diffusion": "diffusion",
    "EmbeddingMatching": "tag",
    "FedAvgInversion": "fedavg",
    "Fishing": "fishing",
    "GS": "gs",
    "GradInversion": "gradinversion",
    "IDLG": "dlg",
    "Imprint": "planted",
    "Inverter": "inverter",
    "Malicious": "base",
    "Newton": "newton",
    "PatchSpan": "patches",
    "Rep": "rep",
    "Rowwise": "rowwise",
    "SpanCheck": "span",
    "Spear": "spear",
    "Surrogate": "fedavg",
    "TabLeak": "tableak",
    "Trap": "planted",
    "Words": "span",
}

__all__ = [
    "DLG",
    "GS",
    "IDLG",
    "Analytic",
    "AppliesTo",
    "Attack",
    "Candidates",
    "Cocktail",
    "Diffusion",
    "EmbeddingMatching",
    "FedAvgInversion",
    "Fishing",
    "GradInversion",
    "Imprint",
    "Inverter",
    "Malicious",
    "Newton",
    "PatchSpan",
    "Rep",
    "Rowwise",
    "SpanCheck",
    "Spear",
    "Surrogate",
    "TabLeak",
    "Trap",
    "Words",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'gradveil.attacks' has no attribute {name!r}")
    return getattr(import_module(f"gradveil.attacks.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
