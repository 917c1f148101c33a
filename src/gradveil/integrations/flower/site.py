"""What a site alone decides, by its ``--node-config`` or its own environment; no run and no message can change it."""

import json
import os
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from torch import Generator

from gradveil.errors import BudgetError, DefenseError
from gradveil.integrations.flower.values import asked
from gradveil.privacy.accountant import NOISE, SECRET, SIMULATED, Account, account_path, spend_from
from gradveil.protection.defense import Defense, build

ACCOUNT = "gradveil-account"  # in the node's state: what its records had spent after the last payment of this run
NOISE_FROM = "GRADVEIL_NOISE"  # in the environment
ALLOWED = ("evaluate", "query")  # what leaves beside a defence of records where a site says 'allow'
KEYS = {  # of --node-config: who may set it is the site; what it may be, and what it decides
    "partition-id": ("a whole number", "the node's share of the data, and the name of its account"),
    "data": ("a folder", "where its data lie"),
    "defense": ("a spec", "the defence; stands above the app's and the run's"),
    "noise": ("'secret' (default), 'simulated'", "whether the defence's draws can be repeated from a seed"),
    "account": ("a file", "where it keeps its account, in place of ~/.gradveil/accounts/PARTITION-ID.json"),
    "evaluate": ("'allow'", "lets answers to evaluate messages leave beside a defence of records, unpaid"),
    "query": ("'allow'", "the same for query messages and all others"),
}


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
