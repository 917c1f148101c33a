"""The defence that a run demands: what clients state in their replies, and the round's clip and map.

A statement is the client's word. Nothing in it can be proved: a client that wants to lie sends an honest one's.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from torch import nn

from gradveil.defenses.compose import Compose
from gradveil.defenses.veil import Veil, check_clip
from gradveil.errors import DefenseError
from gradveil.integrations.flower.records import Refused, asked
from gradveil.integrations.flower.site import ALLOWED, allows, noise_of
from gradveil.privacy.accountant import SECRET, Account
from gradveil.protection.defense import Defense
from gradveil.registry import Spec, describe
from gradveil.tree import parameters

OTHER = "other defence"  # the word under which updates with another one are counted


@dataclass(frozen=True)
class RequiredDefense:
    """At least the parts of this defence, with these settings; a client may do more."""

    defense: Defense

    def lacks(self, settings: Iterable[str]) -> bool:
        """Return whether some part is not among those that a client names, as ``parts_of`` does."""
        return not set(parts_of(self.defense)) <= set(settings)

    def check(self, own: Defense) -> None:
        """Raise on a client that is about to do something else: in a secure sum it could not be left out later."""
        if self.lacks(parts_of(own)):
            raise DefenseError(f"{OTHER}: this site uses {name_of(own)!r}, the run demands {name_of(self.defense)!r}.")


def parts_of(defense: Defense) -> list[str]:
    """Return each part of a defence with all its settings, defaults too: those of two versions may differ."""
    return [_in_full(part) for part in (defense.parts if isinstance(defense, Compose) else (defense,))]


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
        "settings": [*before.get("settings", []), *parts_of(defense)],
        "from-site": "defense" in context.node_config,
        "steps": steps,
        "examples": examples,
        "noise": noise_of(context),
    }
    if account is not None:
        said |= {"spent": account.spent} | ({"limit": account.limit} if math.isfinite(account.limit) else {})
        said |= {"allows": [what for what in ALLOWED if allows(context, what)]}  # beside it, and not paid for
    reply.content[STATEMENT] = ConfigRecord(said)


def check_statement(demand: RequiredDefense, reply: Message, simulation: bool = False) -> None:
    """Raise unless the reply says that what the run demands was done, with noise that is secret outside simulations."""
    wanted, said = name_of(demand.defense), statement_in(reply)
    if said is None:
        raise Refused(UNSAID, f"The run demands {wanted!r}, and the reply does not say what was done. {WORD}")
    if demand.lacks(said["settings"]):
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
    parts = defense.parts if isinstance(defense, Compose) else (defense,)
    return next((part for part in parts if isinstance(part, Veil)), None)


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
