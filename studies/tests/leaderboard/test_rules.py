"""The rules of the leaderboard: which rate is chosen, on what, who is strongest, and when a certificate is beaten."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.cli.plan import figures
from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import Plan, PlannedRun, class_spectra
from gradveil.protection.defense import NoDefense
from gradveil.threats.panel import INFORMED
from gradveil.tree import flatten
from gradveil_studies.leaderboard.attacked import Client, Place
from gradveil_studies.leaderboard.attacks import ONE, AttackedEntry
from gradveil_studies.leaderboard.board import Leaderboard
from gradveil_studies.leaderboard.entries import ENTRIES, PANELS, Entry, Panel
from gradveil_studies.leaderboard.standings import standings, table, tier_table
from gradveil_studies.leaderboard.training import Tuning, _Work, chosen_multiple, held_out_records, settled, trained
from gradveil_studies.paper.base import Context, Row

from .conftest import TINY


def training(defense: str, seed: int, multiple: int, held_out: float, accuracy: float) -> Row:
    about = {"kind": "training", "dataset": "digits", "split": "paper", "defense": defense, "lr": 0.1 * multiple}
    return about | {"seed": seed, "multiple": multiple, "held_out": held_out, "accuracy": accuracy}


def attack(defense: str, tier: str, server: str, how: str, mses: list[float], picked: int = 0) -> list[Row]:
    about = {"kind": "attack", "dataset": "digits", "scene": ONE, "round": "first", "round_number": 1,
             "weights": "start", "defense": defense, "server": server, "tier": tier, "attack": how,
             "gallery": 100, "converged": True}  # fmt: skip
    return [about | {"example": i, "mse": mse, "identified": float(i < picked)} for i, mse in enumerate(mses)]


def floors(count: int) -> list[Row]:
    about = {"kind": "floor", "dataset": "digits", "scene": ONE, "guess": "class mean"}
    return [about | {"example": i, "mse": 0.1, "identified": 0.0} for i in range(count)]


COUNT = 20
CONTROLS = [
    *attack("none", "oblivious", "oblivious", "newton", [0.0] * COUNT, COUNT),
    *attack("none", "informed", "plain, class known", "newton", [0.0] * COUNT, COUNT),
    *attack("none", "informed", INFORMED, INFORMED, [0.0] * COUNT, COUNT),
]


def promised(z_run: float, floor: float) -> Row:
    about = {"kind": "client", "dataset": "digits", "defense": "veil", "records": 1, "participations": 20}
    return about | {"errors": [], "spent": 1 / z_run**2, "floor": floor}


def veil(mse: float, picked: int, z_run: float = 1.0, floor: float = 0.9) -> list[Row]:
    """A defence with a certificate, an attack on the picture and one with a list."""
    sought = attack("veil", "informed", "whiten, class known", "newton", [mse * (1 + 0.01 * i) for i in range(COUNT)])
    return [*floors(COUNT), *CONTROLS, promised(z_run, floor), *sought,
            *attack("veil", "informed", INFORMED, INFORMED, [0.1] * COUNT, picked)]  # fmt: skip


def test_the_rate_is_chosen_on_held_out_records_never_on_the_test_split() -> None:
    tries = [training("none", 0, 1, 0.8, 0.7), training("none", 0, 2, 0.9, 0.6), training("none", 0, 4, 0.7, 0.99)]
    assert chosen_multiple(tries) == 2
    assert chosen_multiple([*tries, training("none", 0, 8, 0.9, 1.0)]) == 2  # of equals the smallest
    assert chosen_multiple([]) == 0
    other = [training("none", 1, 2, 0.1, 0.65), training("none", 1, 4, 1.0, 1.0)]
    assert {seed: row["accuracy"] for seed, row in settled([*tries, *other]).items()} == {0: 0.6, 1: 0.65}


def test_held_out_records_are_no_devices() -> None:
    data = load("digits")
    clients = partition(data.train.labels, "classes:devices=20,classes=2,per_class=20", np.random.default_rng(0))
    left = held_out_records(data, clients, np.random.default_rng(0))
    assert len(left) == len(data.train) - 800
    held = torch.cat([data.train.batch(c).inputs.flatten(1) for c in clients])
    assert (torch.cdist(left.batch(slice(0, 50)).inputs.flatten(1), held).min(1).values > 0).float().mean() > 0.9


def test_points_are_below_the_undefended_run_of_the_same_seeds() -> None:
    rows = [training("none", s, 1, 0.9, 0.9 + 0.01 * s) for s in range(3)]
    rows += [training("veil", s, m, 0.8 + 0.01 * m, 0.85 + 0.01 * s) for s, m in ((0, 1), (0, 2), (1, 2))]
    one = next(s for s in standings(rows) if s.defense == "veil").costs["paper"]
    assert one.points == pytest.approx(5.0)
    assert one.accuracy.count == 2
    assert one.edge


def test_a_defence_under_which_no_run_ends_did_not_train() -> None:
    failed = {
        "kind": "training",
        "dataset": "digits",
        "split": "paper",
        "defense": "mine",
        "seed": 0,
        "why": "all zero",
    }
    rows = [training("none", 0, 1, 0.9, 0.9), *({**failed, "multiple": multiple} for multiple in (1, 2))]
    assert [row["accuracy, paper"] for row in table(standings(rows))] == ["0.900", "did not train"]
    ended = [*rows, training("mine", 0, 4, 0.5, 0.4)]
    assert [row["accuracy, paper"] for row in table(standings(ended))] == ["0.900", "0.400"]


@pytest.mark.parametrize(
    ("mse", "picked", "z_run", "floor", "beaten"),
    [
        (0.099, 0, 1.0, 0.9, 0),
        (0.05, 0, 1.0, 0.9, 1),  # errs less than the floor allows
        (0.05, 0, 1.0, 0.4, 0),
        (0.099, 10, 1.0, 0.9, 1),  # half are picked: no server gets more than 9 %
        (0.099, 10, 0.3, 0.5, 0),
        (0.05, 20, 1.0, 0.9, 2),
    ],
)
def test_an_attack_below_its_certificate_is_an_error(
    mse: float, picked: int, z_run: float, floor: float, beaten: int
) -> None:
    rows = veil(mse, picked, z_run, floor)
    one = next(s for s in standings(rows) if s.defense == "veil")
    assert len(one.beaten) == beaten
    assert len(Leaderboard().verdicts(rows)) == beaten
    shown = next(row for row in table([one]))
    assert ("**beaten**" in shown["floor for Gaussian images"]) == bool(beaten)
    assert shown["μ"] == f"{Account('', 1 / z_run**2).mu:.2f}"


def test_a_failed_control_makes_a_cell_uninformative() -> None:
    rows = [*floors(COUNT), *attack("none", "oblivious", "oblivious", "newton", [0.1] * COUNT)]
    rows += attack("gaussian", "oblivious", "oblivious", "newton", [0.2] * COUNT)
    one = next(s for s in standings(rows) if s.defense == "gaussian")
    assert one.strongest is None
    assert table([one])[0]["error / blind guess"] == "uninformative"
    assert tier_table([one])[0]["oblivious"] == "uninformative"
    assert tier_table([one])[0]["multi-round"] == "not run"


def test_the_strongest_server_counts_and_a_list_is_no_reconstruction() -> None:
    rows = [*veil(0.09, 1), *attack("veil", "oblivious", "oblivious", "newton", [0.3] * COUNT)]
    one = next(s for s in standings(rows) if s.defense == "veil")
    assert one.strongest is not None
    assert one.strongest.line.server == "whiten, class known"
    assert one.strongest.error.mean == pytest.approx(0.9 * 1.095, rel=1e-3)
    assert one.worst == pytest.approx(0.9)
    assert one.identified is not None
    assert one.identified.line.attack == INFORMED


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_every_entry_is_trained_and_attacked_on_every_data_set(scale: str) -> None:
    board, context = Leaderboard(), Context(scale=scale)  # type: ignore[arg-type]
    units = board.units(context)
    for panel in PANELS[scale]:
        assert (panel.seeds >= 3) == (scale == "full")
        for entry in ENTRIES:
            assert f"attack/{panel.dataset}/{entry.name}" in units
            assert {f"train/{panel.dataset}/{split}/{entry.name}" for split in ("paper", "iid")} <= set(units)
    on_cuda = board.groups(units, Context(scale=scale, device=torch.device("cuda")))  # type: ignore[arg-type]
    assert [unit for some in on_cuda for unit in some] == units
    assert len({(board.work(context)[u].kind, board.work(context)[u].panel) for u in on_cuda[1]}) == 1
    assert board.groups(units, context) == [[unit] for unit in units]


def test_the_figure_shows_cost_against_what_is_got(tmp_path: Path) -> None:
    rows = [*veil(0.09, 1), *(training(d, s, 1, 0.9, 0.9) for d in ("none", "veil") for s in range(2))]
    assert Leaderboard().draw(rows, tmp_path / "leaderboard")
    assert (tmp_path / "leaderboard.svg").stat().st_size > 1000
    assert not Leaderboard().draw(floors(2), tmp_path / "none")


def test_hard_records_do_not_make_the_error_beside_the_blind_guess_less_sure() -> None:
    blind = [0.01 * (1 + i) for i in range(COUNT)]
    about = floors(1)[0]
    rows = [about | {"example": i, "mse": mse} for i, mse in enumerate(blind)] + CONTROLS
    rows += attack("veil", "informed", "whiten, class known", "newton", [1.1 * mse for mse in blind])
    one = next(s for s in standings(rows) if s.defense == "veil")
    assert one.strongest is not None
    error = one.strongest.error
    assert (error.mean, error.low, error.high) == pytest.approx((1.1, 1.1, 1.1))


def test_what_is_learned_of_a_run_is_the_mean_of_its_rounds() -> None:
    """The client that is learned from sends what was seen: the same mean, and the noise of as many rounds."""
    panel = replace(TINY, rounds=40)
    place = Place(panel, Context())
    for spec in ("veil:z=2,clip=1", "dp_sgd:noise=2", "gaussian:scale=0.1", "laplace:scale=0.1"):
        entry = Entry(spec)
        defense, rounds = place.ready(entry), place.planned(entry).participations
        client = Client(place, defense, rounds)
        rng = torch.Generator().manual_seed(0)
        one = client.sought(0)
        single, mean = (
            torch.stack([flatten(run(one, rng)) for _ in range(12)]).std(0).square().mean().sqrt()
            for run in (client.simulated, client.simulated_mean)
        )
        assert rounds > 10
        assert float(single / mean) == pytest.approx(rounds**0.5, rel=0.1)
        seen = flatten(client.mean_seen(0, told=False).update.gradient)
        clean = flatten(Client(place, NoDefense(), 1).simulated(one, rng))
        clean = clean / clean.norm().clamp_min(1.0) if spec[0] in "vd" else clean
        assert float((seen - clean).square().mean().sqrt() / mean) == pytest.approx(1.0, rel=0.1)


def test_the_learning_server_has_one_round_or_the_whole_run_and_may_know_the_class() -> None:
    trials = AttackedEntry(Entry("veil:z=2,clip=1"), Place(TINY, Context())).learned()
    found = {trial.about["tier"]: trial for trial in trials}
    run = found["multi-round"].about["rounds"]
    rounds = {tier: trial.about["rounds"] for tier, trial in found.items()}
    assert rounds == {"adaptive": 1, "multi-round": run, "informed": run}
    assert run > 1
    assert {tier for tier, trial in found.items() if trial.view.labels is not None} == {"informed"}
    assert not any(trial.view.rounds for trial in trials)  # their mean


def test_random_rounding_gives_a_record_away_by_the_size_of_its_levels() -> None:
    """One update is enough: no draw changes what the highest level stands for."""
    case = AttackedEntry(Entry("qsgd:levels=1,norm=max"), Place(replace(TINY, victims=4), Context()))
    rows = [row for row in case.tried(case.listed()) if row["server"] == "fingerprint"]
    assert [(row["identified"], row["rounds"], row["tier"]) for row in rows] == [(1.0, 1, "informed")] * 4


@pytest.mark.parametrize(
    ("spec", "alone", "records"), [("mixup", False, 40), ("concealed", True, 1), ("sign", False, 40)]
)
def test_a_client_has_as_many_records_as_in_training_or_one(spec: str, alone: bool, records: int) -> None:
    (entry,) = (e for e in ENTRIES if e.name == spec)
    place = Place(replace(TINY, per_class=20), Context())
    assert (entry.alone, Client(place, place.ready(entry), 1, entry.alone).size) == (alone, records)


def test_a_defence_that_is_a_model_is_attacked_there_and_its_control_on_the_panels_own() -> None:
    (entry,) = (e for e in ENTRIES if e.name == "model precode")
    case = AttackedEntry(entry, Place(TINY, Context()))
    trials = [trial for trial in case.jobs() if trial.attack == "analytic"]
    random = {trial.about["defense"]: hasattr(trial.view.model, "encoder") for trial in trials}
    assert random == {"model precode": True, "none": False}
    assert case.client.size == 1  # what it draws, it draws for each record


def test_models_are_trained_apart(tiny: Panel) -> None:
    entries = [Entry("none"), Entry("none", model="precode:activation=relu,init=kaiming,size=8")]
    rows = trained(entries, tiny, "paper", Context())
    assert [{row["defense"] for row in rows[entry]} for entry in entries] == [{"none"}, {"model precode"}]
    assert all("accuracy" in row for some in rows.values() for row in some)
    work = _Work(tiny, "paper", Context())
    assert [hasattr(work._model(Tuning(entry, 0, 1)), "encoder") for entry in entries] == [False, True]


def test_the_leaderboard_says_the_floor_that_plan_says() -> None:
    """One number: it had been that of one covariance for all classes here, and class by class there."""
    row = AttackedEntry(Entry("veil:z=2,clip=1"), Place(TINY, Context())).about()
    digits = load("digits")
    plan = Plan(planned_for(row["participations"]), 2.0)
    said = figures(plan, class_spectra(digits.test.batch(slice(None))).values(), 1e-5, 0.01)
    assert row["floor"] == pytest.approx(said["whole_run"]["floor"], rel=1e-12)
    assert row["spent"] == pytest.approx(plan.account.spent)


def planned_for(participations: int) -> PlannedRun:
    return PlannedRun(16, None, 1, TINY.rounds, participations, TINY.clients)
