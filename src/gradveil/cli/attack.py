"""``gradveil attack``: run one attack on one saved update, and keep what it brings back."""

from pathlib import Path
from typing import Any

import typer

from gradveil.cli import shared
from gradveil.errors import SpecError, did_you_mean


def command(
    update: str = typer.Option(..., help="A safetensors file: gradients, a difference, or weights."),
    model: shared.Model = "lenet",
    attack: str = typer.Option("newton", help="An attack spec, e.g. dlg:restarts=8."),
    defense: str = typer.Option("none", help="What the client is said to have used."),
    server: str = typer.Option("oblivious", help="oblivious, or one of the defence's countermeasures, e.g. drop."),
    weights: shared.Weights = None,
    before: shared.Before = None,
    kind: shared.Kind = None,
    lr: shared.LearningRate = None,
    steps: int = typer.Option(None, show_default=shared.AS_SAID, help="Local steps behind the update."),
    examples: int = typer.Option(None, show_default=shared.AS_SAID, help="Examples behind the update."),
    loss: shared.LossOfFile = None,
    dataset: str = typer.Option(None, help="Public data of the same kind: gives the shape and a prior."),
    data: shared.Data = None,
    input_shape: shared.InputShape = None,
    classes: shared.Classes = 10,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    out: Path = typer.Option(Path("found.safetensors"), help="Where the reconstruction goes; a PNG lies beside it."),
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Reconstruct the inputs behind a saved update."""
    from gradveil.attacks.base import build as build_attack
    from gradveil.auditing.saved_update import UpdateAuditConfig, build_case
    from gradveil.auditing.update_files import write_examples
    from gradveil.report.pictures import write_pictures
    from gradveil.types import Batch

    case = build_case(
        UpdateAuditConfig(
            update=update, model=model, weights=weights, before=before, kind=kind, lr=lr, num_steps=steps,
            num_examples=examples, loss=loss, defense=defense, attacks=(attack,), dataset=dataset, data=data,
            input_shape=shared.read_shape(input_shape), num_classes=classes, seed=seed, device=device,
        )
    )  # fmt: skip
    view, spec = _view(case, server)
    with shared.working(json or quiet, (spec or attack).partition(":")[0]):
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


def _view(case: Any, server: str) -> tuple[Any, str | None]:
    """Return what the attack is given, and the attack that this server would choose, where it has one."""
    from gradveil.protection.defense import build as build_defense

    seen = case.observation(case.update)
    if server == "oblivious":
        return seen, None
    known = {c.name: c for c in build_defense(case.config.defense).adaptive(case.model)}
    if server not in known:
        raise SpecError(
            f"{case.config.defense!r} has no countermeasure {server!r}. {did_you_mean(server, known)}"
            f"Known: oblivious, {', '.join(known)}."
        )
    return known[server].view(seen), known[server].attack
