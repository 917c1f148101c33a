"""The zoo: defences whose truth is known, in files under broken/, unseen/ and sound/.

A file registers one defence under its own name and says in ``TRUTH`` what is wrong with it, or why it is sound; or it
registers a family of them and says so of each in ``TRUTHS``. The broken ones under unseen/ are kept from whoever
writes probes: their score says how well probes do on what they were not written for.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, Tier, whiten
from gradveil.errors import SpecError, did_you_mean
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.threats.setup import AuditConfig
from gradveil.threats.verdict import Verdict
from gradveil.tree import Params

FOLDER = Path(__file__).parent
SCENE = AuditConfig(rounds=1, clients=1, images=5, meter_seconds=0)  # that a verdict on the zoo is of, in short
FIRST = replace(SCENE, tiers=("oblivious", "adaptive", "multi-round"), attacks=("newton",))  # what is tried first
BROKEN = ("recovered", "recognised", "identified")  # outcomes that expose a defence
STD = 5.0  # of the noise of broken ones: far more than what is under it
HALVES = ("broken", "unseen", "sound")


@dataclass(frozen=True)
class Truth:
    """What is known about a defence of the zoo."""

    why: str  # it is broken, or sound: one sentence
    family: str
    declares: str  # the countermeasures that its author declares, by name
    tier: Tier = "adaptive"  # of the server that must expose it: "multi-round" where the flaw shows over rounds only
    repeats: bool = True  # whether all that it draws comes from the generator it is given, as the contract asks
    undetectable: str = ""  # why running it cannot show what is wrong, where that is so


@dataclass(frozen=True)
class Kept:
    """A defence of the zoo."""

    name: str
    sound: bool
    truth: Truth


def names(*folders: str) -> list[str]:
    """Return the names of all defences of the zoo, or of these folders; loads none."""
    return [name for folder in folders or HALVES for path in _files(folder) for name in _names(path)]


def _files(folder: str) -> list[Path]:
    return sorted((FOLDER / folder).glob("*.py"))


def _names(path: Path) -> list[str]:
    return re.findall(r'^@DEFENSES.register\("(\w+)"\)', path.read_text(), re.MULTILINE)


def load(name: str) -> Kept:
    """Register one defence of the zoo and return what is known about it."""
    kept, defense = _read(name)
    DEFENSES.register(name)(defense)
    return kept


@cache
def _read(name: str) -> tuple[Kept, type[Defense]]:
    path = next((path for folder in HALVES for path in _files(folder) if name in _names(path)), None)
    if path is None:
        raise SpecError(f"The zoo has no {name!r}. {did_you_mean(name, names())}Known: {', '.join(names())}.")
    module = _run(path)
    truth = module.TRUTHS[name] if hasattr(module, "TRUTHS") else module.TRUTH
    made = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Defense))
    (defense,) = (one for one in made if one.__module__ == module.__name__ and getattr(one, "spec_name", "") == name)
    return Kept(name, path.parent.name == "sound", truth), defense


@cache
def _run(path: Path) -> Any:
    """Run a file of defences, once."""
    spec = importlib.util.spec_from_file_location(f"zoo_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    before = dict(DEFENSES._classes)
    try:
        spec.loader.exec_module(module)
    finally:
        DEFENSES._classes.clear()
        DEFENSES._classes.update(before)
    return module


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


@dataclass(frozen=True)
class Noised(Defense):
    """A defence that adds noise to the gradient, and declares it to be independent of standard deviation STD."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        """Return what is added."""
        raise NotImplementedError

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        """Add it."""
        added = self.noise(gradient, rng)
        return {name: g + added[name].reshape(g.shape).to(g) for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what a server does that takes the declaration for true."""
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, STD)),)


def randn(like: Tensor, rng: Generator) -> Tensor:
    """Return independent Gaussian noise of standard deviation STD."""
    return STD * torch.randn(like.shape, generator=rng)


def flat(gradient: Params) -> Tensor:
    """Return all tensors as one vector."""
    return torch.cat([g.reshape(-1) for g in gradient.values()])


def split(vector: Tensor, gradient: Params) -> Params:
    """Return a vector cut into tensors of these names and shapes."""
    parts = vector.split([g.numel() for g in gradient.values()])
    return {name: part.reshape(g.shape) for (name, g), part in zip(gradient.items(), parts, strict=True)}
