"""Changes of a client under which a promise costs little, cheapest first, each with the noise planned for it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from typing import Any

from torch import nn

from gradveil.auditing.run_folder import Row
from gradveil.errors import GradveilError
from gradveil.federated.server import planned_run
from gradveil.federated.settings import ALL, HEAD, only_trained
from gradveil.privacy.plan import TWO_POINTS, Plan, PlannedRun, Tier, z_run_of
from gradveil.protection.defense import build
from gradveil.threats.setup import AuditSetup, fitting_model
from gradveil.tree import parameters, size

AS_IT_IS = "as it is"
PROMISE = "reconstruction"
PICTURES, ROWS = "scatter", "logistic"  # models of few trained numbers: on fixed features of pictures, on rows
LARGEST = 3 * 64**2  # numbers of an input for which fixed features are tried


@dataclass(frozen=True)
class Planned:
    """A client as it is planned, and what noise under the promise is to it."""

    run: PlannedRun
    parameters: int
    tier: Tier = "local"

    @property
    def plan(self) -> Plan:
        """The plan that keeps the promise."""
        return Plan(self.run, self.run.z(z_run_of(promise=PROMISE)), self.tier, self.parameters)

    @property
    def ratio(self) -> float:
        """The noise in a round's mean beside the largest signal; up to ``TWO_POINTS`` it is expected to cost little."""
        return self.plan.noise_to_signal or 0.0


Step = tuple[str, str, dict[str, Any], dict[str, Any]]  # what, how it is asked for, options of an audit, of ``Planned``


def change_rows(scene: AuditSetup) -> list[Row]:
    """Return the client as it is, and each change: planned alone, and together with those before it."""
    run = planned_run(scene.seeds, scene.clients, scene.config, build(f"veil:promise={PROMISE}"))
    now = Planned(run, size(parameters(scene.model)))
    rows = [_row(AS_IT_IS, "", now, now, {})]
    together, options = now, dict[str, Any]()
    for what, how, asked, changed in _steps(scene, now):
        smaller = changed.get("parameters", 0) <= together.parameters
        if asked.get("trains") == HEAD and scene.config.weights is None:
            smaller = False  # of weights that nobody trained, the last layer alone learns little
        alone, then = _changed(now, changed), _changed(together, changed) if smaller else None
        if alone is None and then is None:
            continue
        if then is not None and then.ratio < together.ratio:
            together, options = then, {**options, **asked}
        rows.append(_row(what, how, alone, together, options))
    return [*rows, *_more(now, together, options)]


def _words(asked: dict[str, Any]) -> str:
    said = {name: 0 if value is None else value for name, value in asked.items()}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in said.items())


def _steps(scene: AuditSetup, now: Planned) -> Iterator[Step]:
    """Yield what can be changed by a setting, and then what takes another system."""
    if now.run.steps > 1:
        longer = {n: getattr(now.run, n) * now.run.steps for n in ("rounds", "participations")}
        one = replace(now.run, batch_size=None, epochs=1, **longer)
        asked = {"batch_size": None, "epochs": 1, "rounds": longer["rounds"]}
        yield "all records in one local step, as many steps in all", _words(asked), asked, {"run": one}
    if (head := _fewer(scene, lambda: only_trained(copy.deepcopy(scene.model), HEAD))) is not None:
        what = "train the last layer of trained weights alone"
        yield what, f"--trains {HEAD}", {"trains": HEAD}, {"parameters": head}
    config, shape = scene.config, scene.dataset.input_shape
    what, features = ("train on fixed features", PICTURES) if len(shape) == 3 else ("train one layer", ROWS)
    if prod(shape) <= LARGEST and features != config.model.partition(":")[0]:
        few = _fewer(scene, lambda: fitting_model(features, scene.dataset, config.loss, config.seed))
        if few is not None:
            yield what, f"--model {features}", {"model": features, "trains": ALL}, {"parameters": few}
    yield "secure aggregation", "veil:tier=aggregate", {"tier": "aggregate"}, {"tier": "aggregate"}


def _fewer(scene: AuditSetup, make: Callable[[], nn.Module]) -> int | None:
    """Return how many numbers are trained of another model; None where it cannot be made, or there are no fewer."""
    with suppress(GradveilError, RuntimeError, ValueError):
        count = size(parameters(make()))
        return count if count < size(parameters(scene.model)) else None
    return None


def _changed(planned: Planned, changed: dict[str, Any]) -> Planned | None:
    """Return a plan with a change; None where it cannot be, as secure aggregation of several steps."""
    new = replace(planned, **changed)
    try:
        _ = new.plan
    except GradveilError:
        return None
    return new


def _more(now: Planned, together: Planned, options: dict[str, Any]) -> Iterator[Row]:
    """Yield how many more records, or clients, it takes on top of the settings."""
    times = ceil(together.ratio / TWO_POINTS - 1e-9)
    if times > 1:
        what = f"{times} times as many records a client"
        yield _row(what, "", _with_records(now, times), _with_records(together, times), options)
    cohort = together.plan.cheap_from or together.run.cohort
    if cohort > together.run.cohort:
        wide = {"run": replace(now.run, cohort=cohort)}
        large = replace(together, run=replace(together.run, cohort=cohort))
        yield _row(f"a cohort of {cohort:,} clients", "", _changed(now, wide), large, options)


def _with_records(planned: Planned, times: int) -> Planned:
    """Return a plan of more records; where all were in one step, they still are."""
    size = None if planned.run.steps == planned.run.epochs else planned.run.batch_size
    return replace(planned, run=replace(planned.run, records=times * planned.run.records, batch_size=size))


def _row(what: str, how: str, alone: Planned | None, together: Planned, options: dict[str, Any]) -> Row:
    ratios = {"alone": None if alone is None else alone.ratio, "together": together.ratio}
    said: Row = {"kind": "change", "what": what, "how": how, **ratios, "limit": TWO_POINTS, "options": dict(options)}
    is_setting = bool(how) or what == AS_IT_IS
    return said | {"by_settings": is_setting, "run": asdict(together.run), "tier": together.tier,
                   "parameters": together.parameters}  # fmt: skip
