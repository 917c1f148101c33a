"""Roads beside the mechanism: how an app, a server or a run could make more leave than noise (all open on 0f6420f)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.integrations.flower.app import make_client_app
from gradveil.integrations.flower.checks import checked
from gradveil.integrations.flower.mods import guard_mod, leak_guard
from gradveil.integrations.flower.records import ASKED
from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data
from gradveil.integrations.flower.site import STATEMENT, NodeError
from gradveil.privacy.accountant import Account
from gradveil.types import Batch
from integrations.flower_parts import SIMULATED, Nodes, ReadOff, context, linear_model, message, reply, train_plainly

SPEC = "veil:z=2,clip=1"
GUARD = {"slots": 3, "records": 3}


def app_that(batch: Batch, spoil: Any = None, mods: list[Any] | None = None, train: Any = train_plainly) -> ClientApp:
    """A client behind the guard whose reply is spoilt, and that answers everything else with what it knows."""
    app = ClientApp(mods=[guard_mod(SPEC, settings=GUARD)] if mods is None else mods)

    @app.train()
    def _(msg: Message, ctx: Context) -> Message:
        model = linear_model()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        train(model, batch)
        out = reply(msg, model.state_dict(), len(batch))
        return out if spoil is None else spoil(msg, out)

    def tell(msg: Message, ctx: Context) -> Message:
        model = linear_model()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loss = float(nn.functional.cross_entropy(model(batch.inputs), batch.labels).detach())
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": loss})}), reply_to=msg)

    app.evaluate()(tell)
    app.query()(tell)
    app.query("other")(tell)
    return app


@pytest.mark.parametrize("kind", ["evaluate", "query", "query.other"])
def test_messages_of_another_kind_are_not_answered_unless_the_site_allows_it(kind: str, batch: Batch) -> None:
    """74 losses gave label and image back."""
    word = kind.partition(".")[0]
    for own in (context(), context({"evaluate": "yes", "query": True}), context(run_config={word: "allow"})):
        out = app_that(batch)(message(linear_model(), kind=kind), own)
        assert f"this site answers no {word} messages" in out.error.reason
    out = app_that(batch)(message(linear_model(), kind=kind), context({word: "allow"}))
    assert out.content["metrics"]["loss"] > 0
    assert dict(out.content[STATEMENT]) == {"defense": "veil:z=2.0,clip=1.0", "allows": [word], "paid": False}
    trained = app_that(batch)(message(linear_model()), context({word: "allow"}))
    assert trained.content[STATEMENT]["allows"] == [word]


def test_a_defence_from_the_run_or_the_site_closes_them_as_well(batch: Batch) -> None:
    app = app_that(batch, mods=[guard_mod(settings=GUARD)])
    for own in (context(run_config={"defense": SPEC}), context({"defense": SPEC})):
        assert app(message(linear_model(), kind="evaluate"), own).has_error()
    open_one = context(run_config={"defense": "none"})
    assert not app(message(linear_model(), kind="evaluate"), open_one).has_error()
    assert app(message(linear_model(), kind="evaluate"), context(run_config={"defense": "veli"})).has_error()


def test_a_site_that_wants_veil_gets_it_of_an_app_with_another_defence(batch: Batch) -> None:
    app, own = app_that(batch, mods=[guard_mod("gaussian:scale=1,on=update")]), context({"defense": SPEC})
    out = app(message(linear_model()), own)
    assert (out.content[STATEMENT]["defense"], out.content[STATEMENT]["from-site"]) == ("veil:z=2.0,clip=1.0", True)
    assert set(out.content["metrics"]) == {"num-examples", "num-steps", "defended-steps"}
    assert "answers no evaluate messages" in app(message(linear_model(), kind="evaluate"), own).error.reason


def test_a_strategy_that_asks_for_evaluation_goes_on_without(batch: Batch) -> None:
    sites = {n: context({"partition-id": n}) for n in (1, 2)}
    nodes = Nodes({n: (lambda msg, own=own: app_that(batch)(msg, own)) for n, own in sites.items()})
    seen: list[int] = []
    result = FedAvg(fraction_evaluate=1.0).start(
        grid=checked(nodes),
        initial_arrays=ArrayRecord(linear_model().state_dict()),
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.1}),
        evaluate_fn=lambda number, arrays: seen.append(number) or MetricRecord({"public": 1.0}),
    )
    assert seen == [0, 1, 2]  # on public data, on the server
    assert result.train_metrics_clientapp[2]["defended-steps"] == 1
    assert not result.evaluate_metrics_clientapp


def pixel(batch: Batch) -> int:
    return int(batch.inputs[0].flatten()[0] * 10**9)


def with_metrics(**values: Any) -> Any:
    def spoil(msg: Message, out: Message) -> Message:
        out.content["metrics"].update({name.replace("_", "-"): value for name, value in values.items()})
        return out

    return spoil


def more_arrays(msg: Message, out: Message) -> Message:
    out.content["arrays"]["9.picture"] = Array(np.arange(64.0))
    return out


def wider(msg: Message, out: Message) -> Message:
    """Hides a picture below the precision of the weights that were trained."""
    wide = {n: v.double() + 1e-12 * torch.rand(v.shape) for n, v in out.content["arrays"].to_torch_state_dict().items()}
    out.content["arrays"] = ArrayRecord(wide)
    return out


def signs(msg: Message, out: Message) -> Message:
    out.content["notes"] = ConfigRecord({"picture": [0.1] * 64, "first": b"\x01"})
    out.content["more"] = MetricRecord({"picture": [0.1] * 64})
    return out


def other_order(msg: Message, out: Message) -> Message:
    state = out.content["arrays"].to_torch_state_dict()
    out.content["arrays"] = ArrayRecord(dict(reversed(state.items())))
    return out


def own_statement(msg: Message, out: Message) -> Message:
    out.content[STATEMENT] = ConfigRecord({"defense": "0.1,0.2,0.3", "settings": ["0.1"], "picture": [0.5] * 64})
    return out


NOTHING_ELSE = {"num-examples": 3, "num-steps": 1, "defended-steps": 1}


@pytest.mark.parametrize(
    "spoil",
    [
        with_metrics(num_examples=496256769),
        with_metrics(num_steps=496256769),
        with_metrics(num_steps=0.496256769),
        with_metrics(num_examples=float("nan"), loss=0.3),
        with_metrics(defended_steps=496256769, removed_metrics=17),
        with_metrics(num_steps=[0.1] * 64),
        signs, wider, other_order, own_statement,
    ],
)  # fmt: skip
def test_the_answer_is_made_anew_and_holds_nothing_of_the_apps_own(spoil: Any, batch: Batch) -> None:
    sent = message(linear_model())
    out = app_that(batch, spoil)(sent, context())
    assert {*out.content} == {"arrays", "metrics", STATEMENT}
    assert dict(out.content["metrics"]) == NOTHING_ELSE
    kinds = [(name, array.dtype, tuple(array.shape)) for name, array in out.content["arrays"].items()]
    assert kinds == [(name, array.dtype, tuple(array.shape)) for name, array in sent.content["arrays"].items()]
    assert out.content[STATEMENT]["defense"] == "veil:z=2.0,clip=1.0"
    assert {*out.content[STATEMENT]} == {
        "defense", "settings", "from-site", "steps", "examples", "noise", "spent", "allows",
    }  # fmt: skip


def test_more_arrays_than_were_sent_are_no_answer(batch: Batch) -> None:
    assert "not those of the model" in app_that(batch, more_arrays)(message(linear_model()), context()).error.reason


def test_bits_that_no_weight_has_do_not_leave(batch: Batch) -> None:
    """A zero has two signs; what was not trained goes back as it came."""

    def frozen(model: nn.Module, batch: Batch) -> None:
        model.weight.requires_grad_(False)
        with torch.no_grad():
            model.weight.zero_()
        train_plainly(model, batch)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            self.fc = nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x.flatten(1))
            return out

    model = Scaled()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def train(msg: Message, ctx: Context) -> Message:
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        frozen(model, batch)
        return reply(msg, model.state_dict() | {"weight": -model.weight}, 3)

    out = guard_mod(SPEC, settings=GUARD)(message(model), context(), train)
    got = out.content["arrays"].to_torch_state_dict()
    assert not torch.signbit(got["weight"]).any()
    assert not torch.equal(got["fc.weight"], before["fc.weight"])


def failing(model: nn.Module, batch: Batch) -> None:
    train_plainly(model, batch)
    raise ValueError(f"the first pixel is {pixel(batch)}")


def test_errors_of_an_app_say_nothing_and_are_paid_for(batch: Batch, accounts: Path) -> None:
    def answers(msg: Message, out: Message) -> Message:
        return Message(Error(0, f"the first pixel is {pixel(batch)}"), reply_to=msg)

    for app in (app_that(batch, train=failing), app_that(batch, answers)):
        out = app(message(linear_model()), context())
        assert str(pixel(batch)) not in out.error.reason
        assert "the node's own log says how" in out.error.reason
    assert Account.read(accounts / "site.json", "site").spent == 2 * 0.25


def test_an_update_defence_beside_it_does_not_let_other_weights_through(batch: Batch) -> None:
    mod = guard_mod(f"{SPEC}+gaussian:scale=1e-6,on=update", settings=GUARD)

    def twice(msg: Message, out: Message) -> Message:
        state = out.content["arrays"].to_torch_state_dict()
        out.content["arrays"] = ArrayRecord({name: 2 * value for name, value in state.items()})
        return out

    assert "not those of the model" in app_that(batch, twice, [mod])(message(linear_model()), context()).error.reason
    assert not app_that(batch, None, [mod])(message(linear_model()), context()).has_error()


def test_figures_of_a_leak_guard_do_not_leave_beside_a_defence_of_records(batch: Batch) -> None:
    mods = [leak_guard(ReadOff(), max_psnr=1000), guard_mod(SPEC, settings=GUARD)]
    assert app_that(batch, mods=mods)(message(linear_model()), context()).has_error()
    sent = message(linear_model())
    guarded = app_that(batch)(sent, context())
    out = leak_guard(ReadOff(), max_psnr=1000)(sent, context(), lambda msg, own: guarded)  # a model it cannot hear
    assert "leak_guard's figures" in out.error.reason


@pytest.mark.parametrize("mod", [guard_mod(SPEC, seed=5), guard_mod("gaussian:scale=1,on=update", seed=5)])
def test_an_app_cannot_give_the_noise_a_seed(mod: Any, batch: Batch) -> None:
    out = app_that(batch, mods=[mod])(message(linear_model()), context())
    assert "gives its noise a seed" in out.error.reason
    said = app_that(batch, mods=[mod])(message(linear_model()), context(SIMULATED)).content[STATEMENT]
    assert said["noise"] == "simulated"


@pytest.mark.parametrize(("simulation", "kept"), [(False, 1), (True, 2)])
def test_a_run_that_demands_a_defence_takes_no_simulated_noise(simulation: bool, kept: int, batch: Batch) -> None:
    sites = {1: context({"partition-id": 1}), 2: context({"partition-id": 2} | SIMULATED)}
    nodes = Nodes({n: (lambda msg, own=own: app_that(batch)(msg, own)) for n, own in sites.items()})
    grid = checked(nodes, require_defense="veil:z=2,clip=1", simulation=simulation)
    start = ArrayRecord(linear_model().state_dict())
    FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=start, num_rounds=1)
    assert (grid.counts[0]["kept"], grid.counts[0]["simulated"]) == (kept, 1)
    assert grid.counts[0].get("reasons", {}) == ({} if simulation else {"simulated noise": 1})


# The ready app.

RUN = FlowerSettings(
    partition="iid:devices=3,per_device=6", clients=3, rounds=9, model="logistic", batch_size=0, lr=0.1,
    defense="veil:z=2,quantile=0.9,shape=public,rank=4,limit=2",
)  # fmt: skip


def ready(run: FlowerSettings = RUN, own: Context | None = None, **said: Any) -> Message:
    """Return what a site of the ready app answers to a message for training."""
    model = build_model(run, load_data(run.dataset, "", run.partition, run.seed)[0])
    sent = message(model, **{"server-round": 1} | said)
    out: Message = make_client_app(run)(sent, own or context({"partition-id": 0}))
    return out


PLAIN = FlowerSettings(**RUN.__dict__ | {"defense": "veil:z=2,clip=1,limit=2"})


@pytest.mark.parametrize(
    "said",
    [
        {"lr": "0.1"}, {"lr": float("nan")}, {"lr": float("inf")}, {"lr": 0.0}, {"lr": -1.0}, {"lr": 1e-30},
        {"lr": [0.1]},
        {"server-round": 1.5}, {"server-round": -1}, {"server-round": float("nan")}, {"server-round": b"1"},
        {"batch-size": 0.5}, {"batch-size": 10**30}, {"batch-size": True}, {"epochs": 0}, {"epochs": "many"},
        {"proximal-mu": -1.0}, {"proximal-mu": float("nan")}, {"momentum": 1.0}, {"weight-decay": "x"}, {"clip": -1.0},
        {"public-clip": 1e-9}, {"public-clip": 1e9}, {"public-clip": float("nan")}, {"public-clip": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_a_message_are_checked_before_the_data_are_touched(said: dict[str, Any], accounts: Path) -> None:
    with pytest.raises(Exception, match=f"asks for a '{next(iter(said))}' that is not"):
        ready(PLAIN, **said)
    assert not accounts.exists()  # what is refused is not charged


@pytest.mark.parametrize("sent", [10**12, "map", [1, 2], b"", b"{}", b"x" * 10**6, 1.0])
def test_a_map_is_a_file_of_a_size_that_makes_sense(sent: Any, accounts: Path) -> None:
    """On main an integer was a file of so many zeros."""
    with pytest.raises(Exception, match=r"public-map|public coordinates"):
        ready(**{"public-clip": 1.0, "public-map": sent})
    assert not accounts.exists()


def test_however_a_round_is_asked_for_it_is_paid_for(accounts: Path) -> None:
    own = context({"partition-id": 0})
    asked: list[tuple[FlowerSettings, Context, int]] = [
        (PLAIN, own, 1),
        (PLAIN, own, 1),  # the same again
        (PLAIN, own, 5),
        (PLAIN, own, 2),  # an older one
        (PLAIN, Context(77, 7, {"partition-id": 0}, RecordDict(), {}), 1),  # another run
        (FlowerSettings(**PLAIN.__dict__ | {"seed": 3}), own, 1),  # other records from the same site
        (FlowerSettings(**PLAIN.__dict__ | {"partition": "iid:devices=2,per_device=9", "clients": 2}), own, 1),
        (PLAIN, Context(1, 99, {"partition-id": 0}, RecordDict(), {}), 1),  # a node that came back under another id
    ]
    answers = [ready(run, state, **{"server-round": number}) for run, state, number in asked]
    assert [out.content[STATEMENT]["spent"] for out in answers] == [0.25 * (n + 1) for n in range(8)]
    assert "the budget is spent" in ready(PLAIN, own).error.reason
    assert "the budget is spent" in ready(FlowerSettings(**PLAIN.__dict__ | {"out": "", "seed": 4}), own).error.reason
    lines = [json.loads(line) for line in (accounts / "0.json.journal").read_text().splitlines()]
    assert [line["note"] for line in lines[:3]] == ["run 1, round 1", "run 1, round 1", "run 1, round 5"]
    assert {line["noise"] for line in lines} == {"secret"}
    first, second = (out.content["arrays"].to_torch_state_dict()["fc.weight"] for out in answers[:2])
    assert not torch.equal(first, second)


def test_a_node_whose_state_was_not_stored_has_its_account(accounts: Path) -> None:
    """Flower sends the reply before it stores the node's state: two of two kills lost what was spent."""
    for number in range(3):
        out = ready(PLAIN, context({"partition-id": 0}))
        assert out.content[STATEMENT]["spent"] == 0.25 * (number + 1)


def test_an_account_that_is_removed_while_a_run_goes_on_is_refused(accounts: Path) -> None:
    own = context({"partition-id": 0})
    for _ in range(3):
        ready(PLAIN, own)
    for file in accounts.iterdir():
        file.unlink()
    assert "has forgotten what this run has spent" in ready(PLAIN, own).error.reason


def test_a_simulation_keeps_its_accounts_to_itself(accounts: Path) -> None:
    own = context({"partition-id": 0} | SIMULATED)
    assert ready(PLAIN, own).content[STATEMENT]["spent"] == 0.25
    said = ready(PLAIN, own).content[STATEMENT]
    assert (said["spent"], said["noise"]) == (0.5, "simulated")
    assert not accounts.exists()


@pytest.mark.parametrize("run", [{"seed": 1}, {"rounds": 1}, {"strategy": "fedavgm"}, {"require_defense": ""}])
def test_what_a_site_sets_is_not_changed_by_a_run(run: dict[str, Any], accounts: Path) -> None:
    site = {"partition-id": 0, "defense": "veil:z=4,clip=0.5", "account": str(accounts / "mine.json")}
    config = FlowerSettings(**PLAIN.__dict__ | run).to_config() | {"defense": "none"}
    model = build_model(PLAIN, load_data("digits", "", PLAIN.partition, 0)[0])
    said = make_client_app()(message(model), context(site, config)).content[STATEMENT]
    assert said["defense"] == "veil:z=4.0,clip=0.5"
    assert (said["from-site"], said["noise"], said["spent"]) == (True, "secret", 1 / 16)
    again = make_client_app()(message(model), context(site, config | {"account": "theirs.json"})).content[STATEMENT]
    assert again["spent"] == 2 / 16  # out of the site's own
    for key in ("noise", "evaluate", "node-config"):
        with pytest.raises(NodeError, match="SpecError"):
            make_client_app()(message(model), context(site, config | {key: "allow"}))


def test_the_page_has_a_row_for_every_number_that_a_server_asks_for() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "train-with-flower.md").read_text(encoding="utf-8")
    for name, number in ASKED.items():
        assert f"| `{name}` | {number} |" in page
