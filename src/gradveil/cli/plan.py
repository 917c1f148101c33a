"""``gradveil plan``: the noise that a promise over a whole run needs, and what a given configuration really buys."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradveil.cli import shared
from gradveil.cli.options import Given, Option, Output, takes
from gradveil.errors import SpecError
from gradveil.ranges import Count, Whole
from gradveil.ranges import check as check_settings

if TYPE_CHECKING:
    from gradveil.modalities import Modality
    from gradveil.privacy.configurations import Bought
    from gradveil.privacy.plan import Plan

RUN, PROMISE = "The run", "The promise, one of these"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Output):
    """A run as it is planned, and the promise that it is to keep."""

    cohort: Annotated[Count, Option("Clients of a round.", RUN)] = 10
    clients: Annotated[Count | None, Option("Clients in all; they then take turns.", RUN, "the cohort")] = None
    records: Annotated[Count, Option("Records of a client.", RUN)] = 200
    batch_size: Annotated[Whole, Option("Records of a local step; 0: all of them.", RUN)] = 0
    epochs: Annotated[Count, Option(panel=RUN)] = 1
    rounds: Annotated[Count | None, Option(panel=RUN, default="100")] = None
    participations: Annotated[
        Count | None,
        Option("The most rounds that one client takes part in.", RUN, "all; with --clients their turns"),
    ] = None
    tier: Annotated[
        Literal["local", "aggregate"],
        Option("What the server sees: local, each update; aggregate, a round's sum.", RUN),
    ] = "local"
    lost: Annotated[float, Option("Share of the cohort that may drop out of a round; aggregate.", RUN)] = 0.0
    colluding: Annotated[float, Option("Share of the cohort that may work with the server; aggregate.", RUN)] = 0.0
    parameters: Annotated[Count | None, Option("Of the model, or give --model and --dataset.", RUN)] = None
    model: Annotated[str | None, Option(panel=RUN, default="none")] = None
    dataset: Annotated[
        str | None, Option("A data set by name: for the model's size and the floor on reconstructions.", RUN)
    ] = None
    data: Annotated[str | None, Option(panel=RUN)] = None
    rehearse: Annotated[
        bool, Option("Rehearse a linear head on fixed features with the test split: its rate, clip and cost.", RUN)
    ] = False
    promise: Annotated[str | None, Option("reconstruction or identification.", PROMISE, "reconstruction")] = None
    epsilon: Annotated[float | None, Option("ε over the whole run, at --delta.", PROMISE)] = None
    rho: Annotated[float | None, Option("ρ over the whole run, in nats.", PROMISE)] = None
    z: Annotated[float | None, Option("The noise multiplier of a release: what does it buy?", PROMISE)] = None
    delta: Annotated[float, Option("Of ε.")] = 1e-5
    guess: Annotated[float, Option("Chance of a blind guess that is to be bounded.")] = 0.01
    check: Annotated[Path | None, Option("A Flower, Opacus or NVFlare configuration: what does it buy?")] = None


FIRST = "promise epsilon z cohort clients records rounds tier model dataset check json"


@takes(PlanOptions, first=FIRST)
def command(given: Given) -> None:
    """Plan a run: from a promise to the noise and its expected cost, or from a configuration to what it buys."""
    asked, json = given.fill(PlanOptions()), given["json"]
    check_settings(asked)
    if asked.check is not None:
        _check(asked, json)
        return
    from gradveil.privacy.plan import Plan, PlannedRun, z_run_of

    count, cohort = asked.rounds or 100, asked.cohort
    participations = asked.participations
    if participations is None:
        participations = count if asked.clients is None else -(-count * cohort // asked.clients)
    run = PlannedRun(
        asked.records, asked.batch_size or None, asked.epochs, count, participations, cohort, asked.lost,
        asked.colluding,
    )  # fmt: skip
    promised: dict[str, Any] = given.named("promise", "epsilon", "rho", "z") or {"promise": "reconstruction"}
    if len(promised) > 1:
        raise SpecError(f"--{' and --'.join(promised)} each say how much noise there is. Give one of them.")
    if asked.epsilon is not None:
        promised["delta"] = asked.delta
    z = run.z(z_run_of(**promised)) if asked.z is None else asked.z
    with shared.working(json or given["quiet"], "class"):
        size, spectra, kind = _sizes(asked.parameters, asked.model, asked.dataset, asked.data)
    plan = Plan(run, z, asked.tier, size)
    found = figures(plan, spectra, asked.delta, asked.guess) | {"promise": promised}
    found["assumptions"] = [kind.own_words(text) for text in found["assumptions"]]
    if asked.rehearse:
        found["rehearsed"] = _rehearsed(plan, asked.model, asked.dataset, asked.data)
    shared.print_json(found) if json else typer.echo(kind.own_words(_words(plan, found)))


def _sizes(
    parameters: int | None, model: str | None, dataset: str | None, data: str | None
) -> tuple[int | None, Any, "Modality"]:
    """Return the number of parameters, the spectra of public examples by class, and what an example is."""
    from gradveil.modalities import IMAGE

    if model is not None and dataset is None:
        raise SpecError("--model needs --dataset for the size of its inputs. Or give --parameters.")
    if dataset is None:
        return parameters, None, IMAGE
    from gradveil.data import load
    from gradveil.privacy.plan import class_spectra
    from gradveil.threats.setup import fitting_model
    from gradveil.tree import parameters as weights
    from gradveil.tree import size

    source = load(dataset, data)
    if model is not None:
        parameters = size(weights(fitting_model(model, source, "cross_entropy", 0)))
    return parameters, list(class_spectra(source.test.batch(slice(None))).values()), source.modality


def _rehearsed(plan: "Plan", model: str | None, name: str | None, data: str | None) -> dict[str, Any]:
    """Return rate, clip and expected cost of a head on fixed features, with momentum 0.9 on the server."""
    from dataclasses import asdict

    from gradveil.auditing.train import FIT, rehearse_head
    from gradveil.data import load
    from gradveil.models import fit_to_public
    from gradveil.threats.setup import fitting_model

    if model is None or name is None:
        raise SpecError("--rehearse needs --model and --dataset.")
    source = load(name, data)
    public = source.test.batch(slice(0, FIT))
    network = fitting_model(model, source, "cross_entropy", 0)
    fit_to_public(network, public.inputs)
    return asdict(rehearse_head(network, public, source.num_classes, plan.run, plan.client_z, momentum=0.9))


def figures(plan: "Plan", spectra: Any, delta: float, guess: float) -> dict[str, Any]:
    """Return everything that the command shows."""
    from dataclasses import asdict

    from gradveil.privacy.accountant import AGGREGATE, ASSUMPTIONS, FLOOR, GUESS, THEOREM
    from gradveil.privacy.plan import TWO_POINTS, floor_share

    rests = [*ASSUMPTIONS, GUESS]
    rests += [AGGREGATE] if plan.tier == "aggregate" else []
    rests += [FLOOR] if spectra else []
    return {
        "run": asdict(plan.run),
        "tier": plan.tier,
        "z": plan.z,
        "client_z": plan.client_z,
        "whole_run": plan.account.figures(delta, guess)
        | {"floor": floor_share(plan.account, spectra) if spectra else None},
        "parameters": plan.parameters,
        "noise_to_signal": plan.noise_to_signal,
        "expected_under_two_points": None if plan.noise_to_signal is None else plan.noise_to_signal <= TWO_POINTS,
        "under_two_points_from_cohort": plan.cheap_from,
        "theorem": THEOREM,
        "assumptions": rests,
    }


def _words(plan: "Plan", found: dict[str, Any]) -> str:
    """Return one screen of plain words."""
    run, whole = plan.run, found["whole_run"]
    sees = "each client's update" if plan.tier == "local" else "only the sum of a round (secure aggregation)"
    lines = [
        f"{run.rounds} rounds, {run.cohort} clients each; a client takes part at most {run.participations} times, with "
        f"{run.records} records in steps of {run.slots}, {run.epochs} local epoch{'s' * (run.epochs > 1)}.",
        f"The server sees {sees}, knows all but one record, and may choose the weights.",
        "",
        f"noise        z = {plan.z:.4g} a release" + (
            f"; each client adds {plan.client_z:.4g} of its clip" if plan.tier == "aggregate" else " and client"
        ),
        f"whole run    z_run = {whole['z_run']:.3g}, μ = {whole['mu']:.3g}, ρ = {whole['rho']:.3g} nats, "
        f"ε = {whole['epsilon']:.3g} at δ = {whole['delta']:g}",
        f"guessing     a guess that is right with chance {whole['blind_guess']:g} becomes right with at most "
        f"{whole['guess']:.2g}",
    ]  # fmt: skip
    if whole["floor"] is not None:
        least = f"error at least {whole['floor']:.2f} of the blind guess's"
        lines.append(f"floor        for Gaussian images: {least}, on average")
    if found["promise"].get("promise") == "reconstruction":
        lines.append("             measured: no attack that was tried got nearer than a blind guess")
        lines.append("             proved for all images: the line on guessing")
    if found["promise"].get("promise") == "identification":
        lines.append("             a record was measured to be told from 100 candidates hardly better than by chance")
    if (said := found.get("rehearsed")) is None:
        lines.append(_cost(plan))
    else:
        cost = f"{said['lost']:.1f} points of accuracy [{said['low']:.1f}, {said['high']:.1f}]"
        lines.append(f"rehearsed    lr {said['lr']:g} and clip {said['clip']:g}: on drawn records it costs {cost};")
        lines.append("             real ones lost 2 to 4 points more in trials on digits")
    shares = "".join(f",{k}={getattr(run, k):g}" for k in ("lost", "colluding") if getattr(run, k))
    tier = f",tier=aggregate{shares}" if plan.tier == "aggregate" else ""
    spec = ",".join(f"{k}={v if isinstance(v, str) else format(v, '.6g')}" for k, v in found["promise"].items())
    elsewhere = "" if "z" in found["promise"] else f" where gradveil plans the run, else veil:z={plan.z:.6g}{tier}"
    lines += [f"defence      --defense veil:{spec}{tier}{elsewhere}", "", found["theorem"], "It rests on:"]
    return "\n".join(lines + [f"- {text}" for text in found["assumptions"]])


def _cost(plan: "Plan") -> str:
    from gradveil.privacy.plan import TWO_POINTS

    ratio = plan.noise_to_signal
    if ratio is None:
        return "cost         give --parameters, or --model with --dataset, for the noise-to-signal ratio"
    verdict = "under" if ratio <= TWO_POINTS else "more than"
    return (
        f"cost         noise to signal {ratio:.2g}: expected to cost {verdict} two points of accuracy "
        f"(up to {TWO_POINTS:g} in trials); under two from a cohort of {plan.cheap_from} on"
    )


def _check(asked: PlanOptions, json: bool) -> None:
    from gradveil.privacy.configurations import Told, check

    delta, guess = asked.delta, asked.guess
    assert asked.check is not None
    found = check(asked.check, Told(asked.rounds, asked.participations, delta))
    if json:
        shared.print_json({"file": str(asked.check), "mechanisms": [_bought(one, delta, guess) for one in found]})
        return
    typer.echo("\n\n".join(_bought_words(one, delta, guess) for one in found))


def _bought(one: "Bought", delta: float, guess: float) -> dict[str, Any]:
    whole = None if one.account is None else one.account.figures(one.details.get("delta", delta), guess)
    return {
        "what": one.what, "level": one.level, "against": one.against, "sigma": one.sigma, "mu_round": one.mu,
        "rho_round": None if one.mu is None else one.mu**2 / 2, "releases": one.releases, "whole_run": whole,
        "epsilon": one.epsilon, "notes": list(one.notes), **one.details,
    }  # fmt: skip


def _bought_words(one: "Bought", delta: float, guess: float) -> str:
    """Return one screen of plain words."""
    whole, delta = one.account, one.details.get("delta", delta)
    lines = [f"Found: {one.what}."]
    if whole is None and one.epsilon is None:
        lines.append("in short     it promises nothing.")
    else:
        lines.append(f"Protects one {one.level} from {one.against}.")
    if one.sigma is not None:
        lines.append(f"noise        σ = {one.sigma:.3g}")
    over = f"{one.releases or 1} round{'s' * ((one.releases or 1) > 1)}"
    if one.epsilon is not None:
        lines.append(f"{over:12} ε = {one.epsilon:,.3g} at δ = {delta:g} (secret Poisson batches)")
        over = "no sampling"
    if whole is not None and one.mu is not None:
        lines += [
            f"one round    μ = {one.mu:.3g}, ρ = {one.mu**2 / 2:.3g} nats",
            f"{over:12} z_run = {whole.z_run:.3g}, ρ = {whole.rho:.3g} nats, ε = {whole.epsilon(delta):.3g} at δ = "
            f"{delta:g}",
            f"guessing     {guess:g} becomes at most {whole.guess(guess):.2g}",
            f"in short     {'without the gain from sampling, ' if one.epsilon else ''}{_short(whole.z_run)}",
        ]
    return "\n".join([*lines, "", *(f"! {note}" for note in one.notes)])


def _short(z_run: float) -> str:
    """Return what a multiplier of the whole run amounts to."""
    from gradveil.privacy.plan import PROMISES

    if z_run >= PROMISES["identification"]:
        return "over the run neither pictures nor identities were got at this noise."
    if z_run >= PROMISES["reconstruction"]:
        return "over the run pictures were not got at this noise; records can be told from candidates."
    if z_run >= 0.1:
        return "over the run attacks were measured to get traces of pictures, and to identify records."
    return "over the run it stops no attack that was measured."
