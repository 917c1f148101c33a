"""What a client says that it did to an update, in its reply, and whether that is what a run demands.

It is the client's word. Nothing in it can be proved: a client that wants to lie sends the statement of an honest one.
"""

import math
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from gradveil.integrations.flower.demand import OTHER, Demand, name_of, parts_of
from gradveil.integrations.flower.records import Refused
from gradveil.integrations.flower.site import ALLOWED, allows, noise_of
from gradveil.privacy.accountant import SECRET, Account
from gradveil.protection.defense import Defense

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


def check_statement(demand: Demand, reply: Message, simulation: bool = False) -> None:
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
