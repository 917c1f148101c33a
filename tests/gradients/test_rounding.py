"""Bounds of lengths hold in exact arithmetic for every kind of layer, and sums are as near as is said."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faults.clip_search import FAMILIES, Draw, exact_norms, layer_of, numbers, seen_of
from gradveil.protection.layers import KINDS, LayerRecord
from gradveil.protection.records import (
    BLOCK,
    LONG,
    MAPPED,
    MASS,
    SLACK,
    Held,
    clip_factors,
    products,
    products_error,
    records_in_a_chunk,
    squares,
    sum_of_held,
    unit,
)

SEEDS = st.integers(0, 10**6)


def test_every_kind_of_layer_is_searched() -> None:
    """A kind that is added must be among those that the search and the properties below draw."""
    drawn = {type(layer_of(family, Draw(seed))[0]) for family in FAMILIES for seed in range(80)}
    assert drawn == set(KINDS)


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=SEEDS)
def test_no_length_is_below_the_true_one(family: str, seed: int) -> None:
    draw = Draw(seed)
    seen, said = seen_of(family, draw, draw.of(1, 4))
    for which in seen.trained:
        norms, masses = seen.lengths_of(which)
        exact = exact_norms(seen, which) if seen.formed and which == "weight" else own_numbers(seen, which)
        known = norms.isfinite()
        assert bool((norms[known] >= exact[known] * (1 - 1e-12)).all()), said
        assert bool((norms <= masses * (1 + 1e-12))[known].all()), said


def own_numbers(seen: LayerRecord, which: str) -> Tensor:
    """Return the square norms (K, N) of gradients that are summed as they are held."""
    return seen.held(which).double().square().flatten(2).sum(2)


@given(seed=SEEDS)
def test_lengths_of_held_numbers_are_bounds_in_exact_arithmetic(seed: int) -> None:
    draw = Draw(seed)
    values, said = numbers(draw, (1, 3, draw.of(1, 5, 700, 4096, 4100)), [])
    held = values[0].to(draw.of(torch.float32, torch.bfloat16, torch.float16, torch.float64))
    for row, bound in zip(held, squares(held, 1).tolist(), strict=True):
        if bool(row.isfinite().all()) and bound < float("inf"):
            assert sum((Fraction(v) ** 2 for v in row.tolist()), Fraction(0)) <= Fraction(bound), said


@given(seed=SEEDS)
def test_lengths_are_near_where_nothing_is_extreme(seed: int) -> None:
    draw = Draw(seed)
    seen, said = seen_of("positions", draw, 4)
    plain = type(seen)(seen.layer, "", torch.randn_like(seen.a), torch.randn_like(seen.delta))
    for which in plain.trained:
        torch.testing.assert_close(plain.lengths_of(which)[0], exact_norms(plain, which), rtol=0.02, atol=0, msg=said)


@given(seed=SEEDS, count=st.sampled_from([0, 1, 127, 128, 129, 300, 1024]))
def test_sums_in_chunks_are_those_in_float64(seed: int, count: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    each, weights = torch.randn(2, count, 3, 2, generator=rng), torch.rand(2, count, generator=rng)
    found = sum_of_held(each, weights, 1.0)
    wanted = torch.einsum("kn,knab->kab", weights.double(), each.double())
    size = records_in_a_chunk(1, 1.0, torch.float32)
    chunks = count // size + 1
    u = (size + chunks + 1) * unit(torch.float32)
    room = 1.1 * u * torch.einsum("kn,knab->kab", weights.double(), each.double().abs())
    assert bool(((found - wanted).abs() <= room).all())
    assert found.dtype == torch.float32


def test_a_sum_that_is_long_stays_in_float64() -> None:
    each = torch.ones(1, LONG + 1, 1)
    assert sum_of_held(each, torch.ones(1, LONG + 1), 1.0).dtype == torch.float64
    assert sum_of_held(each[:, :-1], torch.ones(1, LONG), 1.0).dtype == torch.float32


@given(seed=SEEDS)
def test_products_are_off_by_what_is_said(seed: int) -> None:
    draw = Draw(seed)
    size, rank = draw.of(1, 255, 256, 5000), draw.of(1, 9)
    values, _ = numbers(draw, (1, 3, size), [])
    values = values[0].float()
    rows = torch.nn.functional.normalize(draw.normal(rank, size)).float()
    exact = values.double() @ rows.double().T
    norms = squares(values, 1)
    room = products_error(norms, norms, rank, 0, torch.float32) * 1.0001
    known = norms.isfinite()
    assert bool((torch.linalg.vector_norm(products(values, rows) - exact, dim=1) <= room)[known].all())


def test_chunks_leave_the_room_that_the_proof_uses() -> None:
    u = unit(torch.float32)
    for rows in (1, 2, 7, 64, 197, 1024, 5000):
        for mass in (1.0, MASS, MAPPED):
            size = records_in_a_chunk(rows, mass, torch.float32)
            assert size**2 * rows * mass <= 2**14
            assert size == 0 or size & (size - 1) == 0
    assert records_in_a_chunk(1, 1.0, torch.float32) == 128
    assert (1 + 2 * u * MAPPED) / (1 + SLACK) + 2 * 3 * 2**14 * u + 2 * 2 * LONG * u < 1 - 1e-3
    assert 2 * BLOCK * u < SLACK


def test_factors_keep_the_mass_within_its_room() -> None:
    norms, masses = torch.tensor([1.0, 1e-8, 1e-8]).double(), torch.tensor([1.0, 1e6, torch.inf]).double()
    factors = clip_factors(norms, 1.0, masses)
    assert factors[2] == 0
    assert bool((factors[:2] * masses[:2].sqrt() <= MASS).all())


def test_a_number_that_is_not_finite_takes_its_record_out_wherever_it_is() -> None:
    held = Held({"weight": torch.ones(3, 2), "bias": torch.tensor([[0.0], [torch.nan], [torch.inf]])})
    factors = clip_factors(held.square_norms(), 1.0, held.square_masses())
    assert (factors > 0).tolist() == [True, False, False]
    torch.testing.assert_close(held.weighted_sum(factors)["weight"], factors[0].float().expand(2))


def test_no_record_at_all_sums_to_nothing() -> None:
    held = Held({"weight": torch.zeros(0, 2, 3), "scale": torch.zeros(0)})
    assert held.square_norms().shape == (0,)
    assert {n: g.tolist() for n, g in held.weighted_sum(torch.ones(0)).items()} == {
        "weight": [[0.0] * 3] * 2,
        "scale": 0.0,
    }
