import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
import typer
from flwr.app import Context, Message, RecordDict
from typer.testing import CliRunner

from gradveil.cli.train import command as train_command
from gradveil.errors import GradveilError, SpecError
from gradveil.federated.simulate import Training, simulate
from gradveil.integrations.flower.app import make_client_app, serve
from gradveil.integrations.flower.engine import submit
from gradveil.integrations.flower.settings import (
    STRATEGIES,
    FlowerSettings,
    build_model,
    build_strategy,
    load_data,
    strategy_for,
)
from gradveil.integrations.flower.site import NodeError
from integrations.flower_parts import Nodes, context, message

SETTINGS = FlowerSettings(
    partition="classes:devices=6,classes=2,per_class=10", model="logistic", clients=3, epochs=2, batch_size=8, lr=0.1
)


def nodes(settings: FlowerSettings, devices: list[int]) -> Nodes:
    """Flower nodes with random-looking ids, each of which holds a device's data; they draw from the run's seed."""
    app = make_client_app(settings, simulation=True)

    def answer(device: int):  # type: ignore[no-untyped-def]
        return lambda msg: app(msg, Context(1, 0, {"partition-id": device}, RecordDict(), {}))

    return Nodes({(device * 7919 + 5) % 104729: answer(device) for device in devices})


def in_process(settings: FlowerSettings) -> dict[str, torch.Tensor]:
    dataset, shares = load_data(settings.dataset, settings.data, settings.partition, settings.seed)
    training = Training(
        rounds=settings.rounds,
        clients=settings.clients,
        epochs=settings.epochs,
        batch_size=settings.batch_size or None,
        lr=settings.lr,
        schedule=settings.schedule,
        proximal=settings.proximal,
    )
    model = build_model(settings, dataset)
    *_, last = simulate(model, dataset, shares, training, settings.defense, settings.seed)
    return dict(last.model.state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        FlowerSettings(
            partition="iid:devices=4,per_device=9", clients=3, model="lenet", defense="representation:share=0.4"
        ),
        FlowerSettings(
            partition="iid:devices=4,per_device=9", clients=2, model="probe", defense="gaussian:scale=0.1", seed=3
        ),
        FlowerSettings(
            partition="iid:devices=4,per_device=9", clients=4, model="integrations.flower_parts:with_batch_norm"
        ),
    ],
    ids=["plain", "representation", "noise", "batch norm"],
)
def test_the_app_gives_the_model_that_the_simulation_gives(settings: FlowerSettings) -> None:
    outcome = serve(nodes(settings, list(range(6))[: int(settings.partition.split("devices=")[1][0])]), settings)
    expected = in_process(settings)
    assert outcome.state.keys() == expected.keys()
    for name, value in expected.items():
        assert float((outcome.state[name] - value).abs().max()) < 1e-5
    start = build_model(settings, load_data(settings.dataset, "", settings.partition, settings.seed)[0]).state_dict()
    assert max(float((start[name] - value).abs().max()) for name, value in expected.items()) > 1e-3
    assert [row["round"] for row in outcome.rounds] == [1, 2, 3]


def test_a_round_draws_among_the_nodes_that_are_there() -> None:
    outcome = serve(nodes(SETTINGS, [0, 2, 3, 5]), SETTINGS)
    drawn = [row["clients"] for row in outcome.rounds]
    assert all(len(set(clients)) == 3 and set(clients) <= {0, 2, 3, 5} for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 1


def test_failing_and_lying_clients_are_counted_and_left_out() -> None:
    grid = nodes(SETTINGS, list(range(6)))
    crashing, lying = list(grid.answers)[:2]
    grid.answers[crashing] = only_training(grid.answers[crashing], lambda reply: None)
    grid.answers[lying] = only_training(grid.answers[lying], poisoned)

    outcome = serve(grid, FlowerSettings(**SETTINGS.__dict__ | {"clients": 6}))

    for row in outcome.rounds:
        assert row["accepted"] == 4
        assert row["rejected"] == {"dropped": 1, "not finite": 1}
    assert all(bool(torch.isfinite(value).all()) for value in outcome.state.values())


def test_a_run_in_which_nobody_was_averaged_is_an_error() -> None:
    grid = nodes(SETTINGS, list(range(6)))
    grid.answers = {node: only_training(answer, poisoned) for node, answer in grid.answers.items()}
    with pytest.raises(GradveilError, match=r"Not one update was accepted in 3 rounds\..*NaN"):
        serve(grid, SETTINGS)


def only_training(answer, change):  # type: ignore[no-untyped-def]
    return lambda msg: change(answer(msg)) if msg.metadata.message_type == "train" else answer(msg)


def poisoned(reply: Message) -> Message:
    state = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = type(reply.content["arrays"])({n: v * torch.nan for n, v in state.items()})
    return reply


def test_a_client_outside_the_partition_says_so() -> None:
    app = make_client_app(SETTINGS)
    model = build_model(SETTINGS, load_data("digits", "", SETTINGS.partition, 0)[0])
    with pytest.raises(Exception, match="partition-id=6"):
        app(message(model), context({"partition-id": 6}))


def test_a_site_can_set_a_defence_that_the_run_does_not_name() -> None:
    app = make_client_app(SETTINGS, simulation=True)
    model = build_model(SETTINGS, load_data("digits", "", SETTINGS.partition, 0)[0])
    sent = [
        app(message(model), context({"partition-id": 0} | site)).content["arrays"].to_torch_state_dict()["fc.weight"]
        for site in ({}, {}, {"defense": "gaussian:scale=1"})
    ]
    assert torch.equal(sent[0], sent[1])
    assert not torch.allclose(sent[0], sent[2])


def test_clients_do_not_draw_from_the_seed_unless_the_site_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On main the run's ``secret = false``, the default, let a server draw a site's noise again."""
    app = make_client_app()
    model = build_model(SETTINGS, load_data("digits", "", SETTINGS.partition, 0)[0])

    def repeats(site: dict[str, str]) -> bool:
        own = context({"partition-id": 0} | site, SETTINGS.to_config())
        first, second = (app(message(model), own).content["arrays"] for _ in range(2))
        return torch.equal(first.to_torch_state_dict()["fc.weight"], second.to_torch_state_dict()["fc.weight"])

    assert not repeats({})
    assert not repeats({"noise": "secret"})
    assert repeats({"noise": "simulated"})
    monkeypatch.setenv("GRADVEIL_NOISE", "simulated")
    assert repeats({})
    assert not repeats({"noise": "secret"})
    with pytest.raises(NodeError, match="SpecError"):
        app(message(model), context({"partition-id": 0}, SETTINGS.to_config() | {"secret": False}))
    with pytest.raises(NodeError, match="its own log"):
        app(message(model), context({"partition-id": 0, "noise": "loud"}, SETTINGS.to_config()))


def test_settings_travel_through_a_run_config() -> None:
    config = SETTINGS.to_config()
    assert config["batch-size"] == 8
    assert FlowerSettings.from_config(config) == SETTINGS
    with pytest.raises(SpecError, match="Did you mean 'batch_size'"):
        FlowerSettings.from_config({"batchsize": 3})


def test_every_strategy_is_built_by_name_and_takes_its_numbers() -> None:
    assert len([build_strategy(name) for name in STRATEGIES]) == 11
    assert build_strategy("fedadam:eta=0.5").eta == 0.5
    with pytest.raises(SpecError, match="Did you mean 'fedadam'"):
        build_strategy("fedadm")
    with pytest.raises(SpecError, match="eta"):
        build_strategy("fedadam:rate=0.5")


def test_server_rules_of_the_simulation_have_their_strategy() -> None:
    assert strategy_for("fedavg") == "fedavg"
    assert build_strategy(strategy_for("fedadam:lr=0.3,beta2=0.5")).beta_2 == 0.5
    assert build_strategy(strategy_for("fedavgm:lr=0.5")).server_momentum == 0.9
    assert strategy_for("krum") == "krum"
    assert strategy_for("fedadam:eta=0.2") == "fedadam:eta=0.2"
    with pytest.raises(SpecError, match="fedavg has no 'lr'"):
        build_strategy(strategy_for("fedavg:lr=0.5"))


@pytest.mark.parametrize("strategy", ["fedadam:eta=0.01", "fedprox:proximal_mu=0.1", "fedmedian", "krum", "fedavgm"])
def test_other_strategies_train(strategy: str) -> None:
    own = {"strategy": strategy, "partition": "iid:devices=6,per_device=20", "clients": 6, "rounds": 5}
    settings = FlowerSettings(**SETTINGS.__dict__ | own)
    losses = [row["loss"] for row in serve(nodes(settings, list(range(6))), settings).rounds]
    assert losses[-1] < losses[0]


def test_the_learning_rate_follows_the_schedule() -> None:
    settings = FlowerSettings(**SETTINGS.__dict__ | {"schedule": "exponential:factor=0.3"})
    expected = in_process(settings)
    outcome = serve(nodes(settings, list(range(6))), settings)
    assert max(float((outcome.state[name] - value).abs().max()) for name, value in expected.items()) < 1e-5
    assert [row["lr"] for row in outcome.rounds] == pytest.approx([0.1, 0.03, 0.009])


def test_the_factor_of_fedprox_reaches_the_clients() -> None:
    settings = FlowerSettings(**SETTINGS.__dict__ | {"strategy": "fedprox:proximal_mu=0.7"})
    expected = in_process(FlowerSettings(**SETTINGS.__dict__ | {"proximal": 0.7}))
    state = serve(nodes(settings, list(range(6))), settings).state
    assert max(float((state[name] - value).abs().max()) for name, value in expected.items()) < 1e-5


def test_fedavgm_gives_the_model_that_the_simulation_gives() -> None:
    settings = FlowerSettings(**SETTINGS.__dict__ | {"strategy": strategy_for("fedavgm:lr=0.5")})
    dataset, shares = load_data("digits", "", settings.partition, 0)
    training = Training(rounds=3, clients=3, epochs=2, batch_size=8, lr=0.1, aggregator="fedavgm:lr=0.5")
    *_, last = simulate(build_model(settings, dataset), dataset, shares, training)
    state = serve(nodes(settings, list(range(6))), settings).state
    for name, value in last.model.state_dict().items():
        assert float((state[name] - value).abs().max()) < 1e-5


def on_the_command_line(*options: str) -> BaseException | None:
    app = typer.Typer()
    app.command()(train_command)
    return CliRunner().invoke(app, ["--engine", "flower", *options]).exception


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weighting", "uniform"], "--weighting is not available"),
        (["--aggregator", "fedavg:lr=0.5"], "fedavg has no 'lr'"),
        (["--aggregator", "no_such"], "No strategy is called 'no_such'"),
        (["--clients", "11"], "11 clients a round"),
        (["--root-certificates", "ca.crt"], "Give its address, --superlink"),
    ],
)
def test_what_flower_cannot_do_is_said_before_it_starts(options: list[str], said: str, tmp_path: Path) -> None:
    error = on_the_command_line("--out", str(tmp_path / "run"), *options)
    assert isinstance(error, GradveilError)
    assert said in str(error)
    assert not (tmp_path / "run").exists()


def test_a_superlink_that_is_not_there_is_an_error_in_one_line() -> None:
    with pytest.raises(GradveilError, match="Is the SuperLink up"):
        submit(SETTINGS, "127.0.0.1:9", None, print)


def test_what_is_submitted_cannot_say_how_clients_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def flwr(arguments: list[str], env: dict[str, str]) -> dict[str, str]:
        sent.append(tomllib.loads((Path(arguments[1]) / "pyproject.toml").read_text()))
        raise GradveilError("enough")

    monkeypatch.setattr("gradveil.integrations.flower.engine._flwr", flwr)
    with pytest.raises(GradveilError, match="enough"):
        submit(SETTINGS, "127.0.0.1:9", None, print)
    config = sent[0]["tool"]["flwr"]["app"]["config"]
    assert not {"secret", "noise", "simulation"} & config.keys()
    assert config["batch-size"] == SETTINGS.batch_size


def test_the_connection_speaks_tls_where_a_certificate_is_given(tmp_path: Path) -> None:
    from gradveil.integrations.flower.engine import _connection

    secure = tomllib.loads(_connection("host:1", tmp_path / "ca.crt"))["superlink"]["gradveil"]
    assert secure == {"address": "host:1", "root-certificates": str(tmp_path / "ca.crt")}
    assert tomllib.loads(_connection("host:1", None))["superlink"]["gradveil"]["insecure"] is True


def test_telemetry_is_off_in_our_commands() -> None:
    code = "import gradveil.integrations.flower.engine as e, sys; assert 'flwr' not in sys.modules; print(e.QUIET)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'FLWR_TELEMETRY_ENABLED': '0'" in said
