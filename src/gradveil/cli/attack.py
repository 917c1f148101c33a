"""``gradveil attack``: run one attack on one saved update, and keep what it brings back."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.attacks.base import build as build_attack
from gradveil.auditing.saved_update import SavedUpdate, UpdateAuditConfig, build_case
from gradveil.auditing.update_files import write_examples
from gradveil.cli import shared
from gradveil.cli.options import Given, Option, Output, takes
from gradveil.errors import SpecError, did_you_mean
from gradveil.protection.defense import build as build_defense
from gradveil.report.pictures import write_pictures
from gradveil.types import Batch, Observation


@dataclass(frozen=True, kw_only=True)
class AttackOptions(Output):
    """What the command takes beside the facts of an update."""

    attack: Annotated[str, Option("An attack spec, e.g. dlg:restarts=8.")] = "newton"
    server: Annotated[str, Option("oblivious, or one of the defence's countermeasures, e.g. drop.")] = "oblivious"
    out: Annotated[Path, Option("Where the reconstruction goes; a PNG lies beside it.")] = Path("found.safetensors")


@takes(
    AttackOptions,
    UpdateAuditConfig,
    first="update model attack defense server weights dataset out json",
    without="attacks truth minutes gallery",
    defense=Option("What the client is said to have used."),
)
def command(given: Given) -> None:
    """Reconstruct the inputs behind a saved update."""
    attack, server, out = (given[name] or getattr(AttackOptions, name) for name in ("attack", "server", "out"))
    json = given["json"]
    case = build_case(replace(given.without("attack").make(UpdateAuditConfig), attacks=(attack,)))
    view, spec = _view(case, server)
    with shared.working(json or given["quiet"], (spec or attack).partition(":")[0]):
        found = build_attack(spec or attack).reconstruct(view, case.seeds("attack", attack, 0))
    inputs = found.inputs.detach().cpu()
    labels = found.labels.cpu() if found.labels is not None else inputs.new_full((len(inputs),), -1).long()
    write_examples(out, Batch(inputs, labels))
    write_pictures(out.with_suffix(".png"), inputs.numpy())
    said: dict[str, Any] = {
        "attack": spec or attack,
        "server": server,
        "converged": found.converged,
        "objective": found.objective,
        "labels": None if found.labels is None else found.labels.tolist(),
        "details": found.details,
        "out": str(out),
        "picture": str(out.with_suffix(".png")),
    }
    shared.print_json(said) if json else typer.echo("\n".join(f"{key:10} {value}" for key, value in said.items()))


def _view(case: SavedUpdate, server: str) -> tuple[Observation, str | None]:
    """Return what the attack is given, and the attack that this server would choose, where it has one."""
    seen = case.observation(case.update)
    if server == "oblivious":
        return seen, None
    known = {c.name: c for c in build_defense(case.config.defense).servers(case.model)}
    if server not in known:
        raise SpecError(
            f"{case.config.defense!r} has no countermeasure {server!r}. {did_you_mean(server, known)}"
            f"Known: oblivious, {', '.join(known)}."
        )
    return known[server].view(seen), known[server].attack
