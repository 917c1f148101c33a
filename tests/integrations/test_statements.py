"""A run can demand a defence: replies say what was done, and those that say something else, or nothing, are refused."""

from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from gradveil.errors import SpecError
from gradveil.integrations.flower.app import make_client_app, serve
from gradveil.integrations.flower.checks import CheckedGrid, checked
from gradveil.integrations.flower.mods import guard_mod
from gradveil.integrations.flower.settings import FlowerSettings
from gradveil.integrations.flower.site import STATEMENT
from gradveil.types import Batch
from integrations.flower_parts import Halved, Nodes, client_app, context, linear_model, message

SPEC = "representation:share=0.3"


def settings(**changes: Any) -> FlowerSettings:
    own = {"partition": "iid:devices=3,per_device=6", "clients": 3, "rounds": 1, "model": "logistic", "defense": SPEC}
    return FlowerSettings(**own | changes)


def nodes(run: FlowerSettings, sites: list[dict[str, Any]]) -> Nodes:
    """A node for each device, with the site's own settings."""
    app = make_client_app(run)

    def answer(device: int, site: dict[str, Any]):  # type: ignore[no-untyped-def]
        state = RecordDict()
        return lambda msg: app(msg, Context(1, 0, {"partition-id": device} | site, state, {}))

    return Nodes({device + 10: answer(device, site) for device, site in enumerate(sites)})


@pytest.mark.parametrize(
    ("demand", "site", "accepted", "rejected", "stated"),
    [
        ("", {}, 3, {}, None),
        ("", {"defense": "none"}, 3, {}, {"none": 1}),
        (SPEC, {}, 3, {}, None),
        (SPEC, {"defense": "none"}, 2, {"other defence": 1}, {"none": 1}),
        (SPEC, {"defense": "representation:share=0.1"}, 2, {"other defence": 1}, {"representation:share=0.1": 1}),
        (SPEC, {"defense": f"{SPEC}+gaussian:scale=0.01"}, 3, {}, None),
    ],
    ids=["told nothing", "told", "same", "none", "weaker", "more"],
)
def test_a_site_with_another_defence_is_told_and_where_demanded_refused(
    demand: str, site: dict[str, Any], accepted: int, rejected: dict[str, int], stated: dict[str, int] | None
) -> None:
    run = settings(require_defense=demand)
    row = serve(nodes(run, [{}, site, {}]), run).rounds[0]
    assert (row["accepted"], row["rejected"], row.get("stated")) == (accepted, rejected, stated)


@pytest.mark.parametrize(("demand", "accepted", "rejected"), [("", 3, {}), (SPEC, 2, {"other defence": 1})])
def test_in_a_secure_sum_the_site_itself_stays_out(demand: str, accepted: int, rejected: dict[str, int]) -> None:
    run = settings(require_defense=demand, secure_aggregation=True, lost=0.34)
    row = serve(nodes(run, [{}, {"defense": "none"}, {}]), run).rounds[0]
    assert (row["accepted"], row["rejected"]) == (accepted, rejected)
    assert row.get("stated") == (None if demand else {"none": 1})


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("simulation", "accepted"), [(False, 2), (True, 3)])
def test_simulated_noise_is_for_simulations(secure: bool, simulation: bool, accepted: int) -> None:
    """On 0f6420f a run's ``secret = false`` made every site's noise one that the server draws again, unsaid."""
    noisy = "gaussian:scale=0.01"
    more = {"secure_aggregation": True, "lost": 0.34} if secure else {}
    run = settings(defense=noisy, require_defense=noisy, **more)
    app, state = make_client_app(run, simulation=simulation), [RecordDict() for _ in range(3)]
    site = {1: {"noise": "simulated"}}

    def answer(device: int) -> Any:
        own = Context(1, 0, {"partition-id": device} | site.get(device, {}), state[device], {})
        return lambda msg: app(msg, own)

    row = serve(Nodes({device + 10: answer(device) for device in range(3)}), run, simulation).rounds[0]
    why = "other defence" if secure else "simulated noise"
    assert (row["accepted"], row["rejected"]) == (accepted, {} if simulation else {why: 1})
    assert row.get("noise") == (None if secure and not simulation else "simulated")


def test_a_run_that_would_refuse_everybody_does_not_start() -> None:
    with pytest.raises(SpecError, match="demands 'gaussian' and its own defence is 'none'"):
        settings(defense="none", require_defense="gaussian")
    with pytest.raises(SpecError, match="No defense is called"):
        settings(require_defense="no_such")


def test_the_statement_says_what_was_done() -> None:
    run = settings(defense="veil:z=2,clip=1,limit=3", batch_size=0, rounds=2)
    said = []

    def keep(answer: Any) -> Any:
        def listening(msg: Message) -> Message:
            out: Message = answer(msg)
            said.append(out.content.config_records.get(STATEMENT))
            return out

        return listening

    grid = nodes(run, [{}, {}, {}])
    grid.answers = {node: keep(answer) for node, answer in grid.answers.items()}
    serve(grid, run)
    last = dict(said[-1])
    assert last["defense"] == "veil:z=2.0,clip=1.0,limit=3.0"
    assert "z=2.0,shape=iso,clip=1.0" in last["settings"][0]  # defaults too
    assert (last["from-site"], last["steps"], last["examples"]) == (False, 1, 6)
    assert last["spent"] == pytest.approx(2 * 0.25)  # μ² = 1/z² in each of two rounds
    assert last["limit"] == 3.0


def guarded(mods: list[Any], batch: Batch, site: dict[str, Any] | None = None) -> Message:
    out: Message = client_app(linear_model, batch, mods)(message(linear_model()), context(site))
    return out


def test_mods_state_what_they_did_and_add_up(batch: Batch) -> None:
    said = guarded([guard_mod("gaussian:scale=0.1,on=update"), guard_mod(SPEC)], batch).content[STATEMENT]
    assert said["defense"] == f"{SPEC}+gaussian:scale=0.1,on=update"
    assert [text.partition(":")[0] for text in said["settings"]] == ["representation", "gaussian"]
    assert (said["steps"], said["examples"]) == (1, 3)
    by_site = guarded([guard_mod(SPEC)], batch, {"defense": "gaussian:scale=0.5"}).content[STATEMENT]
    assert (by_site["defense"], by_site["from-site"]) == ("gaussian:scale=0.5", True)
    assert guarded([guard_mod(Halved())], batch).content[STATEMENT]["defense"] == "Halved"  # one of your own


def demanding(mods: list[Any], batch: Batch, change: Any = lambda out: None) -> CheckedGrid:
    """A round of an app of one's own, whose server demands a defence; ``change`` is done to one of two replies."""
    app = client_app(linear_model, batch, mods)

    def changed(msg: Message) -> Message:
        out: Message = app(msg, context())
        change(out)
        return out

    grid = checked(Nodes({1: lambda msg: app(msg, context()), 2: changed}), require_defense=SPEC)
    start = ArrayRecord(linear_model().state_dict())
    FedAvg(fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=start, num_rounds=1, train_config=ConfigRecord({"lr": 0.1})
    )
    return grid


def test_an_app_of_your_own_can_demand_it(batch: Batch) -> None:
    assert demanding([guard_mod(SPEC)], batch).counts[0]["kept"] == 2
    silent = demanding([], batch)
    assert (silent.counts[0]["kept"], silent.counts[0]["reasons"]) == (0, {"no defence stated": 2})
    assert silent.last_reason.endswith("(This is the client's word, not a proof.)")
    other = demanding([guard_mod("gaussian:scale=0.1")], batch)
    assert other.counts[0]["reasons"] == {"other defence": 2}
    assert "'gaussian:scale=0.1'" in other.last_reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"steps": 0}, "other defence"),
        ({"steps": -5}, "other defence"),
        ({"steps": "many"}, "no defence stated"),
        ({"settings": []}, "other defence"),
        ({"settings": [1, 2]}, "other defence"),
        ({"settings": "representation"}, "no defence stated"),
        ({"settings": ["os:system"], "defense": "os:system"}, "other defence"),
        ({"settings": ["x"], "defense": "\n\x1b[2J" + "x" * 10**6}, "other defence"),
        ({"defense": b"\xff"}, "no defence stated"),
    ],
)
def test_a_hostile_statement_is_a_refusal(said: dict[str, Any], reason: str, batch: Batch) -> None:
    grid = demanding([guard_mod(SPEC)], batch, lambda out: out.content[STATEMENT].update(said))
    assert (grid.counts[0]["kept"], grid.counts[0]["reasons"]) == (1, {reason: 1})
    assert grid.last_reason.isprintable()
    assert len(grid.last_reason) < 500
