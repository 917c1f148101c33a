"""All that can be promised about one model, some images and one defence, gathered for a table or a report."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Generator, Tensor, nn

from gradveil.auditing.run_folder import Row
from gradveil.auditing.train import FIT, TrainConfig, with_model
from gradveil.countermeasures import Countermeasure
from gradveil.data import load
from gradveil.data.partition import deal
from gradveil.errors import CertificateError, GradveilError
from gradveil.federated.server import planned_run
from gradveil.federated.settings import Local
from gradveil.federated.simulate import public_records
from gradveil.models import fit_to_public
from gradveil.modules import representation
from gradveil.pace import OutOfTime
from gradveil.privacy.accountant import AGGREGATE, ASSUMPTIONS, FLOOR, GUESS, THEOREM, Account
from gradveil.privacy.plan import PlannedRun, class_spectra, floor_share
from gradveil.protection.defense import Defense, accounted, build
from gradveil.representation.certify import certify
from gradveil.representation.problem import SCOPE, Certificate, Kind
from gradveil.seeds import Seeds
from gradveil.threats.meter import ASSUMPTIONS as OF_METER
from gradveil.threats.meter import Leak, leak_meter, nothing
from gradveil.threats.panel import rounds_seen
from gradveil.threats.setup import AuditSetup, find_device, fitting_model
from gradveil.threats.trial import observe
from gradveil.types import Batch, GaussianPrior
from gradveil.verification.pipelines import Federated, OfDefense, Protected, of_kind
from gradveil.verification.verify import verify

DELTA = 1e-5


def promise_rows(
    name: str, defense: Defense, run: PlannedRun, public: Batch, labels: Tensor, choices: int, patient: int = 0
) -> list[Row]:
    """Return a row for floor and guess each, of one update and of the whole run; none where nothing is promised.

    ``labels`` are of the records that are looked at: the floor is that of their classes. ``choices``: candidates that
    a record stands among. ``patient``: how many updates of a client a multi-round server has.
    """
    built = accounted(accounted(defense).for_run(run))
    cost = built.cost(run.epochs)
    if cost is None:
        return []
    spectra = class_spectra(public)
    size = public.inputs[0].numel()
    classes = [0] * len(labels) if labels.is_floating_point() or labels.ndim > 1 else labels.tolist()
    known = all(label in spectra for label in classes)
    blind = sum(float(spectra[label].sum()) for label in classes) / len(classes) / size if known else 0.0
    alone = not built.min_clients  # each update is released by itself: attacks on it are bound
    looks: list[tuple[str, int, Sequence[str]]] = [("the whole run", run.participations, ())]
    if alone and patient:
        looks.insert(0, (f"{patient} updates", patient, ("multi-round",)))
    if alone:
        looks.insert(0, ("one update", 1, ("oblivious", "adaptive", "malicious")))
    rests = [THEOREM, *ASSUMPTIONS, *([] if alone else [AGGREGATE])]
    rows = []
    for what, times, tiers in looks:
        account = Account(what, spent=times * cost)
        head = {"kind": "certificate", "defense": name, "layer": what, "sound": True}
        share = floor_share(account, [spectra[label] for label in classes]) if known and blind else None
        rows.append(head | {
            "certificate": "floor", "mse": None if share is None else share * blind, "tiers": list(tiers),
            "assumptions": [*rests, FLOOR],
            "says": _floor_words(account, share),
        })  # fmt: skip
        guess = account.guess(1 / choices) if choices > 1 else None
        also = ["informed"] if times == 1 and tiers else []
        rows.append(head | {
            "certificate": "guess", "mse": None, "chance": guess, "tiers": [*tiers, *also],
            "assumptions": [*rests, GUESS], "says": _guess_words(account, choices, guess),
        })  # fmt: skip
    return rows


def _floor_words(account: Account, share: float | None) -> str:
    if share is None:
        return "Not computed: too few public examples of these classes."
    least = f"no server's error would be below {share:.2f} of the blind guess's"
    return f"z_run = {account.z_run:.3g}: were images Gaussian, {least} on average."


def _guess_words(account: Account, choices: int, guess: float | None) -> str:
    also = f"ε = {account.epsilon(DELTA):.3g} at δ = {DELTA:g}."
    if guess is None:
        return also
    return f"One of {choices} candidates is picked rightly with a chance of at most {guess:.2g}; {also}"


TRIALS = 32  # with 32 canaries each: some seconds, and an interval of about ±0.13 at μ = 1
SAYS = (
    "Canary records were put in or left out by coins, in one step of a simulated client at the weights that training "
    "begins with; directions of other records, other weights and channels beside the updates are not looked at."
)


def figures(
    defense: Defense, model: nn.Module, like: Batch, public: Batch | None, loss: str, lr: float, seed: int
) -> dict[str, Any]:
    """Return μ of one release as it was measured at these weights, and its interval, for a row.

    Of a cohort's sum, one client's records with the noise of the whole sum are looked at. Empty where nothing is
    promised; why where it failed.
    """
    if accounted(defense).cost(1) is None:
        return {}
    alone = accounted(defense).single_client() if accounted(defense).min_clients else defense
    settings: dict[str, Any] = {"loss": loss, "public": public, "rounds": 1, "lr": lr}
    try:
        pipeline: OfDefense = (
            Federated(alone, seed=seed, **settings) if like.inputs.is_floating_point() else Protected(alone, **settings)
        )
        found = verify(pipeline, model, like.inputs, like.labels, trials=TRIALS, seed=seed, loss=loss, grain=False)
    except (GradveilError, RuntimeError, ValueError) as error:  # what cannot be measured stops no run
        return {"why": " ".join(str(error).split())[:200]}
    e = found.estimate
    numbers = {"mu_proved": found.promised, "mu_measured": e.mu, "low": e.low, "high": e.high}
    return numbers | {"verdict": found.verdict, "reasons": found.reasons}


def of_run(config: TrainConfig) -> dict[str, Any]:
    """Return the figures of a training run before it begins: of its defence with the noise that its plan needs."""
    dataset = load(config.dataset, config.data)
    config = replace(with_model(config, dataset), loss=dataset.fitting_loss(config.loss))
    seeds, defense = Seeds(config.seed), build(config.defense)
    clients = deal(dataset, config.partition, seeds("partition"))
    model = fitting_model(config.model, dataset, config.loss, config.seed, config.trains).to(find_device(config.device))
    public = public_records(dataset, clients, seeds, FIT)
    some = dataset.train.batch(public) if len(public) else dataset.test.batch(slice(0, FIT))
    fit_to_public(model, some.inputs)
    first = next(model.parameters())
    some = of_kind(Batch(some.inputs.to(first.device), some.labels.to(first.device)), dataset.modality)
    planned = accounted(defense).for_run(planned_run(seeds, clients, config, defense))
    return figures(planned, model, some, some, config.loss, config.lr_of(1), config.seed)


def in_words(found: dict[str, Any]) -> str:
    """Return one sentence on these figures."""
    if "why" in found:
        return f"Not measured: {found['why']}"
    numbers = f"μ = {found['mu_measured']:.2g} [{found['low']:.2g}, {found['high']:.2g}]"
    return f"{numbers} measured of one release, {found['mu_proved']:.2g} proved: {found['verdict']}."


KINDS: tuple[Kind, ...] = ("local", "global", "box", "reach", "empirical")


@dataclass(frozen=True)
class LayerCertificate:
    """One certificate of one defended layer, or why there is none."""

    layer: str
    kind: Kind
    certificate: Certificate | None
    reason: str = ""  # where there is none

    def words(self) -> str:
        """Return what the figure says, in one sentence."""
        c = self.certificate
        if c is None:
            return self.reason
        low = float(c.to_mse().min())
        if c.kind == "local":
            return "The paper's figure: a first-order estimate, not a certificate."
        if c.kind == "empirical":
            residual = float(c.details["residual"].mean())
            return f"What an inversion of r′ reaches; it leaves a residual of {residual:.3g}."
        if c.kind == "reach" and bool(c.details["unreachable"].all()):
            least, away = (float(c.details[k].min()) for k in ("least_residual", "distance"))
            return f"No image has r′: the best still misses it by {least:.3g} (the true image by {away:.3g})."
        return f"Every image that has r′ is at an MSE of at least {low:.3g}."


def layer_certificates(
    model: nn.Module,
    batch: Batch,
    defense: Defense,
    rng: Generator,
    kinds: Sequence[Kind] = KINDS,
    p: float = 2,
    each: Callable[[], None] = nothing,
) -> list[LayerCertificate]:
    """Return a certificate of every kind for each layer that the defence perturbs; none where it perturbs none.

    ``each`` is called before each of them.
    """
    found = []
    for layer in defense.layers(model):
        r = representation(model, layer, batch.inputs)
        perturbed = defense.perturb(model, layer, batch.inputs, r, rng).flatten(1)
        for kind in kinds:
            each()
            try:
                certificate = certify(model, layer, batch.inputs, perturbed, p, kind, rng=rng)
                found.append(LayerCertificate(layer, kind, certificate))
            except CertificateError as error:
                found.append(LayerCertificate(layer, kind, None, str(error)))
    return found


@dataclass(frozen=True)
class ServerLeak:
    """The leak of one image's update to one server."""

    server: str  # the countermeasure's name
    why: str
    leak: Leak


def metered(
    model: nn.Module,
    truth: Batch,
    defense: Defense,
    num_classes: int,
    rng: Generator,
    prior: GaussianPrior | None = None,
    each: Callable[[], None] = nothing,
    lr: float | None = None,
    local: Local | None = None,
    servers: Sequence[Countermeasure] | None = None,
) -> list[ServerLeak]:
    """Return what the update of these examples leaks to every server that knows the defence.

    Only servers whose knowledge shows in what they see (dropped tensors, masks, noise levels, a simulated defence)
    can be metered: one that merely switches to another attack sees the same numbers. ``each`` is called before each
    step of a reading. ``lr`` and ``local``: see ``observe``. ``servers``: in place of those that the defence declares.
    """
    seen = observe(model, truth, defense, rng, num_classes, prior, lr, with_labels=True, local=local)
    found = []
    for known in defense.servers(model) if servers is None else servers:
        view = known.view(seen)
        if view is seen and known.name != "plain":
            continue
        found.append(ServerLeak(known.name, known.why, leak_meter(view, truth, prior, rng=rng, each=each)))
    return found


AT_FLOOR = "Says nothing: no noise limits what this server gets."
AUDITED: tuple[Kind, ...] = ("local", "global")
MOST = 8  # clients that the leak meter reads


@dataclass
class _Promises:
    """What is known of one defence so far."""

    certificates: list[LayerCertificate]
    leaks: dict[str, list[Leak]] = field(default_factory=dict)  # by server
    clients: int = 0  # that were read
    error: str = ""  # why it cannot be read


def certificate_rows(
    scene: AuditSetup,
    defenses: Sequence[str],
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    seconds: float | None = None,
) -> dict[str, list[Row]]:
    """Return for each defence the certificates of the layers it perturbs and the leak meter's readings, as rows.

    Within ``seconds`` (default: ``meter_seconds``), give or take a step: the certificates, then one client under every
    defence, then the next client. What was not measured by then has a row that says so.
    """
    clients, done = scene.victims[:MOST], 0
    seconds = scene.config.meter_seconds if seconds is None else seconds
    end, over = time.monotonic() + seconds, f"the time limit of {round(seconds, 1):g} s was reached"
    found = {defense: _Promises(_unknown(scene, defense, f"Not measured: {over}.")) for defense in defenses}

    def each() -> None:
        progress("leak meter", done, len(found) * (1 + len(clients)))
        if time.monotonic() > end:
            raise OutOfTime

    def read(defense: str, client: int | None) -> None:
        mine = found[defense]
        try:
            if client is None:
                mine.certificates = _certificates(scene, defense, each)
            elif not mine.error:
                for one in _readings(scene, defense, client, each):
                    mine.leaks.setdefault(one.server, []).append(one.leak)
                mine.clients += 1
        except (GradveilError, RuntimeError, ValueError) as error:  # what cannot be read does not stop the audit
            mine.error = f"Not read: {' '.join(str(error).split())[:200]}"
            mine.certificates = [] if client is None else mine.certificates

    with suppress(OutOfTime):
        for client in (None, *clients):
            for defense in defenses:
                read(defense, client)
                done += 1
        each()
    said = scene.dataset.modality.own_words
    return {
        defense: [
            row | {"says": said(row["says"]), "assumptions": [said(text) for text in row["assumptions"]]}
            for row in _measured(scene, defense) + _rows(defense, mine, len(clients), over)
        ]
        for defense, mine in found.items()
    }


def proof_rows(scene: AuditSetup, defense: str) -> list[Row]:
    """Return what accounted noise promises over the run that is audited."""
    built, patient = scene.defenses[defense], rounds_seen(scene) if "multi-round" in scene.tiers else 0
    run = planned_run(scene.seeds, scene.clients, scene.config, built)
    public = scene.public.batch
    try:
        rows = promise_rows(defense, built, run, public, scene.truth.labels, scene.public.choices, patient)
    except GradveilError as error:  # what cannot be promised does not stop the audit
        row: Row = {"kind": "certificate", "defense": defense, "layer": "the whole run", "certificate": "floor"}
        return [row | {"mse": None, "sound": False, "tiers": [], "assumptions": [], "says": str(error)}]
    said = scene.dataset.modality.own_words
    return [r | {"says": said(r["says"]), "assumptions": [said(text) for text in r["assumptions"]]} for r in rows]


def _measured(scene: AuditSetup, defense: str) -> list[Row]:
    built = scene.defenses[defense]
    try:
        run = planned_run(scene.seeds, scene.clients, scene.config, built)
        return measured_rows(scene, defense, accounted(built).for_run(run))
    except GradveilError:  # said where the promise is worked out
        return []


def measured_rows(scene: AuditSetup, name: str, defense: Defense) -> list[Row]:
    """Return the row of the measured μ; none where nothing is promised."""
    config, public = scene.config, of_kind(scene.public.batch, scene.dataset.modality)
    found = figures(defense, scene.model, public, public, config.loss, config.lr_of(1), config.seed)
    if not found:
        return []
    row: Row = {"kind": "certificate", "defense": name, "layer": "one release", "certificate": "measured", "mse": None}
    said = {"sound": False, "tiers": [], "assumptions": [SAYS], "says": in_words(found)}
    return [row | said | found]


def _unknown(scene: AuditSetup, defense: str, reason: str) -> list[LayerCertificate]:
    layers = scene.defenses[defense].layers(scene.model)
    return [LayerCertificate(layer, kind, None, reason) for layer in layers for kind in AUDITED]


def _certificates(scene: AuditSetup, defense: str, each: Callable[[], None]) -> list[LayerCertificate]:
    built, rng = scene.acting(defense, scene.model), scene.seeds("promise", defense)
    return layer_certificates(scene.model, scene.truth.to(scene.device), built, rng, AUDITED, each=each)


def _readings(scene: AuditSetup, defense: str, client: int, each: Callable[[], None]) -> list[ServerLeak]:
    rng = scene.seeds("defense", defense, "first", client)
    truth, classes = scene.held_by(client).to(scene.device), scene.num_classes
    lr, built, probed = scene.config.lr_of(1), scene.acting(defense, scene.model), scene.probed(defense)
    if probed.errors:
        raise CertificateError(f"its declaration is wrong ({probed.errors[0].rstrip('.')}), so no figure rests on it.")
    if scene.dataset.modality.is_share:
        raise CertificateError("it takes examples for Gaussian, which categories and words are not.")
    servers = scene.countermeasures(defense, scene.model) or built.servers(scene.model)
    return metered(
        scene.model, truth, built, classes, rng, scene.public.prior,
        each=each, lr=lr, local=scene.config, servers=servers,
    )  # fmt: skip


def _rows(defense: str, mine: _Promises, clients: int, over: str) -> list[Row]:
    """Return a row for each certificate, and for each server the mean reading over the clients."""
    rows = [_certificate_row(defense, one) for one in mine.certificates]
    for server, leaks in mine.leaks.items():
        mse, low = (math.fsum(v) / len(leaks) for v in ([k.mse for k in leaks], [k.low or k.mse for k in leaks]))
        at_floor = any(leak.at_floor for leak in leaks)
        said = AT_FLOOR if at_floor else "No server gets under this on average, to first order."
        if low < mse and not at_floor:
            said += f" Estimated by random probes: at 95 % the figure is at least {low:.3g}."
        if mine.clients < clients and not mine.error:
            said += f" Of {mine.clients} of {clients} clients: {over}."
        rows.append(_meter_row(defense, server, None if at_floor else mse, said))
    if mine.error:
        rows.append(_meter_row(defense, "", None, mine.error))
    elif not mine.clients:
        rows.append(_meter_row(defense, "", None, f"Not measured: {over}."))
    elif not mine.leaks:
        rows.append(_meter_row(defense, "", None, "No server that knows this defence can be metered."))
    return rows


def _certificate_row(defense: str, one: LayerCertificate) -> Row:
    row = {"kind": "certificate", "defense": defense, "layer": one.layer, "certificate": one.kind, "says": one.words()}
    if one.certificate is None:
        return row | {"mse": None, "sound": False, "assumptions": []}
    assumptions = [text for text in one.certificate.assumptions if text != SCOPE] + [SCOPE]
    mse = float(one.certificate.to_mse().mean())
    return row | {"mse": mse, "sound": one.certificate.sound, "assumptions": assumptions}


def _meter_row(defense: str, server: str, mse: float | None, says: str) -> Row:
    row = {"kind": "meter", "defense": defense, "server": server, "mse": mse, "says": says}
    return row | {"assumptions": [] if mse is None else list(OF_METER)}
