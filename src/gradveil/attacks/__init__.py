"""Attacks: what an update gives away. ``attacks.Newton(steps=40)(model, update, like=dataset)`` rebuilds its inputs."""

from gradveil.attacks.analytic import Analytic
from gradveil.attacks.base import AppliesTo, Attack, Malicious
from gradveil.attacks.candidates import Candidates
from gradveil.attacks.cocktail import Cocktail
from gradveil.attacks.dlg import DLG, IDLG
from gradveil.attacks.fedavg import FedAvgInversion, Surrogate
from gradveil.attacks.fishing import Fishing
from gradveil.attacks.gs import GS
from gradveil.attacks.inverter import Inverter
from gradveil.attacks.newton import Newton
from gradveil.attacks.patches import PatchSpan
from gradveil.attacks.planted import Imprint, Trap
from gradveil.attacks.rowwise import Rowwise
from gradveil.attacks.span import SpanCheck, Words
from gradveil.attacks.spear import Spear
from gradveil.attacks.tableak import TabLeak
from gradveil.attacks.tag import EmbeddingMatching

__all__ = [
    "DLG",
    "GS",
    "IDLG",
    "Analytic",
    "AppliesTo",
    "Attack",
    "Candidates",
    "Cocktail",
    "EmbeddingMatching",
    "FedAvgInversion",
    "Fishing",
    "Imprint",
    "Inverter",
    "Malicious",
    "Newton",
    "PatchSpan",
    "Rowwise",
    "SpanCheck",
    "Spear",
    "Surrogate",
    "TabLeak",
    "Trap",
    "Words",
]
