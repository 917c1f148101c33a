"""``gradveil certify``: what can be promised about a model, some images and a defence, and on what it rests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from gradveil import pace
from gradveil.cli import shared
from gradveil.cli.options import Given, Option, Output, takes
from gradveil.protection.defense import accounted, in_round
from gradveil.ranges import Count, Seed, check

if TYPE_CHECKING:
    from gradveil.auditing.certificates import LayerCertificate, ServerLeak


@dataclass(frozen=True, kw_only=True)
class CertifyOptions(Output):
    """What is certified."""

    model: str = "lenet"
    dataset: str = "digits"
    data: str | None = None
    defense: str = "representation:share=0.4"
    weights: Annotated[str | None, Option("Safetensors: the model's trained weights.", "", "drawn from the seed")] = (
        None
    )
    kinds: Annotated[
        tuple[str, ...],
        Option("local, global, box, reach or empirical; repeat for several.", "", "those that fit"),
    ] = ()
    loss: str = "cross_entropy"
    norm: Annotated[str, Option("The norm of the distance: 1, 2 or inf.")] = "2"
    images: Annotated[Count, Option("Images of the training split that are certified.")] = 4
    meter: Annotated[bool, Option("Meter the whole update as well.")] = True
    participations: Annotated[Count, Option("Rounds that a client takes part in: for accounted noise.")] = 1
    cohort: Annotated[Count, Option("Clients of a round: for tier=aggregate.")] = 1
    seed: Seed = 0
    device: str = "cpu"


@takes(CertifyOptions, first="model dataset defense weights kind images meter participations json")
def command(given: Given) -> None:
    """Certify a defence: how far from the truth must a reconstruction be, and who is not bound by that?"""
    asked = given.fill(CertifyOptions())
    check(asked)
    with shared.working(asked.json or asked.quiet, "certify"):
        found = figures(asked)
    shared.print_json(found) if asked.json else show(found, Console())


def figures(asked: CertifyOptions) -> dict[str, Any]:
    """Compute everything that the command shows: lists, numbers and words."""
    from gradveil.auditing.certificates import KINDS, layer_certificates, metered, promise_rows
    from gradveil.auditing.update_files import load_weights
    from gradveil.data import load
    from gradveil.federated.settings import Local
    from gradveil.losses import build as build_loss
    from gradveil.privacy.plan import PlannedRun
    from gradveil.protection.defense import build as build_defense
    from gradveil.representation.certify import readable_p
    from gradveil.representation.problem import blind_mse, largest_mse
    from gradveil.seeds import Seeds
    from gradveil.threats.setup import find_device, fitting_model
    from gradveil.threats.trial import RANK, Public

    at = find_device(asked.device)
    seeds, p, defense = Seeds(asked.seed), readable_p(asked.norm), build_defense(asked.defense)
    source = load(asked.dataset, asked.data)
    model = fitting_model(asked.model, source, asked.loss, seeds.number("weights"))
    if asked.weights is not None:
        load_weights(model, asked.weights)
    model.eval().to(at)
    truth = source.train.sample(asked.images, seeds("images"))
    public = Public.draw(source, seeds("public"), RANK if asked.meter else None).to(at)
    run = PlannedRun(1, None, 1, asked.participations, asked.participations, asked.cohort)
    defense = in_round(accounted(defense).for_run(run), model, public.batch.to(at), build_loss(asked.loss))
    check_kinds(asked.kinds, KINDS)
    chosen: Any = asked.kinds or KINDS
    steps, leaks = count(), []
    total = len(defense.layers(model)) * len(chosen) + asked.meter * len(truth)

    def each() -> None:
        pace.step(next(steps), total)

    if asked.meter:
        for i in range(len(truth)):
            each()
            rng = seeds("meter", i)
            one = truth[i : i + 1].to(at)
            width, local = source.outputs(asked.loss), Local(loss=asked.loss)
            leaks.append([_leak_row(m) for m in metered(model, one, defense, width, rng, public.prior, local=local)])
    promised = layer_certificates(model, truth.to(at), defense, seeds("defense"), chosen, p, each=each)
    whole = promise_rows(asked.defense, defense, run, public.batch, truth.labels, public.choices)
    found = {"model": asked.model, "dataset": asked.dataset, "defense": asked.defense, "p": asked.norm}
    return found | ({"whole_run": whole} if whole else {}) | {
        "certificates": [_certificate_row(one) for one in promised],
        "meter": leaks,
        "largest_mse": largest_mse(truth.inputs).tolist(),
        "mean_image_mse": blind_mse(truth.inputs, public.batch.inputs.mean(0)).tolist(),
    }  # fmt: skip


def _certificate_row(one: "LayerCertificate") -> dict[str, Any]:
    row: dict[str, Any] = {"layer": one.layer, "kind": one.kind, "says": one.words()}
    if (c := one.certificate) is not None:
        row |= {"sound": c.sound, "bound": c.bound.tolist(), "mse": c.to_mse().tolist(), "how": c.how}
        row |= {"assumptions": list(c.assumptions), "details": {k: v.tolist() for k, v in c.details.items()}}
    return row


def _leak_row(metered: "ServerLeak") -> dict[str, Any]:
    leak = metered.leak
    return {
        "server": metered.server, "why": metered.why, "mse": leak.mse, "low": leak.low, "before": leak.prior_mse,
        "at_floor": leak.at_floor, "rank": leak.rank, "unknowns": leak.unknowns, "how": leak.how,
        "assumptions": list(leak.assumptions),
    }  # fmt: skip


def check_kinds(kinds: tuple[str, ...], known: Sequence[str]) -> None:
    """Raise where a kind is not known, or cannot be shown for a defence alone."""
    from gradveil.errors import CertificateError, did_you_mean

    for kind in kinds:
        if kind not in known:
            hint = did_you_mean(kind, known)
            raise CertificateError(f"--kind {kind!r} cannot be shown here. {hint}Give: {', '.join(known)}.")


def show(found: dict[str, Any], console: Console) -> None:
    """Print the tables, the context and the assumptions in words."""
    console.print(f"[bold]{found['defense']}[/bold] on {found['model']}, {found['dataset']}, p = {found['p']}\n")
    if promised := found["certificates"]:
        console.print(_promise_table(promised, found["largest_mse"]))
        _state(console, promised)
    else:
        console.print("This defence perturbs no representation, so the theorem on r′ has nothing to say of it.\n")
    if "whole_run" in found:
        _show_promises(console, found["whole_run"])
    if leaks := found["meter"]:
        console.print(_leak_table(leaks))
        console.print("")
        _say(console, leaks[0][0]["assumptions"] if leaks[0] else ())
    console.print(
        f"Beside every figure: the mean image has an MSE of {_span(found['mean_image_mse'])}, and no image in the data "
        f"range can have more than {_span(found['largest_mse'])}.",
        highlight=False,
    )


def _say(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(f"  [dim]- {sentence}[/dim]", highlight=False)
    console.print("")


def _show_promises(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print what accounted noise promises, the theorem and what it rests on."""
    table = Table("accounted noise", "of", "MSE at least", "what it says", box=None, pad_edge=False)
    of: dict[tuple[str, str, str], list[str]] = {}  # one update may be the whole run
    for row in rows:
        value = "-" if row["mse"] is None else f"{row['mse']:.3g}"
        of.setdefault((row["certificate"], value, row["says"]), []).append(row["layer"])
    for (name, value, says), layers in of.items():
        table.add_row(name, ", ".join(layers), value, says)
    console.print(table)
    console.print("")
    _say(console, dict.fromkeys(text for row in rows for text in row["assumptions"]))


def _promise_table(promised: list[dict[str, Any]], largest: list[float]) -> Table:
    table = Table("layer", "kind", "proved", "MSE at least", "what it says", box=None, pad_edge=False)
    for row in promised:
        if "mse" not in row:
            table.add_row(row["layer"], row["kind"], "-", "-", row["says"])
            continue
        beyond = not row["sound"] and any(mse > most for mse, most in zip(row["mse"], largest, strict=True))
        note = row["says"] + (" It exceeds the largest MSE possible." if beyond else "")
        value = "no image" if all(bound == inf for bound in row["bound"]) else _span(row["mse"])
        table.add_row(row["layer"], row["kind"], "yes" if row["sound"] else "no", value, note)
    return table


def _state(console: Console, promised: list[dict[str, Any]]) -> None:
    console.print("\nWhat the figures rest on:")
    stated: dict[str, dict[str, None]] = {}  # by sentence: the kinds, each once
    for row in promised:
        for sentence in row.get("assumptions", ()):
            stated.setdefault(sentence, {})[row["kind"]] = None
    _say(console, (f"({', '.join(kinds)}) {sentence}" for sentence, kinds in stated.items()))


def _leak_table(leaks: list[list[dict[str, Any]]]) -> Table:
    table = Table("whole update, server", "MSE at best", "before", "rank", "why", box=None, pad_edge=False)
    for name in dict.fromkeys(row["server"] for one in leaks for row in one):
        mine = [row for one in leaks for row in one if row["server"] == name]
        first = mine[0]
        rank = "-" if first["rank"] is None else f"{min(row['rank'] or 0 for row in mine)} of {first['unknowns']}"
        lows = [row["low"] for row in mine if row["low"] is not None]
        value = _span([row["mse"] for row in mine])
        value += f" (estimate; at 95 % {min(lows):.3g} or more)" if lows else ""
        value = "says nothing (no noise)" if any(row["at_floor"] for row in mine) else value
        table.add_row(name, value, f"{first['before']:.3g}", rank, first["why"])
    if not any(leaks):
        table.add_row("-", "-", "-", "-", "No server that knows this defence can be metered.")
    return table


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
