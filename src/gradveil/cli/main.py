"""``gradveil``: one file per command; torch is imported by the command that needs it, not before."""

import os
import sys
from importlib import import_module
from typing import Any

import click
import typer
from typer.core import TyperGroup

from gradveil import __version__
from gradveil.errors import GradveilError

# command -> (module under gradveil.cli and its function, one line of help)
COMMANDS = {
    "audit": ("audit:command", "Train, attack what the clients send, and say what an attacker gets."),
    "attack": ("attack:command", "Reconstruct the inputs behind one saved update."),
    "report": ("audit:report", "Draw the report of a run folder again."),
    "train": ("train:command", "Train with FedAvg, with any defence inside."),
    "infer": ("infer:command", "Read the classes and their representations off an update."),
    "check-model": ("check_model:command", "Check weights that a server sent before training at them."),
    "certify": ("certify:command", "Bound what a reconstruction can reach, and say what the bound rests on."),
    "plan": ("plan:command", "From a promise to the noise that keeps it, or from a configuration to what it buys."),
    "reproduce": ("reproduce:command", "Run the tables and figures of the paper, its numbers beside ours."),
    "leaderboard": ("leaderboard:command", "Rank every defence: what it costs, what its strongest server gets."),
    "list": ("list:command", "Show every data set, model, defence, attack and metric with its settings."),
}


class LazyGroup(TyperGroup):
    """Knows the commands by name; imports one only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; a stand-in with the help line where only the list is shown."""
        if cmd_name not in COMMANDS:
            return None
        place, line = COMMANDS[cmd_name]
        if ctx.resilient_parsing or "--help" in sys.argv[1:2] or len(sys.argv) < 2:
            return click.Command(cmd_name, help=line)
        module, _, function = place.partition(":")
        command: Any = getattr(import_module(f"gradveil.cli.{module}"), function)
        app = typer.Typer(add_completion=False)
        app.command(cmd_name, help=line)(command)
        return typer.main.get_command(app)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"gradveil {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """What does a federated learning update leak, how do I stop it, and what can be promised?"""
    sys.path.insert(0, os.getcwd())  # so that module:function finds the user's file


def entry() -> None:
    """Run the command line; an error a user can mend is one line and exit code 2."""
    try:
        app()
    except GradveilError as error:
        typer.echo(f"gradveil: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
