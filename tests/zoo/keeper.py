"""The zoo: defences whose truth is known, each in a file of its own under broken/ or sound/.

A file registers one defence under its own name and says in ``TRUTH`` what is wrong with it, or why it is sound.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor

from gradveil.countermeasures import Tier
from gradveil.errors import SpecError, did_you_mean
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.threats.setup import AuditConfig
from gradveil.threats.verdict import Verdict
from gradveil.tree import Params

FOLDER = Path(__file__).parent
SCENE = AuditConfig(rounds=1, clients=1, images=5, meter_seconds=0)  # that a verdict on the zoo is of, in short
BROKEN = ("recovered", "recognised")  # outcomes that expose a defence


@dataclass(frozen=True)
class Truth:
    """What is known about a defence of the zoo."""

    why: str  # it is broken, or sound: one sentence
    family: str
    declares: str  # the countermeasures that its author declares, by name
    tier: Tier = "adaptive"  # of the server that must expose it: "multi-round" where the flaw shows over rounds only
    repeats: bool = True  # whether all that it draws comes from the generator it is given, as the contract asks


@dataclass(frozen=True)
class Kept:
    """A defence of the zoo."""

    name: str
    sound: bool
    truth: Truth


def names(sound: bool | None = None) -> list[str]:
    """Return the names of all defences of the zoo, or of the sound or the broken ones; loads none."""
    folders = {None: ("broken", "sound"), True: ("sound",), False: ("broken",)}[sound]
    return [path.stem for folder in folders for path in sorted((FOLDER / folder).glob("*.py"))]


def load(name: str) -> Kept:
    """Register one defence of the zoo and return what is known about it."""
    kept, defense = _read(name)
    DEFENSES.register(name)(defense)
    return kept


@cache
def _read(name: str) -> tuple[Kept, type[Defense]]:
    """Run the file of a defence, once."""
    path = next((path for path in FOLDER.glob("*/*.py") if path.stem == name), None)
    if path is None:
        raise SpecError(f"The zoo has no {name!r}. {did_you_mean(name, names())}Known: {', '.join(names())}.")
    spec = importlib.util.spec_from_file_location(f"zoo_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return Kept(name, path.parent.name == "sound", module.TRUTH), DEFENSES.get(name)


@contextmanager
def opened(*wanted: str) -> Iterator[dict[str, Kept]]:
    """Within, these defences are registered (default: all); afterwards none of the zoo is."""
    DEFENSES.names()
    before = dict(DEFENSES._classes)
    try:
        yield {name: load(name) for name in wanted or names()}
    finally:
        DEFENSES._classes.clear()
        DEFENSES._classes.update(before)


def exposed(kept: Kept, verdict: Verdict) -> bool:
    """Return whether a verdict says that a defence is broken, by the tier that its truth names.

    Images were recovered or recognised; or the declaration was found to be false, and "nothing found" is not said.
    """
    tiers = ("oblivious", "adaptive", *({kept.truth.tier} - {"adaptive"}))
    if any(judged.outcome in BROKEN for judged in verdict.tiers if judged.tier in tiers):
        return True
    return bool(verdict.errors) and verdict.outcome != "nothing"


def is_right(kept: Kept, verdict: Verdict) -> bool:
    """Return whether the verdict is the truth: a broken defence is exposed, a sound one is not accused."""
    return not (exposed(kept, verdict) or verdict.errors) if kept.sound else exposed(kept, verdict)


def each(gradient: Params, change: Callable[[Tensor], Tensor]) -> Params:
    """Return every tensor changed by itself."""
    return {name: change(g) for name, g in gradient.items()}


def noisy(gradient: Params, rng: Generator, std: float) -> Params:
    """Return the gradient with independent Gaussian noise on every entry."""
    return each(gradient, lambda g: g + std * torch.randn(g.shape, generator=rng, device=rng.device).to(g))
