"""What a node takes from a run that somebody else submits: registered names and numbers; code and files are the site's.

A run config and a message come from others. They may choose among what gradveil has (``dataset = "mnist"``), with
numbers in their ranges; ``module:function``, paths, and the settings that name files are taken from the site alone
(``--node-config``). What leaves the node says nothing of its files: an error's own text stays in the node's log.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from gradveil.errors import GradveilError
from gradveil.imports import is_import_path
from gradveil.models.backbones import PACKAGED
from gradveil.registry import Registry, parse, split_specs
from gradveil.tree import Params

LOG = logging.getLogger("gradveil")
LONGEST = 500  # letters of a text that a run gives
LARGEST_MAP = 2**28  # bytes of a map that a message holds
REGISTRIES = {
    "dataset": "gradveil.data.base:DATASETS",
    "model": "gradveil.models.base:MODELS",
    "loss": "gradveil.losses:LOSSES",
    "partition": "gradveil.data.partition:PARTITIONS",
    "defense": "gradveil.protection.defense:DEFENSES",
    "require_defense": "gradveil.protection.defense:DEFENSES",
    "schedule": "gradveil.federated.settings:SCHEDULES",
}
SITE = ("dataset", "model", "loss", "data")  # what a site may set by --node-config in place of the run
FILES = {"dataset": {"path"}, "defense": {"prior", "secret"}, "model": {"weights"}}  # settings that name a file
WORDS: dict[str, dict[str, tuple[str, ...]]] = {  # settings that name a file or code unless they are one of these
    "defense": {"shape": ("iso", "public")},
    "model": {"backbone": tuple(PACKAGED)},
}


class RunRefused(GradveilError):
    """A run asks for what a node does not take from it; the text holds the run's own words alone."""


class NodeError(GradveilError):
    """A node could not do its part; what it read is not in the text."""


def check_spec(kind: str, text: str) -> str:
    """Return a spec that a run gives; raise unless it is made of registered names, and names no code and no file."""
    place = REGISTRIES[kind].partition(":")
    registry: Registry[Any] = getattr(import_module(place[0]), place[2])
    if len(text) > LONGEST or not text.isprintable():
        raise RunRefused(f"the run's {kind} has {len(text)} letters, or some that cannot be printed.")
    for part in split_specs(text) or [""]:
        if is_import_path(part) or parse(part).name not in registry.names():
            raise RunRefused(_theirs(kind, text, "is no registered name"))
        kind_of = "defense" if kind == "require_defense" else kind
        for key, value in parse(registry.current(part)).settings.items():
            words = WORDS.get(kind_of, {}).get(key)
            if key in FILES.get(kind_of, ()) or (words and value not in words):
                raise RunRefused(_theirs(kind, text, f"names a file or code by {key}="))
    return text


def _theirs(kind: str, text: str, what: str) -> str:
    how = f" by --node-config \"{kind}='...'\"" if kind in (*SITE, "defense") else ""
    return f"the run's {kind} = {text[:80]!r} {what}: code and files are the site's alone to name{how}."


def taken(run: Mapping[str, Any], site: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run config that a node goes by: the site's own words first, and of the run's those that may be."""
    found: dict[str, Any] = {}
    for key, value in run.items():
        name = key.replace("-", "_")
        if name == "data" or name in site:
            continue  # a folder of the node: the site's alone
        if isinstance(value, str) and value and name in REGISTRIES:
            check_spec(name, value)
        found[name] = value
    return found | {name: str(site[name]) for name in SITE if name in site}


def check_weights(weights: Params, own: Params) -> None:
    """Raise where weights are not such as training can begin at: NaN, infinite, or a layer of zeros.

    ``own``: those that the model is made with, where a layer may begin at zero.
    """
    for name, value in weights.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise RunRefused(f"the weights {name[:80]!r} hold NaN or infinite values: nothing is trained at them.")
        if value.ndim >= 2 and value.numel() and not bool(value.any()) and bool(own[name].any()):
            raise RunRefused(f"the weights {name[:80]!r} are all zero: what a layer before them sees would stay alone.")


def check_map(value: Any) -> None:
    """Raise where a message's map is no bytes, or too many: a number would be made into as many zeros."""
    if not isinstance(value, bytes) or len(value) > LARGEST_MAP:
        raise RunRefused(f"the message's public-map is a {type(value).__name__}, or over {LARGEST_MAP:,} bytes.")


def outward(error: Exception) -> GradveilError:
    """Return what may leave the node of an error; its own text goes into the node's log."""
    if isinstance(error, RunRefused):
        return error
    LOG.error("gradveil: this node could not do its part", exc_info=error)
    return NodeError(f"the node could not do its part ({type(error).__name__}); its own log says why.")


def said_outward(work: Callable[[], Any]) -> Any:
    """Do something on a node; an error that leaves it says nothing of what the node holds."""
    try:
        return work()
    except Exception as error:
        raise outward(error) from None


@dataclass(frozen=True)
class Key:
    """One setting of a run: who may set it on a node, and what it may be."""

    name: str
    who: str
    range: str


def keys() -> list[Key]:
    """Return every setting of a run config, for the page of them."""
    import dataclasses

    from gradveil.integrations.flower.settings import FlowerSettings
    from gradveil.ranges import hints_of, names_of, range_of

    server = {"strategy", "audit", "audit_sample", "audit_max_examples", "max_change", "max_examples", "deadline"}
    server |= {"min_replies", "resume", "out", "rounds", "schedule", "clients"}
    found = []
    for field in dataclasses.fields(FlowerSettings):
        kind = hints_of(FlowerSettings)[field.name]
        within = str(range_of(kind) or names_of(kind))
        who = "the run; a node does not use it" if field.name in server else "the run"
        if field.name == "data":
            who, within = "the site", "a folder; the run's is that of the server"
        elif field.name in REGISTRIES:
            over = field.name in (*SITE, "defense")
            who += "; the site above it" if over else ""
            within = "a registered name without files or code; the site: anything" if over else "a registered name"
        found.append(Key(field.name.replace("_", "-"), who, within))
    return found
