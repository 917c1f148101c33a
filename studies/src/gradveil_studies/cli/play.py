"""``gradveil play``: the playground in a browser, on this machine alone."""

import typer

from gradveil.cli import shared
from gradveil.cli.options import OWN


def command(
    dataset: str = typer.Option(None, help="A data set of your own beside those that are offered."),
    model: str = typer.Option(None, help=f"A network beside those that are offered: a model spec, {OWN}"),
    data: shared.Data = None,
    port: int = typer.Option(None, min=1, max=65535, show_default="a free one from 7860 on", help="On 127.0.0.1."),
) -> None:
    """Open the playground: rebuild an example from its update, live, and turn a defence up."""
    from gradveil_studies.play.page import HOST, Playground

    playground = Playground(dataset, model, data)
    typer.echo("gradveil: one example is rebuilt first, so that nobody waits for what torch sets up.", err=True)
    playground.warm_up()
    address = playground.launch(port)
    typer.echo(f"Playground: {address} (on {HOST} alone; Ctrl-C ends it)")
    playground.wait()
