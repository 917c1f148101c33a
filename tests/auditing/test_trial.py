from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradveil.attacks.base import Attack
from gradveil.countermeasures import Countermeasure, Tier
from gradveil.data import load
from gradveil.defenses.representation import RandomMask
from gradveil.errors import AttackError, UpdateError
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.threats import panel as panel_module
from gradveil.threats.panel import CHUNK, ClientUpdates, Snapshot, Target, chunks, oblivious, panel, plant
from gradveil.threats.rows import lines
from gradveil.threats.setup import AuditConfig, AuditSetup, build_setup
from gradveil.threats.trial import Trial, attack_rows, attempt, floors
from gradveil.types import Batch, Observation, Reconstruction

MASK = "random_mask"


@pytest.fixture(scope="module")
def scene() -> AuditSetup:
    data = load("digits")
    model = build("lenet:strides=2/1", data.input_shape, data.num_classes)
    config = AuditConfig(images=3, gallery=10)
    return build_setup(config, data, model, {MASK: RandomMask()}, {"newton": "newton"})


@pytest.fixture(scope="module")
def found(scene: AuditSetup) -> list[Target]:
    lr = scene.config.lr_of(1)
    looks = [Snapshot("first", 1, "start", scene.model, lr), Snapshot("last", 6, "none", scene.model, lr)]
    looks.append(Snapshot("last", 6, MASK, build("lenet:strides=2/1", scene.dataset.input_shape, 10, seed=1), lr))
    return [p for part in panel(scene, looks).values() for p in part]


def test_every_update_meets_its_control_the_naive_server_and_those_that_know(found: list[Target]) -> None:
    count = Counter((p.look.round, p.look.weights, p.defense, p.server.name, p.attack) for p in found)
    assert set(count.values()) == {3}  # images
    controls = {(r, w, a) for (r, w, d, s, a) in count if (d, s) == ("none", "oblivious")}
    assert {(r, w, a) for (r, w, _, _, a) in count} == controls
    servers = {s for (r, _, d, s, _) in count if (r, d) == ("first", MASK)}
    assert {"oblivious", "drop", "mask"} <= servers
    assert {(r, w, d) for (r, w, d, _, _) in count if r == "last"} == {
        ("last", "none", "none"), ("last", MASK, "none"), ("last", MASK, MASK),
    }  # fmt: skip


def observe(scene: AuditSetup, target: Target) -> Observation:
    return ClientUpdates(scene).trial(target).view


def same_update(scene: AuditSetup, a: Target, b: Target) -> bool:
    one, two = observe(scene, a).update.gradient, observe(scene, b).update.gradient
    return all(torch.equal(one[n], two[n]) for n in one.keys() & two.keys())


def test_naive_and_knowing_servers_look_at_one_and_the_same_update(scene: AuditSetup, found: list[Target]) -> None:
    """A server that knows must not be handed a second draw of the defence's randomness."""
    here = [p for p in found if (p.look.round, p.defense, p.victim) == ("first", MASK, 0)]
    oblivious = next(p for p in here if p.server.name == "oblivious")
    for other in here:
        assert same_update(scene, oblivious, other)
    masks = [
        (observe(scene, replace(oblivious, victim=v)).update.gradient["fc.weight"] == 0).all(dim=0) for v in (0, 1)
    ]
    assert not torch.equal(*masks)  # every client draws for itself


def test_a_server_that_knows_gets_its_own_view(scene: AuditSetup, found: list[Target]) -> None:
    here = {p.server.name: p for p in found if (p.look.round, p.defense, p.victim) == ("first", MASK, 0)}
    assert "fc.weight" in observe(scene, here["oblivious"]).update.gradient
    assert "fc.weight" not in observe(scene, here["drop"]).update.gradient
    assert not observe(scene, here["oblivious"]).weights
    assert observe(scene, here["mask"]).weights.keys() == {"fc.weight"}


def test_the_control_is_undefended_and_the_rest_is_not(scene: AuditSetup, found: list[Target]) -> None:
    here = [p for p in found if p.look.round == "first" and p.victim == 0 and p.server.name == "oblivious"]
    (control,), (defended,) = ([p for p in here if p.defense == d and p.attack == "newton"] for d in ("none", MASK))
    zeros = [int((observe(scene, p).update.gradient["fc.weight"] == 0).all(dim=0).sum()) for p in (control, defended)]
    assert zeros[0] == 0
    assert zeros[1] > 0.3 * observe(scene, control).update.gradient["fc.weight"].shape[1]


def test_a_list_is_held_against_what_no_draw_of_the_client_changes(scene: AuditSetup) -> None:
    config = replace(scene.config, images=8, examples=4, tiers=("oblivious", "adaptive", "informed"))
    rounding = {"qsgd": build_defense("qsgd:levels=1,norm=max")}
    own = build_setup(config, scene.dataset, scene.model, rounding, {"newton": "newton"})
    listed = panel(own, [Snapshot("first", 1, "start", own.model, own.config.lr_of(1))])["candidates"]
    servers = {(p.defense, p.server.name) for p in listed}
    assert servers == {("none", "candidates"), ("qsgd", "candidates"), ("qsgd", "fingerprint")}
    trials = [ClientUpdates(own).trial(p) for p in listed if p.server.name == "fingerprint"]
    rows, _ = attack_rows(trials, attempt(trials), own.public)
    assert [row["identified"] for row in rows] == [1.0, 1.0]


def test_attacked_images_are_the_clients_and_the_gallery_is_public(scene: AuditSetup) -> None:
    held = torch.cat([scene.held_by(v).inputs for v in range(3)])
    assert torch.equal(held, scene.truth.inputs)
    assert len(scene.public.gallery) == 9
    distance = (held[:, None] - scene.public.gallery[None]).flatten(2).norm(dim=2)
    assert distance.min() > 0


def test_chunks_cover_everything_once_and_are_nearly_equal(found: list[Target]) -> None:
    many = found * 20
    parts = chunks(many)
    assert [p for part in parts for p in part] == many
    assert max(map(len, parts)) <= CHUNK
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_where_an_attack_refuses_one_view_the_others_still_run(
    scene: AuditSetup, found: list[Target], guess: object
) -> None:
    class Picky(type(guess)):  # type: ignore[misc]
        def reconstruct_many(self, seen: list[object], rngs: list[object]) -> object:
            if any(s is bad for s in seen):
                raise AttackError("not this one")
            return super().reconstruct_many(seen, rngs)

    picky = Picky()
    observed = ClientUpdates(scene)
    trials = [replace(observed.trial(p), attack=picky) for p in found[:3]]
    bad = trials[1].view
    results = attempt(trials)
    assert [isinstance(result, AttackError) for result in results] == [False, True, False]
    assert str(results[1]) == "not this one"
    rows, images = attack_rows(trials, results, scene.public)
    assert [row["kind"] for row in rows] == ["attack", "skip", "attack"]
    assert (rows[1]["why"], rows[2]["index"], len(images)) == ("not this one", 1, 2)


def test_an_update_that_cannot_be_made_is_skipped_and_says_why(scene: AuditSetup, guess: Attack) -> None:
    trial = Trial(UpdateError("no examples"), oblivious(), guess, torch.Generator(), about={"defense": "none"})
    assert attack_rows([trial], attempt([trial]), None)[0] == [
        {"kind": "skip", "defense": "none", "example": 0, "why": "no examples"}
    ]


def test_an_update_is_made_once_whoever_looks_at_it(
    scene: AuditSetup, found: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def counted(*args: Any, **named: Any) -> object:
        made.append(args)
        return real(*args, **named)

    real = panel_module.observe
    monkeypatch.setattr(panel_module, "observe", counted)
    observed = ClientUpdates(scene)
    trials = [observed.trial(target) for target in found]
    different = {(p.look.round, p.look.weights, p.defense, p.victim) for p in found}
    assert len(made) == len(different) < len(trials)
    monkeypatch.setattr(panel_module, "KEPT", 0)  # nothing may be kept: the same numbers again
    again = ClientUpdates(scene).trial(found[-1])
    assert all(torch.equal(g, trials[-1].view.update.gradient[n]) for n, g in again.view.update.gradient.items())


def test_a_view_is_worked_out_once_for_all_attacks_and_tiers(scene: AuditSetup, found: list[Target]) -> None:
    asked: list[torch.Tensor | None] = []

    def view(seen: Observation) -> Observation:
        asked.append(seen.labels)
        return replace(seen, labels=torch.tensor([7]))

    observed, knows = ClientUpdates(scene), Countermeasure("undo", "", view)
    first = next(p for p in found if p.defense == MASK)
    views = [observed.trial(replace(first, server=knows, attack=attack)).view for attack in ("newton", "dlg")]
    assert views[0].labels is views[1].labels
    patient = observed.trial(replace(first, server=replace(knows, tier="multi-round"))).view
    assert [labels is None for labels in asked] == [True] + [False] * 15  # the other rounds are of the same examples
    assert len(patient.rounds) == 15


@pytest.mark.parametrize(
    ("tier", "has"),
    [
        ("oblivious", {"public"}),
        ("adaptive", {"client", "public"}),
        ("informed", {"client", "public", "candidates"}),
        ("multi-round", {"client", "public", "rounds"}),
        ("malicious", {"client", "public"}),
    ],
)
def test_a_server_has_what_its_tier_has_and_no_more(
    scene: AuditSetup, found: list[Target], tier: Tier, has: set[str]
) -> None:
    seen = observe(scene, replace(found[-1], server=replace(oblivious(), tier=tier)))
    fields = ("client", "public", "candidates", "others", "rounds", "labels", "noise", "weights")
    held = {name: getattr(seen, name) for name in fields}
    assert {name for name, value in held.items() if value is not None and value not in ((), {})} == has


def test_a_client_is_fished_for_a_class_that_it_has(scene: AuditSetup) -> None:
    """By what the server reads off the client's honest update; so the control of clients of one example succeeds."""
    observed = ClientUpdates(replace(scene, config=replace(scene.config, tiers=("malicious",))))
    looks, refused = plant(observed, Snapshot("first", 1, "start", scene.model, scene.config.lr_of(1)))
    trials = [observed.trial(t) for t in panel(observed.scene, looks)["fishing"]]
    assert Counter(trial.about["defense"] for trial in trials) == {"none": 3, MASK: 3}
    assert {row["attack"] for row in refused} == {"trap"}
    found = attempt([trial for trial in trials if trial.about["defense"] == "none"])
    assert [isinstance(one, Reconstruction) and one.converged for one in found] == [True] * 3


def test_of_a_batch_the_example_that_was_fished_is_measured_and_the_control_succeeds(scene: AuditSetup) -> None:
    """Of eight examples, one of them alone in its class, and of eight of which several share it."""
    data, config = scene.dataset, replace(scene.config, tiers=("malicious",), images=16, examples=8)
    batches = build_setup(config, data, scene.model, {MASK: RandomMask()}, {"newton": "newton"})
    observed = ClientUpdates(batches)
    looks, _ = plant(observed, Snapshot("first", 1, "start", scene.model, scene.config.lr_of(1)))
    trials = [observed.trial(t) for t in panel(batches, looks)["fishing"] if t.defense == "none"]
    rows, _ = attack_rows(trials, attempt(trials), batches.public)
    assert len(rows) == 2  # one for each client
    truth = torch.cat([batches.held_by(v).labels for v in batches.victims])
    floor = floors(Batch(batches.truth.inputs, batches.truth.labels), batches.public)[0]
    for i, row in enumerate(rows):
        assert row["example"] // 8 == i
        counts = truth[8 * i : 8 * i + 8].bincount()
        assert counts[truth[row["example"]]] == counts[counts > 0].min()  # of the rarest class
        assert row["mse"] < 1e-4
        assert row["identified"] == 1
    assert [line.void for line in lines([*floor, *rows])] == [None]
