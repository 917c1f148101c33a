"""The audit: train under each defence, attack what clients send, measure, judge."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from gradveil import pace
from gradveil.attacks.base import Attack, default_panel
from gradveil.attacks.search.matching import sending_norms
from gradveil.auditing.budget import Budget
from gradveil.auditing.certificates import certificate_rows, proof_rows
from gradveil.auditing.changes import change_rows
from gradveil.auditing.gate import GATED
from gradveil.auditing.run_folder import CHANGED, CONFIG, ROWS, FolderError, Row, RunFolder
from gradveil.auditing.update_files import load_weights
from gradveil.auditing.work import (
    NOT_TRIED,
    AttackRunner,
    Progress,
    Written,
    cut_short,
    film,
    last_snapshots,
    probe_defenses,
)
from gradveil.countermeasures import TIERS
from gradveil.data.base import Dataset
from gradveil.errors import AttackError, SpecError
from gradveil.files import wrap_parse_errors
from gradveil.protection.defense import Defense
from gradveil.registry import describe
from gradveil.threats.panel import Target, chunks, first_snapshot, last_resort, panel
from gradveil.threats.rows import PROVED, Line, lines, modality_rows
from gradveil.threats.setup import (
    DEFENSES,
    MINUTES,
    AuditConfig,
    build_setup,
    fitting_model,
    in_limited_time,
    is_busy,
    is_large,
    is_small,
    load_dataset,
    one_thread,
)
from gradveil.threats.trial import client_row, floors
from gradveil.threats.verdict import Verdict, headline, verdicts

OF_TEXT = (*GATED, "informed")  # servers that ids of tokens can be attacked by
LOG = logging.getLogger("gradveil")


@dataclass(frozen=True)
class Audit:
    """A finished audit: a run folder and what it says."""

    store: RunFolder

    @property
    def folder(self) -> Path:
        """Where the run is."""
        return self.store.path

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every measured row."""
        return self.store.rows

    @property
    def lines(self) -> list[Line]:
        """The rows gathered over images: one attack by one server on one defence in one round."""
        return lines(self.rows)

    @property
    def verdicts(self) -> list[Verdict]:
        """What a server gets of each defence, in words."""
        return verdicts(self.rows)

    @property
    def headline(self) -> str:
        """One sentence over the whole audit."""
        return headline(self.rows)


def audit(
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    dataset: str | Dataset | Callable[..., Any] | None = None,
    defenses: Sequence[str | Defense] | None = None,
    attacks: Sequence[str | Attack] | None = None,
    tiers: Sequence[str] | None = None,
    config: AuditConfig | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    written: Written | None = None,
) -> Audit:
    """Audit defences on a model and data set: ``audit(dataset="mnist", defenses=["pruning:share=0.9"])``.

    What is left out is as ``config`` has it, whose defaults are those of the command line. Model, data set, defences
    and attacks may be objects or functions in place of text. ``tiers`` are those of the servers: all by default,
    oblivious and knows alone where attacks are named. The run is written to ``out`` (default: a new folder under
    ``runs/``); with ``resume`` an earlier run in that folder is continued, and nothing is done twice.
    ``progress`` hears a stage, how much of it is done and of how much; ``written`` gets the run folder whenever attacks
    were written to it.
    """
    base = config or AuditConfig()
    if attacks is not None and not attacks:
        raise SpecError("An audit needs at least one attack, e.g. newton.")
    defended = {_text(d): d for d in (base.defenses if defenses is None else defenses)}
    attacked = {_text(a): a for a in (base.attacks if attacks is None else attacks)}
    source, began = dataset or base.dataset, pace.clock()
    with pace.Limit(pace.seconds_of(base.minutes)), one_thread(is_busy()):
        data = load_dataset(source, base.data)
        network = model or base.model or data.default_model
        has_ids = bool(data.modality.last) and defenses is None  # which some defences and servers cannot differentiate
        if has_ids and base.defenses == DEFENSES:
            defended = {d: d for d in DEFENSES if not d.startswith("representation")}
        usual = GATED if attacked else OF_TEXT if has_ids and not resume else TIERS
        chosen = replace(
            base,
            dataset=_text(source),
            model=_text(network),
            loss=data.fitting_loss(base.loss),
            defenses=tuple(defended),
            attacks=tuple(attacked),
            tiers=tuple(tiers or base.tiers or _begun_with(out if resume else None) or usual),
        )
        built = fitting_model(network, data, chosen.loss, chosen.seed, chosen.trains)
        if chosen.weights is not None:
            built = copy.deepcopy(built)
            load_weights(built, chosen.weights)
            chosen = replace(chosen, trained=bool(chosen.trained))
        if is_large(built) and chosen.minutes is None:
            chosen = replace(chosen, minutes=MINUTES)
            LOG.info("plan: %g minutes, since the network is large; --minutes sets another limit", MINUTES)
        if not attacked:
            suited = default_panel(built, chosen.planned, data.modality)
            suited = suited if chosen.minutes is None else in_limited_time(suited, data.input_shape)
            attacked = {spec: spec for spec in suited}
            chosen = replace(chosen, attacks=tuple(attacked))
        with pace.Limit(pace.seconds_of(chosen.minutes) - (pace.clock() - began)) as limit:
            scene = build_setup(chosen, data, copy.deepcopy(built).train(), defended, attacked)
            if limit.left <= 0:
                took = f"{pace.seconds_of(chosen.minutes) - limit.left:.0f} seconds"  # since the command began
                raise SpecError(f"Setting up took {took}, and the limit is {chosen.minutes:g} minutes. Give more.")
            with (
                RunFolder.start(out or default_folder(), chosen, resume, AuditConfig.FREE) as store,
                one_thread(is_small(built, data.input_shape)),
            ):
                check_rows(store)
                told, drawn = progress or (lambda stage, done, total: None), written or (lambda store: None)
                run_audit(AttackRunner(scene, store, told, drawn))
    return Audit(store)


def check_rows(store: RunFolder) -> None:
    """Raise, now and not after hours, where the rows of an earlier try cannot be judged."""
    with wrap_parse_errors(store.path / ROWS, FolderError, CHANGED):
        verdicts(store.rows)


def _begun_with(begun: str | Path | None) -> Sequence[str]:
    """Return the tiers of a run that is continued."""
    if begun is None or not (Path(begun) / CONFIG).is_file():
        return ()
    own: Sequence[str] = RunFolder(begun).settings.get("tiers", ())
    return own


def default_folder() -> Path:
    """Return a new place under ``runs/``."""
    return Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S}"


def run_audit(work: AttackRunner) -> None:
    """Do what is not done yet."""
    scene, store = work.scene, work.store
    if not store.done("truth"):
        modality = scene.dataset.modality
        rows, answers = floors(scene.truth, scene.public, modality=modality)
        pictures = {name: x.numpy() for name, x in {"truth": scene.truth.inputs, **answers}.items()}
        about = [client_row(scene.config.planned, sending_norms(scene.model), scene.model), *modality_rows(modality)]
        if scene.dataset.levels is not None:
            about.append({"kind": "levels", "black": scene.dataset.levels[0], "white": scene.dataset.levels[1]})
        proved = [row for defense in scene.defenses for row in proof_rows(scene, defense)]  # said of a stopped run, too
        store.add("truth", [*about, *rows, *proved, *change_rows(scene)], pictures)
    if scene.config.minutes is None:
        probe_defenses(scene, store)
        _all_of_it(work)
    else:
        Budget(work).run()
    skipped = [row for row in store.rows if row["kind"] == "skip" and not row.get("out_of_time")]
    late = any(row["kind"] == "skip" and row.get("out_of_time") for row in store.rows)
    if skipped and not late and not any(row["kind"] == "attack" for row in store.rows):
        raise AttackError(f"No attack could run: {skipped[0]['why']}")
    left = [defense for defense in scene.defenses if not store.done(f"promise/{defense}")]
    if left:
        film(work)
    seconds = min(scene.config.meter_seconds, pace.left() / 2)  # the last of its steps may take long
    if left and seconds > 0:
        for defense, rows in certificate_rows(scene, left, work.progress, seconds).items():
            known = any(row.get("certificate") in PROVED and row["defense"] == defense for row in store.rows)
            store.add(f"promise/{defense}", rows if known else [*proof_rows(scene, defense), *rows])


def _all_of_it(work: AttackRunner) -> None:
    """Train, then attack everything, in large pieces."""
    scene, store = work.scene, work.store
    store.drop([NOT_TRIED, *(row["unit"] for row in store.rows if cut_short(row))])
    planted = work.plant(scene.victims)
    if scene.trains:
        LOG.info("plan: %d rounds of training under %d defences", scene.config.rounds, len(scene.defenses))
    LOG.info("plan: all attacks on %d clients to their end; --minutes sets a limit", len(scene.victims))
    looks = [first_snapshot(scene), *(last_snapshots(scene, store, work.progress) if scene.trains else ())]
    _attack(work, panel(scene, [*looks, *planted]))
    _attack(work, last_resort(scene, looks[0], work.holding()))


def _attack(work: AttackRunner, wanted: dict[str, list[Target]]) -> None:
    """Attack all targets that were not attacked yet."""
    store = work.store
    pieces = [(f"attack/{a}/{i}", part) for a, targets in wanted.items() for i, part in enumerate(chunks(targets))]
    total, done = sum(len(part) for _, part in pieces), 0
    for unit, part in pieces:
        work.progress("attacks", done, total)
        if missing := work.left(part):
            work.attack(store.new(unit), missing)
        done += len(part)
    work.progress("attacks", done, total)


def _text(value: Any) -> str:
    """Return the spec of a method, or a name for a user's own object."""
    if isinstance(value, str):
        return value
    if isinstance(value, (Attack, Defense)):
        return describe(value) if hasattr(value, "spec_name") else repr(value)
    if isinstance(value, Dataset):
        return value.name
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__name__)}"
