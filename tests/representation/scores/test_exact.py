"""Exact scores: equal to the definition, whatever the model, the layout, the chunks."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from gradveil.representation.jacobian import FunctionJacobian, Tape
from gradveil.representation.rows import exact_rows
from gradveil.representation.scores import leak_scores, linearise, row_norms
from reference.leak_scores import reference_jacobian, reference_scores
from reference.score_models import BUILDERS, make

EXPLICIT = sorted(set(BUILDERS) - {"instance norm"})


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("method", ["exact", "loop"])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_scores_follow_the_definition(name: str, method: str, training: bool) -> None:
    model, layer, x = make(name)
    model.train(training)
    assert_close(leak_scores(model, layer, x, method), reference_scores(model, layer, x), rtol=1e-9, atol=0)


@pytest.mark.parametrize("p", [1, inf])
@pytest.mark.parametrize("method", ["exact", "loop"])
@pytest.mark.parametrize("name", ["pooled", "wide", "normalised"])
def test_other_norms_measure_the_pseudo_inverse_of_each_row(name: str, method: str, p: float) -> None:
    model, layer, x = make(name)
    assert_close(leak_scores(model, layer, x, method, p=p), reference_scores(model, layer, x, p), rtol=1e-9, atol=0)


@pytest.mark.parametrize("p", [1, 2, inf])
@pytest.mark.parametrize("name", ["pooled", "residual", "normalised"])
def test_row_norms_are_those_of_the_jacobian(name: str, p: float) -> None:
    model, layer, x = make(name)
    r, norms = row_norms(model, layer, x, "exact", p=p)
    expected, rows = reference_jacobian(model, layer, x)
    assert_close(r, expected)
    assert_close(norms, torch.linalg.vector_norm(rows.flatten(2), p, dim=2))


@pytest.mark.parametrize("name", EXPLICIT)
def test_models_of_known_operations_need_no_automatic_differentiation(name: str) -> None:
    assert isinstance(linearise(*make(name)), Tape)


@pytest.mark.parametrize("name", ["instance norm"])
def test_models_with_other_operations_are_differentiated(name: str) -> None:
    assert isinstance(linearise(*make(name)), FunctionJacobian)


@pytest.mark.parametrize("name", ["even", "pooled", "wide", "residual", "attention"])
def test_little_memory_gives_the_same_answer_in_more_chunks(name: str) -> None:
    model, layer, x = make(name)
    assert_close(leak_scores(model, layer, x, "exact", memory=1), leak_scores(model, layer, x, "exact"))


@pytest.mark.parametrize("name", ["pooled", "attention"])
def test_memory_bounds_how_many_rows_go_together(name: str) -> None:
    jacobian = linearise(*make(name))
    one = jacobian.x.element_size() * jacobian.widest
    assert jacobian.widest >= max(jacobian.x.numel(), jacobian.r.numel())
    assert [jacobian.at_once(n * 8 * one) for n in (0, 1, 2, 5)] == [1, 1, 2, 5]
    assert jacobian.at_once(2**40) * jacobian.widest <= 2**21  # and the cache, on a CPU


@pytest.mark.parametrize("name", ["even", "pooled", "overlapping pools", "residual"])
def test_channels_last_inputs_and_models_score_the_same(name: str) -> None:
    model, layer, x = make(name)
    expected = leak_scores(model, layer, x, "exact")
    assert_close(leak_scores(model, layer, x.contiguous(memory_format=torch.channels_last), "exact"), expected)
    model = model.to(memory_format=torch.channels_last)
    assert_close(leak_scores(model, layer, x.transpose(2, 3).contiguous().transpose(2, 3), "exact"), expected)


@given(
    seed=st.integers(0, 5),
    shift=st.integers(1, 3),
    name=st.sampled_from(["even", "batch norm", "residual", "attention"]),
)
def test_permuting_the_batch_permutes_the_scores(seed: int, shift: int, name: str) -> None:
    model, layer, x = make(name, examples=4, seed=seed)
    order = torch.arange(4).roll(shift)
    assert_close(leak_scores(model, layer, x[order], "exact"), leak_scores(model, layer, x, "exact")[order])


@pytest.mark.parametrize("method", ["exact", "loop", "sketch", "moment"])
def test_scores_do_not_change_when_both_the_entry_and_its_gradient_double(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 2)).double()
    x = torch.rand(3, 6, dtype=torch.float64)
    before, (_, norms) = leak_scores(model, "1", x, method), row_norms(model, "1", x, method)
    with torch.no_grad():
        model[0].weight *= 2
    assert_close(leak_scores(model, "1", x, method), before)
    assert_close(row_norms(model, "1", x, method)[1], 2 * norms)


@given(factor=st.floats(0.1, 10))
def test_an_input_in_other_units_scales_the_scores(factor: float) -> None:
    model, layer, x = make("even")
    other = nn.Sequential(*model)
    other[0] = nn.Conv2d(1, 3, 5, 2, 2).double()
    with torch.no_grad():
        other[0].weight.copy_(model[0].weight / factor)
        other[0].bias.copy_(model[0].bias)
    assert_close(leak_scores(other, layer, x * factor, "exact"), leak_scores(model, layer, x, "exact") * factor)


def test_the_score_of_a_linear_map_is_known_in_closed_form() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    x = torch.tensor([[1.0, 1.0]])
    assert_close(leak_scores(model, "1", x, "exact"), torch.tensor([[7 / 5, 2 / 2]]))
    assert_close(leak_scores(model, "1", x, "exact", p=1), torch.tensor([[7 * 7 / 25, 2 * 2 / 4]]))
    assert_close(leak_scores(model, "1", x, "exact", p=inf), torch.tensor([[7 * 4 / 25, 2 * 2 / 4]]))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize("name", ["even", "pooled", "residual", "attention"])
def test_other_float_types_come_close_to_double(name: str, dtype: torch.dtype, rtol: float) -> None:
    model, layer, x = make(name)
    x = x.to(dtype).double()
    model = model.to(dtype)
    found = leak_scores(model, layer, x.to(dtype), "exact")
    expected = leak_scores(model.double(), layer, x, "exact")
    assert found.shape == expected.shape
    error = ((found.double() - expected).abs() / expected.clamp_min(1e-3)).median()
    assert error < rtol


def test_gradients_too_small_to_square_in_single_precision_are_still_measured() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e-25)
    x = torch.ones(1, 3)
    for method in ("exact", "loop", "sketch"):
        norms = row_norms(model, "1", x, method)[1]
        assert_close(norms, torch.full((1, 2), 1e-25 * 3**0.5), rtol=0.9 if method == "sketch" else 1e-5, atol=0)
        assert bool((norms > 0).all())


def test_rows_through_padding_and_a_cut_are_those_of_the_entries_that_are_there() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 2, 2), nn.ZeroPad2d((1, 0, -1, 2)), nn.Flatten(), nn.Linear(9, 2)).double()
    x = torch.rand(2, 1, 5, 4, dtype=torch.float64)
    dense = torch.autograd.functional.jacobian(lambda z: model[:3](z).sum(0), x).flatten(2)  # (L, N, d)
    assert_close(row_norms(model, "3", x, "exact")[1], dense.norm(dim=2).t())


def test_dead_units_are_skipped_and_cost_nothing_in_accuracy() -> None:
    model, layer, x = make("pooled", examples=5)
    tape = linearise(model, layer, x)
    assert isinstance(tape, Tape)
    with_skip, without = exact_rows(tape, (2.0,), 2**20), exact_rows(tape, (2.0,), 2**20, skip=False)
    assert bool((with_skip.r == 0).any()), "the example has no dead unit to skip"
    assert_close(with_skip.norms[2.0], without.norms[2.0])
