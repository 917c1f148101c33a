"""``gradveil check-model``: were the weights that a server sent planted to give examples away?"""

from dataclasses import asdict
from pathlib import Path

import typer

from gradveil.cli import shared
from gradveil.cli.options import OWN, WORDS, read_shape

SUSPICIOUS = 3


def command(
    before: Path = typer.Argument(help="Safetensors: weights that the server sent."),
    after: Path = typer.Option(None, help="Safetensors: those of the next round, which are then checked beside them."),
    model: str = typer.Option(None, help=f"The model that you expect: a spec, {OWN}"),
    examples: Path = typer.Option(
        None, help="Safetensors with inputs and labels of your own: what do the weights do to them? Needs --model."
    ),
    input_shape: str = typer.Option(None, help="Of one example, e.g. 1x28x28, where --examples does not show it."),
    classes: int = typer.Option(10, help="Number of classes, or of outputs."),
    loss: str = typer.Option("cross_entropy", help=WORDS["loss"][1]),
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Check weights before training at them; exit code 3 where they look planted."""
    from gradveil.auditing.incoming import check_model
    from gradveil.auditing.update_files import read_examples
    from gradveil.losses import build as build_loss

    own = None if examples is None else read_examples(examples)
    with shared.working(json or quiet, "example"):
        found = check_model(
            before, after, model=model, input_shape=read_shape(input_shape), num_classes=classes, batch=own,
            loss=build_loss(loss),
        )  # fmt: skip
    if json:
        shared.print_json(asdict(found) | {"suspicious": found.suspicious})
    else:
        for finding in found.findings:
            typer.echo(f"{finding.kind}: {finding.text}")
        held = ", ".join(found.compared)
        count = len(found.findings)
        verdict = f"Suspicious: {count} finding{'s' * (count > 1)}." if found.suspicious else "Nothing suspicious."
        typer.echo(f"{verdict} The weights were held against {held}.")
    if found.suspicious:
        raise typer.Exit(SUSPICIOUS)
