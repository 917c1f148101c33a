"""``gradveil dossier``: the evidence of runs in one folder and one page that a privacy officer can file."""

from pathlib import Path

import typer

from gradveil.cli import shared
from gradveil.errors import SpecError, printable

CHANGED = 3


def command(
    inputs: list[Path] = typer.Argument(
        None,
        show_default="none",
        help="Folders of audits and training runs, JSON of plan and verify; with --check a dossier.",
    ),
    about: Path = typer.Option(
        None, help="TOML about the system; where there is no such file, it is made with its questions."
    ),
    out: Path = typer.Option(Path("dossier"), help="Folder of the dossier: new or empty."),
    key: Path = typer.Option(None, help="Ed25519 key in PEM: private to sign, public with --check."),
    check: bool = typer.Option(
        False, "--check", help="Say whether a dossier is as it was made; exit with 3 where not."
    ),
    json: shared.Json = False,
) -> None:
    """Write a dossier of runs, or check one."""
    from gradveil.files import write_atomically
    from gradveil.report import dossier as made

    if check:
        if not inputs or len(inputs) != 1:
            raise SpecError("--check takes the folder of one dossier: gradveil dossier --check dossier.")
        found = made.check(inputs[0], key)
        shared.print_json(found) if json else typer.echo(_words(found))
        raise typer.Exit(0 if found["intact"] else CHANGED)
    if about is not None and not about.exists():
        write_atomically(about, made.ABOUT.encode())
        raise SpecError(f"{about} did not exist and was made with its questions. Fill it in, and run this again.")
    if not inputs:
        raise SpecError("Give at least one run: gradveil dossier runs/audit plan.json --about about.toml.")
    told = made.dossier(inputs, out, about, key)
    if json:
        shared.print_json(told)
        return
    for title in told["missing"]:
        typer.echo(f"Missing: {title}.")
    typer.echo(f"Dossier: {out / made.PAGE} ({'signed' if key else 'not signed'})")


def _words(found: dict[str, object]) -> str:
    lines = [f"{what}: {printable(path)}" for what in ("changed", "missing", "added") for path in found[what]]  # type: ignore[attr-defined]
    lines.append(f"signature: {found['signature']}" + (f", key {found['key']}" if found["key"] else ""))
    return "\n".join([*lines, "The dossier is as it was made." if found["intact"] else "The dossier was changed."])
