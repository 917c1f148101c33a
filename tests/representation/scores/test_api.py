"""Manners of ``leak_scores``: the edge cases, the errors, and what it leaves untouched."""

import copy
from math import inf

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradveil
from gradveil.errors import LayerError, ScoreError
from gradveil.representation.scores import METHODS, leak_scores, row_norms
from reference.score_models import make

TRAINED_MODELS = ["batch norm", "instance norm", "dropout", "attention with dropout", "even"]
UNKNOWN_TO_MOMENT = {"attention with dropout", "instance norm"}


def _methods(name: str) -> list[str]:
    return [m for m in METHODS if m != "moment" or name not in UNKNOWN_TO_MOMENT]


@pytest.mark.parametrize("method", METHODS)
def test_a_dead_unit_scores_zero_and_not_nan(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.copy_(torch.tensor([-100.0, 1.0]))
    found = leak_scores(model, "2", torch.ones(2, 3), method)
    assert found[:, 0].tolist() == [0.0, 0.0]
    assert bool((found[:, 1] > 0).all())


@pytest.mark.parametrize("method", METHODS)
def test_a_live_entry_without_gradient_scores_infinity(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
        model[0].bias.fill_(0.5)
    found = leak_scores(model, "1", torch.ones(2, 3), method)
    assert found[:, 0].tolist() == [inf, inf]
    assert bool(torch.isfinite(found[:, 1]).all())


def test_a_zero_entry_with_a_gradient_scores_zero() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    assert leak_scores(model, "1", torch.tensor([[0.0, -2.0, 3.0]]), "exact").tolist() == [[0.0, 2.0, 3.0]]


@pytest.mark.parametrize("p", [1, inf])
def test_dead_and_gradient_free_entries_keep_their_scores_in_other_norms(p: float) -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
        model[0].bias = nn.Parameter(torch.tensor([0.0, 0.0, 1.0]))
    found = leak_scores(model, "2", torch.ones(1, 2), "exact", p=p)
    assert_close(found, torch.tensor([[0.0, 2.0 if p == 1 else 1.0, inf]]))


@pytest.mark.parametrize("name", TRAINED_MODELS)
def test_the_model_its_buffers_and_the_random_state_are_left_alone(name: str) -> None:
    model, layer, x = make(name)
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state, kept = torch.get_rng_state(), x.clone()
    for method in _methods(name):
        leak_scores(model, layer, x, method)
        assert torch.equal(torch.get_rng_state(), state), method
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(x, kept)
    assert not x.requires_grad


@pytest.mark.parametrize("name", TRAINED_MODELS)
def test_scores_belong_to_the_representation_that_the_next_forward_pass_has(name: str) -> None:
    model, layer, x = make(name)
    caught: list[Tensor] = []
    found = {method: row_norms(model, layer, x, method)[0] for method in _methods(name)}
    model.get_submodule(layer).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.random.fork_rng():
        model(x)
    for method, r in found.items():
        assert_close(r, caught[0].detach().flatten(1), msg=method)


@pytest.mark.parametrize("method", METHODS)
def test_scores_carry_no_gradient_and_take_inputs_that_do(method: str) -> None:
    model, layer, x = make("even")
    found = leak_scores(model, layer, x.requires_grad_(), method)
    assert not found.requires_grad
    assert x.grad is None


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_repeatable_and_shaped_by_example_and_entry(method: str) -> None:
    model, layer, x = make("pooled", examples=4)
    found = leak_scores(model, layer, x, method, probes=6)
    assert found.shape == (4, 6)
    assert torch.equal(found, leak_scores(model, layer, x, method, probes=6))


@pytest.mark.parametrize("method", METHODS)
def test_one_example_gets_the_scores_it_gets_in_a_batch(method: str) -> None:
    model, layer, x = make("even")
    whole = leak_scores(model, layer, x, method)
    alone = torch.cat([leak_scores(model, layer, x[n : n + 1], method) for n in range(len(x))])
    assert_close(alone, whole)


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_has_no_scores(method: str) -> None:
    model, layer, x = make("linear")
    assert leak_scores(model, layer, x[:0], method).shape == (0, 5)


def test_no_layer_means_the_last_fully_connected_one() -> None:
    model, layer, x = make("even")
    assert torch.equal(leak_scores(model, None, x), leak_scores(model, layer, x))


def test_any_module_will_do_as_the_layer() -> None:
    model, _, x = make("pooled")
    assert leak_scores(model, "2", x, "exact").shape == (3, 4 * 5 * 5)


def test_the_input_of_the_first_layer_scores_its_own_size() -> None:
    model, _, x = make("even")
    assert_close(leak_scores(model, "0", x, "exact"), x.abs().flatten(1))


def test_it_is_the_public_name() -> None:
    assert gradveil.leak_scores is leak_scores


@pytest.mark.parametrize("name", ["even", "attention"])
def test_mixed_precision_around_it_changes_little(name: str) -> None:
    model, layer, x = make(name)
    model, x = model.float(), x.float()
    expected = leak_scores(model, layer, x, "exact")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = leak_scores(model, layer, x, "exact")
    assert ((found.double() - expected).abs() / expected.clamp_min(1e-3)).median() < 0.1


@pytest.mark.parametrize("name", ["even", "residual", "attention"])
def test_a_hook_of_the_layer_may_ask_for_scores_while_the_model_is_running(name: str) -> None:
    model, layer, x = make(name)
    found: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda *_: found.append(leak_scores(model, layer, x, "exact"))
    )
    model(x)
    handle.remove()
    assert_close(found[0], leak_scores(model, layer, x, "exact"))


def test_a_compiled_model_is_scored_as_what_it_wraps() -> None:
    class Wrapper(nn.Module):  # the shape of torch.compile's
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the compiled code must not run")

    model, layer, x = make("even")
    for path in (layer, f"_orig_mod.{layer}"):
        assert torch.equal(leak_scores(Wrapper(model), path, x), leak_scores(model, layer, x))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "exat"}, "Did you mean 'exact'"),
        ({"p": 3}, "Give 1, 2 or inf"),
        ({"p": 1, "method": "sketch"}, "Use exact"),
        ({"probes": 0}, "at least 1"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], says: str) -> None:
    model, layer, x = make("linear")
    with pytest.raises(ScoreError, match=says):
        leak_scores(model, layer, x, **change)  # type: ignore[arg-type]


def test_whole_numbers_are_refused() -> None:
    model, layer, x = make("linear")
    with pytest.raises(ScoreError, match="floating point"):
        leak_scores(model, layer, x.long())


def test_an_unknown_layer_is_named_with_a_hint() -> None:
    model, _, x = make("residual")
    with pytest.raises(LayerError, match="Did you mean 'gate'"):
        leak_scores(model, "gaet", x)


def test_a_layer_that_is_never_reached_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_module("spare", nn.Linear(2, 2))
    model.forward = model[0].forward  # type: ignore[method-assign]
    with pytest.raises(LayerError, match="never reached"):
        leak_scores(model, "spare", torch.ones(1, 2))


def test_a_layer_that_mixes_examples_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), nn.Linear(6, 2))
    with pytest.raises(ScoreError, match="must count them"):
        leak_scores(model, "2", torch.ones(3, 2), "exact")
