"""Defences by name: ``gradveil.protect(model, defenses.Veil(z=1, clip=1))``. A spec is the text form of the same."""

from gradveil.defenses.ats import Ats
from gradveil.defenses.censor import Censor
from gradveil.defenses.compose import Compose
from gradveil.defenses.compression import Qsgd, Quantise, Sign
from gradveil.defenses.concealed import Concealed
from gradveil.defenses.decoy import Decoy
from gradveil.defenses.dp_sgd import DpSgd
from gradveil.defenses.mixup import Mixup
from gradveil.defenses.noise import Gaussian, Laplace
from gradveil.defenses.outpost import Outpost
from gradveil.defenses.pruning import Pruning
from gradveil.defenses.representation import (
    RandomMask,
    RepresentationAuthors,
    RepresentationCertified,
    RepresentationDirection,
    RepresentationPerturbation,
)
from gradveil.defenses.veil import Veil
from gradveil.protection.defense import Accounted, Defense, NoDefense, PerRound

__all__ = [
    "Accounted",
    "Ats",
    "Censor",
    "Compose",
    "Concealed",
    "Decoy",
    "Defense",
    "DpSgd",
    "Gaussian",
    "Laplace",
    "Mixup",
    "NoDefense",
    "Outpost",
    "PerRound",
    "Pruning",
    "Qsgd",
    "Quantise",
    "RandomMask",
    "RepresentationAuthors",
    "RepresentationCertified",
    "RepresentationDirection",
    "RepresentationPerturbation",
    "Sign",
    "Veil",
]
