import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.defenses.representation import RandomMask
from gradveil.representation.selection import (
    largest,
    largest_live,
    last_by_rank,
    last_by_top,
)

rows = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, float("inf")]), min_size=1, max_size=12)


def by_sorting(keys: list[float], count: int) -> set[int]:
    return set(sorted(range(len(keys)), key=lambda i: (-keys[i], i))[:count])


def chosen(mask: Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


@given(rows, st.integers(0, 14))
def test_the_largest_are_taken_and_of_equal_ones_the_first(keys: list[float], count: int) -> None:
    assert chosen(largest(torch.tensor([keys]), count)[0]) == by_sorting(keys, count)


@given(rows, st.integers(1, 12))
def test_both_ways_to_find_the_last_one_agree(keys: list[float], count: int) -> None:
    both, count = torch.tensor([keys, keys[::-1]]), min(count, len(keys))
    assert torch.equal(last_by_top(both, count), last_by_rank(both, count))


@given(rows, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 14))
def test_the_count_is_exact_and_dead_entries_never_spend_it(keys: list[float], live: list[bool], count: int) -> None:
    r = torch.tensor([[float(alive) for alive in live[: len(keys)]]])

    mask = largest_live(r, torch.tensor([keys]), count)[0]

    assert int(mask.sum()) == min(count, int(r.sum()))
    assert not bool((mask & (r[0] == 0)).any())


def test_a_live_entry_with_score_zero_comes_before_a_dead_one() -> None:
    mask = largest_live(torch.tensor([[0.0, 0.0, 3.0]]), torch.zeros(1, 3), 1)
    assert mask.tolist() == [[False, False, True]]


def test_an_entry_without_a_score_is_taken_first() -> None:
    mask = largest_live(torch.ones(1, 3), torch.tensor([[1.0, torch.nan, 2.0]]), 1)
    assert mask.tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("share", "count", "expected"), [(0.4, None, 4), (0.0, None, 0), (1.0, None, 10), (0.4, 99, 10)]
)
def test_the_budget_is_a_share_or_a_count_and_never_more_than_there_is(
    share: float, count: int | None, expected: int
) -> None:
    assert RandomMask(share, count).budget(torch.zeros(3, 2, 5)) == expected
