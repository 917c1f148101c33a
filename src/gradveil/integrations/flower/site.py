"""The site's side of a run: what it takes from a run that others submit, its noise, defence and account, its statement.

A run config and a message come from others. They may choose among what gradveil has (``dataset = "mnist"``), with
numbers in their ranges; ``module:function``, paths, and the settings that name files are taken from the site alone
(``--node-config``). What leaves the node says nothing of its files: an error's own text stays in the node's log.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import Generator, nn

from gradveil.defenses.compose import Compose, parts_of
from gradveil.defenses.veil import Veil, check_clip
from gradveil.errors import BudgetError, DefenseError, GradveilError
from gradveil.imports import is_import_path
from gradveil.integrations.flower.records import Refused, asked
from gradveil.models.features import PACKAGED
from gradveil.privacy.accountant import NOISE, SECRET, SIMULATED, Account, account_path, spend_from
from gradveil.protection.defense import Defense, build
from gradveil.registry import Registry, Spec, describe, parse, split_specs
from gradveil.tree import Params, parameters

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
FILES = {
    "dataset": {"path", "tokenizer"},
    "defense": {"prior", "secret"},
    "model": {"weights"},
}  # settings that name a file
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
    check_text(kind, text)
    for part in split_specs(text) or [""]:
        if is_import_path(part) or parse(part).name not in registry.names():
            raise RunRefused(_theirs(kind, text, "is no registered name"))
        kind_of = "defense" if kind == "require_defense" else kind
        for key, value in parse(part).settings.items():
            words = WORDS.get(kind_of, {}).get(key)
            if key in FILES.get(kind_of, ()) or (words and value not in words):
                raise RunRefused(_theirs(kind, text, f"names a file or code by {key}="))
    return text


def check_text(name: str, text: str) -> None:
    """Raise where a text that a run gives is longer than any has to be, or cannot be printed."""
    if len(text) > LONGEST or not text.isprintable():
        raise RunRefused(f"the run's {name[:80]!r} has {len(text)} letters, or some that cannot be printed.")


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
        if isinstance(value, str) and value:
            (check_spec if name in REGISTRIES else check_text)(name, value)
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


ACCOUNT = "gradveil-account"  # in the node's state: what its records had spent after the last payment of this run
NOISE_FROM = "GRADVEIL_NOISE"  # in the environment
ALLOWED = ("evaluate", "query")  # what leaves beside a defence of records where a site says 'allow'


def noise_of(context: Context) -> str:
    """Return whether this site's noise is secret or simulated: its own word, else that of its process, else secret."""
    said = str(context.node_config.get("noise") or os.environ.get(NOISE_FROM) or SECRET)
    if said not in NOISE:
        raise DefenseError(f"this site has noise={said[:40]!r}. Give 'secret' or 'simulated'.")
    return said


def is_simulation() -> bool:
    """Whether this process was told that it is part of a simulation."""
    return os.environ.get(NOISE_FROM) == SIMULATED


def check_seed(seed: int | None, context: Context) -> None:
    """Raise where an app has a seed for its noise and the site has not asked for simulated noise."""
    if seed is not None and noise_of(context) != SIMULATED:
        raise DefenseError(
            "the app gives its noise a seed, from which everybody who has the app can draw it again. Leave the seed "
            "out; in a simulation set --node-config \"noise='simulated'\" or GRADVEIL_NOISE=simulated."
        )


def generator_of(context: Context, seed: int | None = None) -> Generator | None:
    """Return what a simulation draws from; None where the site's noise is secret."""
    return generator(seed) if noise_of(context) == SIMULATED else None


def generator(seed: int | None) -> Generator:
    """Return a generator of this seed, or of one that nobody chose: good for what need not be secret."""
    found = Generator()
    return found.manual_seed(found.seed() if seed is None else seed)


def allows(context: Context, what: str) -> bool:
    """Return whether the site lets something leave beside a defence of records."""
    return str(context.node_config.get(what)) == "allow"


def defense_for(given: str | Defense | None, context: Context) -> Defense:
    """Return the defence in force, read when a message comes: the site's, else the one given, else the run's.

    A mod is built when the app is imported, and the settings are known only later. What the site says in its
    ``--node-config`` stands above all: whoever submits a run cannot weaken it by another spec.
    """
    spec = context.node_config.get("defense", given)
    if spec is None:
        spec = context.run_config.get("defense")
    if spec is None:
        raise DefenseError("No defense is set. Give the mod one, or set 'defense' in --node-config or the run config.")
    return build(spec)


def name_in(context: Context) -> str:
    """Return the name of the site's account: none that a server or a run chooses, so that all runs share it."""
    return str(context.node_config.get("partition-id", "site"))


def account_file(context: Context) -> Path | None:
    """Return where the site keeps its account; None where its noise is simulated and it has named no file."""
    if given := context.node_config.get("account"):
        return Path(str(given))
    return None if noise_of(context) == SIMULATED else account_path(name_in(context))


def pay(message: Message, context: Context, cost: float, limit: float) -> Account:
    """Charge a participation to this site's account before anything is sent; raise where it would overspend.

    The account is a file, whatever the run is called and however its data are cut; a simulation without one keeps it in
    the node's state, as long as the run. That state is a witness of the file as well: one that was removed while a
    run goes on is refused.
    """
    client, path, noise = name_in(context), account_file(context), noise_of(context)
    kept = context.state.config_records.get(ACCOUNT)
    before = None if kept is None else Account.from_json(json.loads(str(kept["json"])), client)
    if path is None:
        account = before or Account(client, limit=limit)
        account = replace(account, limit=min(account.limit, limit)).spend(cost, noise)
    else:
        note = f"run {context.run_id}, round {asked(message, 'server-round', 0):g}"
        account = spend_from(path, client, cost, limit, noise=noise, note=note)
        if before is not None and account.spent < (before.spent + cost) * (1 - 1e-9):
            raise BudgetError(f"{path} has forgotten what this run has spent: nothing is sent. Put the right one back.")
    context.state[ACCOUNT] = ConfigRecord({"json": json.dumps(account.to_json())})
    return account


OTHER = "other defence"  # the word under which updates with another one are counted; a statement is the client's word


def lacks(demand: Defense, settings: Iterable[str]) -> bool:
    """Whether a part of a demanded defence is not among those that a client names (``settings_of``); more may be."""
    return not set(settings_of(demand)) <= set(settings)


def check_own(demand: Defense, own: Defense) -> None:
    """Raise on a client that is about to do something else: in a secure sum it could not be left out later."""
    if lacks(demand, settings_of(own)):
        raise DefenseError(f"{OTHER}: this site uses {name_of(own)!r}, the run demands {name_of(demand)!r}.")


def settings_of(defense: Defense) -> list[str]:
    """Return each part of a defence with all its settings, defaults too: those of two versions may differ."""
    return [_in_full(part) for part in parts_of(defense)]


def _in_full(part: Any) -> str:
    fields = [f.name for f in dataclasses.fields(part) if f.init and not f.name.startswith("_")]
    return str(Spec(_word(part), {name: str(getattr(part, name)) for name in fields}))


def _word(part: Defense) -> str:
    return str(getattr(part, "spec_name", type(part).__qualname__))


def name_of(defense: Defense) -> str:
    """Return the spec of a defence, or the name of its class where it has none."""
    return describe(defense) if hasattr(defense, "spec_name") else _word(defense)


STATEMENT = "gradveil-defense"  # the ConfigRecord of a reply that holds it
UNSAID, REPEATABLE = "no defence stated", "simulated noise"  # the words under which replies are counted
WORD = "(This is the client's word, not a proof.)"
SHOWN = 200  # letters of what a client says that are repeated


def state(
    reply: Message, defense: Defense, context: Context, *, steps: int, examples: int, account: Account | None = None
) -> None:
    """Add the statement to a reply; where an inner mod has made one, both defences were used."""
    before = reply.content.config_records.get(STATEMENT, ConfigRecord())
    said: dict[str, Any] = {
        "defense": "+".join([*([str(before["defense"])] if before else []), name_of(defense)]),
        "settings": [*before.get("settings", []), *settings_of(defense)],
        "from-site": "defense" in context.node_config,
        "steps": steps,
        "examples": examples,
        "noise": noise_of(context),
    }
    if account is not None:
        said |= {"spent": account.spent} | ({"limit": account.limit} if math.isfinite(account.limit) else {})
        said |= {"allows": [what for what in ALLOWED if allows(context, what)]}  # beside it, and not paid for
    reply.content[STATEMENT] = ConfigRecord(said)


def check_statement(demand: Defense, reply: Message, simulation: bool = False) -> None:
    """Raise unless the reply says that what the run demands was done, with noise that is secret outside simulations."""
    wanted, said = name_of(demand), statement_in(reply)
    if said is None:
        raise Refused(UNSAID, f"The run demands {wanted!r}, and the reply does not say what was done. {WORD}")
    if lacks(demand, said["settings"]):
        raise Refused(OTHER, f"{told(said)}, and the run demands {wanted!r}. {WORD}")
    if said["steps"] < 1:
        raise Refused(OTHER, f"The client says that no step was taken under {wanted!r}. {WORD}")
    if said.get("noise") != SECRET and not simulation:
        raise Refused(
            REPEATABLE,
            f"The client does not say that the noise of {wanted!r} is secret, and this run is no simulation. A site "
            f"sets noise='simulated' in its --node-config, or GRADVEIL_NOISE; earlier versions do not say it. {WORD}",
        )


def statement_in(reply: Message) -> ConfigRecord | None:
    """Return the statement of a reply; None where there is none that can be read."""
    said = reply.content.config_records.get(STATEMENT)
    kinds = {"defense": str, "settings": list, "from-site": bool, "steps": int, "examples": int}
    if said is None or any(type(said.get(name)) is not kind for name, kind in kinds.items()):
        return None
    return said


def told(said: ConfigRecord) -> str:
    """Return a statement in words; its text is a stranger's."""
    whose = "its site's setting" if said["from-site"] else "not a setting of its site"
    return f"The client says that it used {shown(said)!r} ({whose})"


def shown(said: ConfigRecord) -> str:
    """Return the name of the stated defence, as it can be written in a log or a row."""
    return "".join(c if c.isprintable() else "?" for c in str(said["defense"])[:SHOWN])


CLIP, MAP = "public-clip", "public-map"  # in the config of a training message


def veil_in(defense: Defense) -> Veil | None:
    """Return the part of a defence that clips records and adds noise; None where there is none."""
    return next((part for part in parts_of(defense) if isinstance(part, Veil)), None)


def write_clip(defense: Defense, model: nn.Module) -> dict[str, Any]:
    """Return what clients are told of a defence for this round; nothing where its settings say all."""
    veil = veil_in(defense)
    if veil is None or (veil.shape == "iso" and veil.quantile is None):
        return {}
    now = veil.measured
    if now.coordinates is None:
        return {CLIP: now.clip}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "map.safetensors"
        now.save(model, str(path))
        return {CLIP: now.clip, MAP: path.read_bytes()}


def read_clip(defense: Defense, message: Message, model: nn.Module) -> Defense:
    """Return the client's defence with what the server said; only what follows from public data is taken from it."""
    veil, said = veil_in(defense), next(iter(message.content.config_records.values()), ConfigRecord())
    if veil is None or (veil.shape == "iso" and veil.quantile is None) or CLIP not in said:
        return defense
    clip = check_clip(asked(message, CLIP, 1.0), "that the server sent")
    told = replace(veil, quantile=None, clip=clip if veil.clip is None else veil.clip)
    if veil.shape != "iso":
        content, size = said.get(MAP, b""), sum(p.numel() for p in parameters(model).values())
        most = 8 * veil.rank * (size + 1) + 2**16 + 500 * len(parameters(model))
        if not isinstance(content, bytes) or len(content) > most:
            raise DefenseError(f"the server's {MAP} is no file of at most {most:,} bytes (rank {veil.rank}).")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "map.safetensors"
            path.write_bytes(content)
            told = replace(told, shape=str(path)).for_round(model, None)
    if not isinstance(defense, Compose):
        return told
    return replace(defense, parts=tuple(told if part is veil else part for part in defense.parts))
