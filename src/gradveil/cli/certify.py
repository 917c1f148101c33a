"""``gradveil certify``: what can be promised about a model, some images and a defence, and on what it rests."""

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from gradveil import pace
from gradveil.cli import shared
from gradveil.cli.options import Given, Option, Output, takes
from gradveil.protection.defense import accounted, in_round
from gradveil.ranges import Count, Seed, check

if TYPE_CHECKING:
    from torch import Tensor

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
    shared.print_json(as_json(found)) if asked.json else show(found, Console())


def figures(asked: CertifyOptions) -> dict[str, Any]:
    """Compute everything that the command shows."""
    from gradveil.auditing.certificates import KINDS, layer_certificates, metered, promise_rows
    from gradveil.auditing.settings import find_device
    from gradveil.auditing.update_files import load_weights
    from gradveil.data import load
    from gradveil.federated.settings import Local
    from gradveil.losses import build as build_loss
    from gradveil.privacy.plan import PlannedRun
    from gradveil.protection.defense import build as build_defense
    from gradveil.representation.certify import readable_p
    from gradveil.representation.problem import blind_mse, largest_mse
    from gradveil.seeds import Seeds
    from gradveil.threats.setup import fitting_model
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
    chosen: Any = check_kinds(asked.kinds) or KINDS
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
            leaks.append(metered(model, one, defense, width, rng, public.prior, local=local))
    return {
        "model": asked.model,
        "dataset": asked.dataset,
        "defense": asked.defense,
        "p": asked.norm,
        "promises": layer_certificates(model, truth.to(at), defense, seeds("defense"), chosen, p, each=each),
        "leaks": leaks,
        "whole_run": promise_rows(asked.defense, defense, run, public.batch, truth.labels, public.choices),
        "largest": largest_mse(truth.inputs),
        "blind": blind_mse(truth.inputs, public.batch.inputs.mean(0)),
    }


def check_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds where all are known and can be shown for a defence alone."""
    from gradveil.errors import CertificateError, did_you_mean
    from gradveil.representation.certify import KINDS

    known = [k for k in KINDS if k != "residual"]
    for kind in kinds:
        if kind not in known:
            hint = did_you_mean(kind, known)
            raise CertificateError(f"--kind {kind!r} cannot be shown here. {hint}Give: {', '.join(known)}.")
    return kinds


def show(found: dict[str, Any], console: Console) -> None:
    """Print the tables, the context and the assumptions in words."""
    console.print(f"[bold]{found['defense']}[/bold] on {found['model']}, {found['dataset']}, p = {found['p']}\n")
    promised: list[LayerCertificate] = found["promises"]
    if promised:
        console.print(_promise_table(promised, found["largest"]))
        _state(console, promised)
    else:
        console.print("This defence perturbs no representation, so the theorem on r′ has nothing to say of it.\n")
    if found["whole_run"]:
        _show_promises(console, found["whole_run"])
    if found["leaks"]:
        console.print(_leak_table(found["leaks"]))
        console.print("")
        for sentence in found["leaks"][0][0].leak.assumptions if found["leaks"][0] else ():
            console.print(f"  [dim]- {sentence}[/dim]", highlight=False)
        console.print("")
    console.print(
        f"Beside every figure: the mean image has an MSE of {_span(found['blind'])}, and no image in the data range "
        f"can have more than {_span(found['largest'])}.",
        highlight=False,
    )


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
    for sentence in dict.fromkeys(text for row in rows for text in row["assumptions"]):
        console.print(f"  [dim]- {sentence}[/dim]", highlight=False)
    console.print("")


def _promise_table(promised: "list[LayerCertificate]", largest: "Tensor") -> Table:
    table = Table("layer", "kind", "proved", "MSE at least", "what it says", box=None, pad_edge=False)
    for promise in promised:
        c = promise.certificate
        if c is None:
            table.add_row(promise.layer, promise.kind, "-", "-", promise.reason)
            continue
        beyond = bool((c.to_mse() > largest).any()) and not c.sound
        note = promise.words() + (" It exceeds the largest MSE possible." if beyond else "")
        value = "no image" if bool(c.bound.isinf().all()) else _span(c.to_mse())
        table.add_row(promise.layer, promise.kind, "yes" if c.sound else "no", value, note)
    return table


def _state(console: Console, promised: "list[LayerCertificate]") -> None:
    console.print("\nWhat the figures rest on:")
    stated: dict[str, list[str]] = {}
    for promise in promised:
        for sentence in promise.certificate.assumptions if promise.certificate else ():
            kinds = stated.setdefault(sentence, [])
            if promise.kind not in kinds:
                kinds.append(promise.kind)
    for sentence, kinds in stated.items():
        console.print(f"  [dim]- ({', '.join(kinds)}) {sentence}[/dim]", highlight=False)
    console.print("")


def _leak_table(leaks: "list[list[ServerLeak]]") -> Table:
    import torch

    table = Table("whole update, server", "MSE at best", "before", "rank", "why", box=None, pad_edge=False)
    for name in dict.fromkeys(m.server for one in leaks for m in one):
        mine = [m for one in leaks for m in one if m.server == name]
        values = torch.tensor([m.leak.mse for m in mine])
        first = mine[0].leak
        rank = "-" if first.rank is None else f"{min(m.leak.rank or 0 for m in mine)} of {first.unknowns}"
        lows = [m.leak.low for m in mine if m.leak.low is not None]
        value = _span(values) + (f" (estimate; at 95 % {min(lows):.3g} or more)" if lows else "")
        value = "says nothing (no noise)" if any(m.leak.at_floor for m in mine) else value
        table.add_row(name, value, f"{first.prior_mse:.3g}", rank, mine[0].why)
    if not any(leaks):
        table.add_row("-", "-", "-", "-", "No server that knows this defence can be metered.")
    return table


def _span(values: "Tensor") -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def as_json(found: dict[str, Any]) -> dict[str, Any]:
    """Return plain data: lists, numbers, words; null where a number is not finite."""
    from gradveil.auditing.certificates import finite

    promised: list[LayerCertificate] = found["promises"]
    rows = []
    for promise in promised:
        row: dict[str, Any] = {"layer": promise.layer, "kind": promise.kind, "says": promise.words()}
        if (c := promise.certificate) is not None:
            row |= {"sound": c.sound, "bound": finite(c.bound), "mse": finite(c.to_mse()), "how": c.how}
            row |= {"assumptions": list(c.assumptions), "details": {k: finite(v) for k, v in c.details.items()}}
        rows.append(row)
    leaks = [
        [
            {
                "server": m.server, "why": m.why, "mse": m.leak.mse, "low": m.leak.low, "before": m.leak.prior_mse,
                "at_floor": m.leak.at_floor, "rank": m.leak.rank, "unknowns": m.leak.unknowns, "how": m.leak.how,
                "assumptions": list(m.leak.assumptions),
            }
            for m in one
        ]
        for one in found["leaks"]
    ]  # fmt: skip
    plain = {k: found[k] for k in ("model", "dataset", "defense", "p")}
    plain |= {"whole_run": found["whole_run"]} if found["whole_run"] else {}
    return plain | {
        "certificates": rows,
        "meter": leaks,
        "largest_mse": finite(found["largest"]),
        "mean_image_mse": finite(found["blind"]),
    }
