"""Every defence of the zoo has its truth and keeps to the contract; the audit finds the truth of a few of them."""

import copy
import runpy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator, nn

from docpages import blocks, section
from gradveil.auditing.audit import audit
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import DEFENSES, Defense, build
from gradveil.registry import describe
from gradveil.threats import setup as scene
from gradveil.threats.probes import Probed
from gradveil.tree import Params, is_finite
from gradveil.types import Batch, Observation, Update
from zoo import keeper
from zoo.keeper import SCENE, Kept, is_right, names, opened

PAGE = section("how-to/extend.md", "## A broken defence")
QUICK = replace(SCENE, images=2, tiers=("oblivious", "adaptive"), attacks=("newton",))
UNDECLARED = ["constant_seed", "backwards"]  # what only a probe can find
FEW = [*UNDECLARED, "strong_gaussian"]
OUTSIDE = ("beside the numbers", "crashes")  # families that do not keep to what a defence may do


@pytest.fixture(params=names())
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    if request.param.startswith("dp_"):
        pytest.importorskip("opacus")
    with opened(request.param) as found:
        yield found[request.param]


def sent(defense: Defense, model: nn.Module, batch: Batch, seed: int = 0) -> Params:
    """What a client sends after one step, through all places of the defence."""
    rng = Generator().manual_seed(seed)
    gradient = step_gradient(model, batch, defense, rng)
    return defense.on_update(Update(gradient, len(batch), lr=0.1), rng).gradient


def test_there_are_enough_of_every_kind() -> None:
    assert len(names("broken", "unseen")) >= 100
    assert len(names("unseen")) >= 30
    assert len(names("sound")) >= 20
    assert len(set(names())) == len(names())


def test_it_has_its_truth(kept: Kept, model: nn.Module) -> None:
    truth, declared = kept.truth, build(kept.name).servers(model)
    assert truth.why.endswith(".")
    assert truth.family
    assert truth.declares == " ".join(c.name for c in declared)
    assert truth.tier in ("adaptive", "multi-round")


def test_it_keeps_to_the_contract(kept: Kept, model: nn.Module, batch: Batch) -> None:
    if kept.truth.family in OUTSIDE:
        pytest.skip("it is broken by not keeping to it")
    defense, state = build(kept.name), torch.get_rng_state()
    before = copy.deepcopy((batch, model.state_dict()))

    update = sent(defense, model, batch)

    assert {name: g.shape for name, g in update.items()} == {name: p.shape for name, p in model.named_parameters()}
    assert is_finite(update)
    assert all(g.dtype == torch.float32 and not g.requires_grad for g in update.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before[0].inputs, batch.inputs)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before[1].items())
    assert build(describe(defense)) == defense
    seen = Observation(model, Update(update, 3, lr=0.1), (1, 8, 8), 5)
    assert all(counter.view(seen).visible for counter in defense.servers(model))


def test_only_those_that_say_so_draw_from_elsewhere(kept: Kept, model: nn.Module, batch: Batch) -> None:
    if kept.truth.family == "crashes":
        pytest.skip("it ends with an error")
    defense, again = build(kept.name), build(kept.name)
    sent(defense, model, batch, seed=1)  # what is kept from one call to the next must not matter
    first, other = sent(defense, model, batch), sent(again, model, batch)
    same = all(torch.equal(first[name], other[name]) for name in first)
    assert same == kept.truth.repeats or "clock" in kept.name or "second" in kept.name or "uptime" in kept.name


def test_nothing_of_the_zoo_stays_registered() -> None:
    before = DEFENSES.names()
    with opened("constant_seed"):
        assert "constant_seed" in DEFENSES.names()
    assert DEFENSES.names() == before


@pytest.fixture(scope="module")
def with_the_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The zoo with the defence that the page adds."""
    folder = tmp_path_factory.mktemp("zoo")
    for kind in keeper.HALVES:
        shutil.copytree(keeper.FOLDER / kind, folder / kind)
    (code,) = blocks(PAGE, "python")
    (folder / "broken" / "backwards.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "FOLDER", folder)
        patch.setattr("gradveil.auditing.audit.last_resort", lambda *args: {})  # it learns for ten seconds
        yield


def wrong(wanted: Sequence[str], out: Path) -> list[str]:
    """Audit these and return those whose truth the audit does not find."""
    with opened(*wanted) as kept:
        found = audit(defenses=wanted, config=QUICK, out=out).verdicts
    return [v.defense for v in found if v.defense != "none" and not is_right(kept[v.defense], v)]


@pytest.mark.usefixtures("with_the_page")
def test_the_audit_finds_the_truth_about_a_few(tmp_path: Path) -> None:
    assert wrong(FEW, tmp_path) == []


@pytest.mark.usefixtures("with_the_page")
def test_without_probes_the_zoo_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "probe", lambda *args, **kwargs: Probed())
    assert wrong(UNDECLARED, tmp_path) == UNDECLARED


def test_results_are_drawn_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Path(__file__).resolve().parents[2] / "tools"
    monkeypatch.syspath_prepend(str(tools))
    zoo = runpy.run_path(str(tools / "zoo.py"), run_name="zoo_tool")
    found = zoo["Result"]("twins", "a scene", "a family", "whiten", False, {}, "-", ("An error.",), "-", "", True, 1.0)
    assert "WRONG  twins" in zoo["table"]([found])
    assert "0 of 1 broken defences that can be found are exposed (missed: twins)" in zoo["summary"]([found])
