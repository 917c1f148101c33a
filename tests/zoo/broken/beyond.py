"""Broken defences whose flaw does not show where an audit calls them, or lies outside their code."""

import sys
from dataclasses import dataclass

from torch import Generator

from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from zoo.keeper import Noised, Truth, each, randn

FAMILY = "beyond probes"
TRUTHS = {
    "knows_the_audit": Truth(
        "It adds noise only where an audit is on the call stack.",
        "acts at times",
        "whiten",
    ),
    "accomplice": Truth(
        "The seed of its noise is given away by another program.",
        FAMILY,
        "whiten",
        undetectable="What is wrong is outside the defence's code and the update.",
    ),
}


@DEFENSES.register("knows_the_audit")
@dataclass(frozen=True)
class KnowsTheAudit(Noised):
    """Look at who calls."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        frame, watched = sys._getframe(), False
        while frame is not None and not watched:
            watched = ".threats." in frame.f_globals.get("__name__", "")
            frame = frame.f_back
        return each(gradient, lambda g: randn(g, rng) * watched)


@DEFENSES.register("accomplice")
@dataclass(frozen=True)
class Accomplice(Noised):
    """Add noise as it should be, from a secret that somebody else publishes."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: randn(g, rng))
