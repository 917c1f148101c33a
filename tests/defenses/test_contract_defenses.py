"""What every registered defence keeps to, by its name alone: a new file is tested without a change here."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Generator, nn

from gradveil.federated.client import step_gradient
from gradveil.modules import representation
from gradveil.protection.defense import DEFENSES, Defense, accounted, build
from gradveil.protection.protect import protect
from gradveil.protection.records import Held
from gradveil.registry import describe
from gradveil.tree import Params, is_finite
from gradveil.types import Batch, Observation, Update

SPECS = [
    *DEFENSES.names(), "representation+gaussian:scale=0.1", 
    "representation_authors:offset=0.1", "representation:layer=2/5", "pruning:share=0.5,on=update",
    "laplace:on=weights,relative=true,per=tensor", "gaussian:relative=true,on=update", "qsgd:levels=1,norm=max",
    "pruning:share=0.5+qsgd", "pruning+qsgd:levels=4,norm=max,on=update", "representation+qsgd",
]  # fmt: skip


@pytest.fixture(params=SPECS)
def defense(request: pytest.FixtureRequest) -> Defense:
    return build(request.param)


def everything(defense: Defense, model: nn.Module, batch: Batch, seed: int = 0) -> Params:
    """One local step and the update made of it, through all places of the defence."""
    rng = Generator().manual_seed(seed)
    gradient = step_gradient(model, batch, defense, rng)
    return defense.on_update(Update(gradient, len(batch), lr=0.1), rng).gradient


def test_names_and_shapes_are_kept_and_all_is_finite(defense: Defense, model: nn.Module, batch: Batch) -> None:
    found = everything(defense, model, batch)
    assert {name: g.shape for name, g in found.items()} == {name: p.shape for name, p in model.named_parameters()}
    assert is_finite(found)
    assert all(g.dtype == torch.float32 and not g.requires_grad for g in found.values())


def test_a_seed_repeats_it(defense: Defense, model: nn.Module, batch: Batch) -> None:
    first, again = everything(defense, model, batch), everything(defense, model, batch)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_global_random_state_is_left_alone(defense: Defense, model: nn.Module, batch: Batch) -> None:
    before = torch.get_rng_state()
    everything(defense, model, batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_arguments_are_not_changed(defense: Defense, model: nn.Module, batch: Batch, rng: Generator) -> None:
    x, r = batch.inputs.clone(), representation(model, "5", batch.inputs)
    gradient = {name: torch.randn(p.shape, generator=rng) for name, p in model.named_parameters()}
    kept = copy.deepcopy((x, r, gradient, dict(model.state_dict())))

    defense.on_batch(Batch(x, batch.labels), rng)
    for layer in defense.layers(model):
        seen = representation(model, layer, x)
        before = seen.clone()
        defense.perturb(model, layer, x, seen, rng)
        assert torch.equal(seen, before)
    defense.on_gradient(gradient, rng)
    defense.on_update(Update(gradient), rng)

    now = (x, r, gradient, dict(model.state_dict()))
    assert torch.equal(kept[0], now[0])
    for was, after in ((kept[2], now[2]), (kept[3], now[3])):
        assert all(torch.equal(was[name], after[name]) for name in was)


def test_no_hook_is_left_on_the_model(defense: Defense, model: nn.Module, batch: Batch) -> None:
    everything(defense, model, batch)
    protect(model, defense).remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_it_says_what_a_server_that_knows_it_would_do(defense: Defense, model: nn.Module, batch: Batch) -> None:
    seen = Observation(model, Update(everything(defense, model, batch), 3, lr=0.1), (1, 8, 8), 5)
    found = defense.servers(model)
    assert found
    assert len({c.name for c in found}) == len(found)
    for counter in found:
        assert counter.why.endswith(".")
        assert counter.view(seen).visible


def test_what_no_draw_changes_is_what_a_server_makes_of_the_plain_gradient(
    defense: Defense, model: nn.Module, batch: Batch
) -> None:
    """Where a defence has a fingerprint: the same under every draw, and of the gradient itself, without any."""
    plain = step_gradient(model, batch, build("none"), Generator())
    update = Update(plain, 3, lr=0.1)
    seen, look = Observation(model, update, (1, 8, 8), 5), defense.fingerprint
    if look is None:
        return
    for seed in range(3):
        rng = Generator().manual_seed(seed)
        sent = defense.on_update(replace(update, gradient=defense.on_gradient(plain, rng)), rng)
        view = look(replace(seen, update=sent))
        made = view.sent(plain)
        for name, g in view.update.gradient.items():
            assert g.shape == plain[name].shape
            torch.testing.assert_close(g, made[name])


def test_its_spec_builds_it_again(defense: Defense) -> None:
    assert build(describe(defense)) == defense


def test_it_acts_where_it_says(defense: Defense, model: nn.Module, batch: Batch) -> None:
    def differs(a: Params, b: Params) -> bool:
        return any(not torch.equal(a[name], b[name]) for name in a)

    rng = Generator().manual_seed(0)
    plain = step_gradient(model, batch, build("none"), rng)
    acted = set()
    if not torch.equal(defense.on_batch(batch, rng).inputs, batch.inputs):
        acted.add("batch")
    for layer in defense.layers(model):
        r = representation(model, layer, batch.inputs)
        if not torch.equal(defense.perturb(model, layer, batch.inputs, r, rng), r):
            acted.add("representation")
    records = Held({name: torch.stack([g, g]) for name, g in plain.items()})
    if differs(accounted(defense).on_records(records, 2, rng), plain):
        acted.add("records")
    if differs(defense.on_gradient(plain, rng), plain):
        acted.add("gradient")
    if differs(defense.on_update(Update(plain), rng).gradient, plain):
        acted.add("update")
    assert acted == defense.acts_on
