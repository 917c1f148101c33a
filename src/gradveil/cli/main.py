"""``gradveil``: one file per command; torch is imported by the command that needs it, not before."""

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import click
import typer
from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.utils import get_params_from_function

from gradveil import __version__
from gradveil.cli.options import with_all
from gradveil.cli.watchdog import done, stopping, watched
from gradveil.errors import GradveilError, is_out_of_memory, own_place, printable
from gradveil.imports import OWN_CODE

# command -> one line of help; the module of gradveil.cli, or of gradveil_studies.cli, that has it is called like it
COMMANDS = {
    "audit": "Train, attack what the clients send, and say what an attacker gets.",
    "report": "Draw the report of a run again, or compare several runs.",
    "train": "Train with FedAvg, with any defence inside.",
    "check-model": "Check weights that a server sent before training at them.",
    "certify": "Bound what a reconstruction can reach, and say what the bound rests on.",
    "plan": "From a promise to the noise that keeps it, or from a configuration to what it buys.",
    "verify": "Measure a promise from outside, with canary records through the real pipeline.",
    "dossier": "Write the evidence of runs for a privacy officer to file, or check such a dossier.",
    "infer": "Read the classes and their representations off an update, as the paper does.",
    "reproduce": "Run the tables and figures of the paper, its numbers beside ours.",
    "leaderboard": "Rank every defence: what it costs, what its strongest server gets.",
    "play": "Open a playground in the browser: one example, one update, what servers rebuild.",
    "list": "Show every data set, model, defence, attack and metric with its settings.",
}
STUDIES = ("infer", "reproduce", "leaderboard", "play")

# what no program can do anything about: a disk that is full or read-only, no right, too many open files, no such folder
_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE, errno.ENFILE,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENOENT,
}  # fmt: skip
_LONGEST = 2000  # letters of a line that says what is wrong


class LazyGroup(TyperGroup):
    """Knows the commands by name; imports one only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(COMMANDS)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; one that says nothing better when it is stopped says that it was."""
        _begin()
        with stopping(""):
            try:
                return super().invoke(ctx)
            except SystemExit as end:  # commands end otherwise
                raise GradveilError(
                    f"{own_place(end)}code that this command ran called sys.exit({end.code!r}), so it was not done."
                ) from end

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a stand-in with the help line: for the list, and to complete a name."""
        return click.Command(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command itself: to run it, to show its help, or to complete its options."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and whole_command(found.name or ""), rest


def module_of(name: str) -> str:
    """Return the module of a command."""
    return f"{'gradveil_studies' if name in STUDIES else 'gradveil'}.cli.{name.replace('-', '_')}"


def whole_command(name: str) -> click.Command:
    """Import a command of the table; its help says every default and what every argument is."""
    try:
        command: Any = import_module(module_of(name)).command
    except ModuleNotFoundError as error:
        if error.name != "gradveil_studies":
            raise
        raise GradveilError(
            f"gradveil {name} is part of gradveil-studies. Install it: pip install gradveil-studies."
        ) from None
    app = typer.Typer(add_completion=False)
    app.command(name, help=COMMANDS[name])(command)
    found = typer.main.get_command(app)
    told = get_params_from_function(command)
    for param in found.params:
        if isinstance(param, TyperArgument):
            param.help = told[param.name].default.help  # click from 8.5 on drops what Typer was told
        if isinstance(param, TyperArgument | TyperOption) and param.show_default is True and not param.required:
            param.show_default = "none" if param.default in (None, "", []) else True
    return with_all(found, getattr(command, "first", None))


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"gradveil {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """What does a federated learning update leak, how do I stop it, and what can be promised?"""


def _begin() -> None:
    """Let the current folder be looked into for ``module:function`` alone, and any letter be printed."""
    try:
        os.environ[OWN_CODE] = os.getcwd()
    except FileNotFoundError:
        raise GradveilError("The current folder was removed. Change to one that is there.") from None


def _print_what_can_be() -> None:
    """Let a letter that the output's encoding has not become a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")


def program() -> None:
    """Run the command line in a process of its own, which is watched."""
    watched(entry) if hasattr(os, "fork") else entry()


def entry() -> None:
    """Run the command line; an error a user can mend is one line and exit code 2."""
    _print_what_can_be()
    try:
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        with suppress(BrokenPipeError):  # who read it has heard enough
            sys.stdout.flush()
        done(code)
        raise
    except GradveilError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a model's own code may raise any
        if is_out_of_memory(error):
            _fail(
                "The memory does not suffice. Give smaller data, a smaller model or --batch-size, or a larger machine."
            )
        if place := own_place(error, installed=False):
            _fail(f"{place}{type(error).__name__}: {error}")
        if not isinstance(error, OSError) or error.errno not in _REFUSALS:
            done(1)
            raise
        _fail(f"The system refuses: {error.strerror}{f' ({error.filename})' if error.filename else ''}.")


def _fail(why: str) -> NoReturn:
    typer.echo(f"gradveil: {printable(' '.join(why.split())[:_LONGEST])}", err=True)
    done(2)
    sys.exit(2)
