import torch
from torch import Generator, nn

from gradveil.defenses.compose import Compose
from gradveil.federated.step import step_gradient
from gradveil.modules import representation
from gradveil.protection.defense import build
from gradveil.registry import describe
from gradveil.types import Batch, Observation, Update


def test_parts_act_in_their_places_and_in_order(model: nn.Module, batch: Batch) -> None:
    both = build("representation:share=0.4+pruning:share=0.5")
    first = step_gradient(model, batch, build("representation:share=0.4"), Generator())

    found = step_gradient(model, batch, both, Generator())

    expected = build("pruning:share=0.5").on_gradient(first, Generator())
    assert all(torch.equal(found[name], g) for name, g in expected.items())
    assert both.acts_on == {"representation", "gradient"}


def test_the_order_is_the_one_given(rng: Generator) -> None:
    g = {"a": torch.randn(1000, generator=rng)}
    noise_last = build("pruning:share=0.9+gaussian:scale=0.1").on_gradient(g, Generator().manual_seed(0))
    noise_first = build("gaussian:scale=0.1+pruning:share=0.9").on_gradient(g, Generator().manual_seed(0))
    assert int((noise_last["a"] == 0).sum()) == 0
    assert int((noise_first["a"] == 0).sum()) == 900


def test_each_layer_is_changed_by_the_parts_that_defend_it(model: nn.Module, batch: Batch) -> None:
    both = build("representation:layer=2,share=0.5+random_mask:layer=5,share=0.25")
    assert both.layers(model) == ("2", "5")
    r = representation(model, "2", batch.inputs)
    changed = both.perturb(model, "2", batch.inputs, r, Generator())
    assert torch.equal(changed, both.parts[0].perturb(model, "2", batch.inputs, r, Generator()))  # type: ignore[attr-defined]
    assert both.asked(model, "2", r) == 3 * 32
    assert both.asked(model, "5", r.flatten(1)) == 3 * 16


def test_a_server_undoes_all_parts_at_once(model: nn.Module) -> None:
    both = build("representation+gaussian:scale=0.1")
    names = [c.name for c in both.adaptive(model)]
    assert names == ["drop+whiten", "mask+whiten"]  # the analytic attack is another than whiten's
    gradient = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    drop = both.adaptive(model)[0]
    view = drop.view(Observation(model, Update(gradient), (1, 8, 8), 5))
    assert "5.weight" not in view.visible
    assert view.noise["0.weight"] == 0.1
    assert drop.attack == "newton"


def test_it_is_described_by_its_parts() -> None:
    spec = "representation:share=0.1+gaussian:scale=0.5+pruning"
    assert describe(build(spec)) == spec
    assert build(describe(Compose((build(spec), build("laplace"))))) == build(f"{spec}+laplace")


def test_no_parts_change_nothing(model: nn.Module, rng: Generator) -> None:
    g = {"a": torch.ones(3)}
    assert Compose().on_gradient(g, rng) is g
    assert [c.name for c in Compose().adaptive(model)] == ["plain"]
