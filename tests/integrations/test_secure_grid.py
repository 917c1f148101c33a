"""SecAgg+ under gradveil's app and any strategy of the Message API, without an engine."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from gradveil.errors import BudgetError, GradveilError
from gradveil.federated.simulate import Training, simulate
from gradveil.integrations.flower.app import Outcome, make_client_app, serve
from gradveil.integrations.flower.mods import guard_mod
from gradveil.integrations.flower.secure_aggregation import FINE, masks, secure_mod
from gradveil.integrations.flower.settings import Cohort, FlowerSettings, build_model, load_data
from gradveil.privacy.bounds import delta_of
from integrations.flower_parts import Nodes, client_app, context, linear_model, message

PLAIN = FlowerSettings(
    partition="iid:devices=4,per_device=9", model="logistic", clients=4, batch_size=None, lr=0.1, rounds=1
)
SECURE = replace(PLAIN, secure_aggregation=True, lost=0.5)


def run(
    settings: FlowerSettings,
    answers: dict[int, int] | None = None,
    lie: Callable[[Any], None] = lambda said: None,
    site: dict[str, Any] | None = None,
    gone: Callable[[Any], Any] = lambda msg: None,
) -> Outcome:
    """Train with nodes that keep their state.

    Some may answer only so many training messages, and are ``gone`` after: silent. ``lie`` changes what the server
    says of the protocol, and ``site`` is what a site sets for itself.
    """
    app, left = make_client_app(settings, simulation=True), dict(answers or {})
    states = {device: RecordDict() for device in range(4)}

    def answer(device: int) -> Any:
        def reply(msg: Any) -> Any:
            if msg.metadata.message_type == "train" and device in left:
                left[device] -= 1
                if left[device] < 0:
                    return gone(msg)
            lie(msg.content.config_records.get(RECORD_KEY_CONFIGS, {}))
            own = {name: str(value).format(device) for name, value in (site or {}).items()}
            return app(msg, Context(1, 0, {"partition-id": device} | own, states[device], {}))

        return reply

    return serve(Nodes({device + 11: answer(device) for device in range(4)}), settings)


VEIL = "veil:z=2,clip=0.5,tier=aggregate"


def in_process(settings: FlowerSettings) -> Outcome:
    dataset, shares = load_data(settings.dataset, settings.data, settings.partition, settings.seed)
    training = Training(rounds=settings.rounds, clients=settings.clients, batch_size=None, lr=settings.lr)
    *_, last = simulate(build_model(settings, dataset), dataset, shares, training, settings.defense, settings.seed)
    return Outcome(dict(last.model.state_dict()))


@pytest.mark.parametrize("about", ["clip=0.5", "quantile=0.9", "quantile=0.9,shape=public,rank=4"])
def test_the_tier_that_is_simulated_in_process_is_the_one_that_secure_aggregation_gives(about: str) -> None:
    settings = replace(SECURE, lost=0.0, defense=f"veil:z=2,tier=aggregate,{about}", rounds=2)
    outcome = run(settings)
    assert apart(outcome, in_process(settings)) < 1e-6
    assert apart(outcome, in_process(replace(settings, defense="none"))) > 1e-2


def apart(one: Outcome, other: Outcome) -> float:
    return max(float((one.state[name] - value).abs().max()) for name, value in other.state.items())


def test_a_mod_in_a_foreign_app_does_not_split_the_noise(batch: Any) -> None:
    app = client_app(linear_model, batch, [guard_mod(f"{VEIL},cohort=10")])
    assert "tier=aggregate is for a secure sum" in app(message(linear_model()), context()).error.reason


@pytest.mark.parametrize("stage", [0, 1, 2, 3, None])
def test_the_sum_is_the_mean_of_those_who_arrived(stage: int | None) -> None:
    secure = run(SECURE, {} if stage is None else {2: stage})
    plain = run(PLAIN, {2: 0} if stage in (0, 1, 2) else {})  # who is silent in the end only is in the sum
    assert apart(secure, plain) < 1e-6
    assert apart(secure, run(PLAIN, {1: 0})) > 1e-4
    (row,) = secure.rounds
    assert row["released"]
    assert row["accepted"] == (3 if stage in (0, 1, 2) else 4)


def test_a_node_for_which_the_superlink_answers_has_dropped_out() -> None:
    def unavailable(msg: Any) -> Any:
        reply = Message(Error(3, "Node unavailable"), reply_to=msg)
        reply.metadata.__dict__["_src_node_id"] = 1  # as a real SuperLink's answer has it
        return reply

    (row,) = run(SECURE, {2: 1}, gone=unavailable).rounds
    assert (row["accepted"], row["rejected"]) == (3, {"dropped": 1})


def test_a_sum_of_too_few_is_not_released_and_the_model_stays() -> None:
    settings = replace(SECURE, rounds=2, lost=0.25)
    outcome = run(settings, {0: 6, 1: 6})  # both are gone when the second round's updates are collected
    assert [row["released"] for row in outcome.rounds] == [True, False]
    assert outcome.rounds[1]["accepted"] == 0
    assert apart(outcome, run(replace(settings, rounds=1))) < 1e-6
    with pytest.raises(GradveilError, match=r"not released: 2 of 4 clients arrived, 3 are needed"):
        run(replace(settings, rounds=1), {0: 2, 1: 2})


def test_in_a_large_cohort_clients_share_keys_with_neighbours_and_the_server_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradveil.integrations.flower.settings.NEIGHBOURS", 3)
    settings = replace(SECURE, lost=0.0, defense=f"{VEIL},lost=0.25")
    assert (Cohort(4, 0.25).shares, Cohort(4, 0.25).threshold, Cohort(4, 0.25).min_clients) == (3, 2, 3)
    assert apart(run(settings), in_process(settings)) < 1e-6
    assert run(settings, {1: 2}).rounds[0]["accepted"] == 3
    with pytest.raises(GradveilError, match="not released: 2 of 4"):
        run(settings, {1: 2, 2: 2})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": 1}, "A sum of one client"),
        ({"strategy": "krum"}, "krum compares single updates"),
        ({"lost": 1.0}, "lost=1 is no share"),
        ({"secure_aggregation": False}, "secure-aggregation = true"),
        ({"defense": VEIL, "secure_aggregation": False, "lost": 0.0}, "tier=aggregate is for servers that see the sum"),
        ({"defense": VEIL, "batch_size": 3}, "3 local steps"),
        ({"defense": VEIL, "epochs": 2}, "2 local steps"),
        ({"defense": VEIL, "lost": 0.75}, "fewer than two|sum of one"),
        ({"defense": VEIL, "optimizer": "adam"}, "adaptive optimizer"),
        ({"defense": f"{VEIL}+pruning:share=0.5,on=update"}, "changes each client's by itself"),
    ],
)
def test_settings_that_do_not_fit_a_sum_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        run(replace(SECURE, **changes))


def lies(key: str, value: Any) -> Callable[[Any], None]:
    return lambda said: said.update({key: value}) if key in said else None


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lies(Key.THRESHOLD, 2), r"counts on 4 clients, of which 3 arrive"),
        (lies(Key.SAMPLE_NUMBER, 400), r"the secure sum is of 400"),
        (lies(Key.CLIPPING_RANGE, 1e-4), "would cut off"),
        (lies(Key.TARGET_RANGE, 2**6), "rounds to"),
        (lies(Key.ACTIVE_NODE_ID_LIST, [11]), "1 clients arrived, and 3 are needed to unmask"),
    ],
)
def test_a_server_that_would_open_a_sum_with_too_little_noise_gets_nothing(lie: Any, said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        run(replace(SECURE, lost=0.25, defense=VEIL), lie=lie)


def test_a_site_with_another_defence_takes_no_part_in_a_sum() -> None:
    with pytest.raises(GradveilError, match="the same defence on every site"):
        run(replace(SECURE, defense=VEIL), site={"defense": "veil:z=0.1,clip=0.5,tier=aggregate"})


def test_too_little_noise_is_not_released() -> None:
    outcome = run(replace(SECURE, rounds=2, lost=0.25, defense=VEIL), {0: 6, 1: 6})
    assert [row["released"] for row in outcome.rounds] == [True, False]
    assert outcome.rounds[1]["rejected"] == {"dropped": 2, "too little noise": 2}


@pytest.mark.parametrize("tier", ["local", "aggregate"])
def test_a_node_keeps_its_account_and_a_spent_budget_refuses_to_train(tier: str, tmp_path: Path) -> None:
    secure = {"secure_aggregation": tier == "aggregate", "lost": 0.0}
    settings = replace(SECURE, clients=2, rounds=4, defense=f"veil:z=1,clip=0.5,tier={tier},limit=2", **secure)
    outcome = run(settings)  # devices take turns: four rounds of two of four are two participations each
    assert [row["accepted"] for row in outcome.rounds] == [2] * 4
    with pytest.raises(BudgetError, match="Round 5 is refused: 4 of 4 clients have spent"):
        run(replace(settings, rounds=5))

    site = {"account": f"{tmp_path}/{{}}.json"}  # a file lasts from run to run
    run(replace(settings, rounds=1), site=site)
    paid = [path for path in tmp_path.glob("?.json") if '"spent": 1.0' in path.read_text()]
    assert len(paid) == 2
    paid[0].write_text(paid[0].read_text().replace('"spent": 1.0', '"spent": 2.0'))
    outcome = run(replace(settings, rounds=2), site=site)  # each device is asked once
    assert sum(row["rejected"].get("budget spent", 0) for row in outcome.rounds) == 1


def test_a_client_sends_nothing_outside_of_a_sum(batch: Any) -> None:
    app = client_app(linear_model, batch, [secure_mod()])
    reply = app(message(linear_model()), context())
    assert "outside of secure aggregation" in reply.error.reason


def test_masks_take_all_bits_of_the_seed() -> None:
    seed = bytes(range(32))
    swapped = seed[4:8] + seed[:4] + seed[8:]  # Flower's own generator cannot tell the two apart
    (one,), (same,), (other,) = (masks(s, 2**32, [(1000,)]) for s in (seed, seed, swapped))
    assert (one == same).all()
    assert (one != other).mean() > 0.99
    assert 0 <= one.min() < 2**27
    assert 2**32 - 2**27 < one.max() < 2**32


def test_no_sum_overflows() -> None:
    for size in (2, 3, 10, 1000):
        levels = Cohort(size).levels
        assert size * levels < 2**32
        assert levels == 2**30 or 2 * size * levels >= 2**32


def excess(steps: float, clients: int = 3) -> float:
    """Return how much more a rounded sum tells than the Gaussian sum: the worst δ(ε) above that of μ = 1.

    ``steps``: of the grid, in a standard deviation of a client's noise. Each client's number is rounded to the
    nearest point, the worst case: by chance adds noise.
    """
    shift, grid = math.sqrt(clients) * steps, np.arange(-40 * math.ceil(steps) - 40, 40 * math.ceil(steps) + 41)

    def law(mean: float) -> Any:
        return np.diff(ndtr((np.append(grid, grid[-1] + 1) - 0.5 - mean) / steps))

    others = functools.reduce(np.convolve, [law(0.25)] * (clients - 1))
    worst = 0.0
    for start in (0.0, 0.3, 0.5):
        p, q = (np.convolve(others, law(start + by)) for by in (0.0, shift))
        for epsilon in (0.0, 1.0, 3.0):
            for one, other in ((p, q), (q, p)):
                found = float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
                worst = max(worst, found - delta_of(1.0, epsilon))
    return worst


def test_rounding_before_the_sum_costs_nothing_of_the_promise_where_it_is_fine_enough() -> None:
    assert excess(FINE) < 1e-12
    assert excess(0.1) > 0.1  # a grid that is coarse beside a client's noise takes the noise away
