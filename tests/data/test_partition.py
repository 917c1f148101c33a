"""Every way of dealing out examples: disjoint, exact, seeded, and clear about what cannot be done."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import gradveil
from gradveil.data.partition import PARTITIONS, partition
from gradveil.errors import DataError, SpecError

labels_strategy = st.lists(st.integers(0, 4), min_size=40, max_size=120).map(np.array)


def disjoint(parts: list[np.ndarray]) -> bool:
    joined = np.concatenate(parts)
    return len(joined) == len(set(joined.tolist()))


@given(labels=labels_strategy, devices=st.integers(1, 10), seed=st.integers(0, 99))
def test_iid_covers_everything_in_equal_parts(labels: np.ndarray, devices: int, seed: int) -> None:
    parts = partition(labels, f"iid:devices={devices}", seed)
    assert len(parts) == devices
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_iid_on_sorted_data_mixes_the_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    for part in partition(labels, "iid:devices=10,per_device=90", 0):
        assert len(part) == 90
        assert len(np.unique(labels[part])) >= 8


@given(
    labels=labels_strategy,
    devices=st.integers(1, 6),
    classes=st.integers(1, 3),
    per_class=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_classes_gives_exactly_k_classes_with_n_examples_each(
    labels: np.ndarray, devices: int, classes: int, per_class: int, seed: int
) -> None:
    blocks = np.bincount(labels, minlength=5) // per_class
    feasible = np.minimum(blocks, devices).sum() >= devices * classes  # Gale-Ryser for equal rows
    spec = f"classes:devices={devices},classes={classes},per_class={per_class}"
    if not feasible:
        with pytest.raises(DataError):
            partition(labels, spec, seed)
        return
    parts = partition(labels, spec, seed)
    assert len(parts) == devices
    assert disjoint(parts)
    for part in parts:
        found, counts = np.unique(labels[part], return_counts=True)
        assert len(found) == classes
        assert (counts == per_class).all()


@pytest.mark.parametrize("per_class", [100, 20])
def test_the_papers_split_is_exact_and_uses_every_class_equally_often(per_class: int) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    parts = gradveil.partition(labels, f"classes:devices=100,classes=2,per_class={per_class}", 3)
    assert len(parts) == 100
    assert disjoint(parts)
    pairs = [tuple(np.unique(labels[part])) for part in parts]
    assert all(len(part) == 2 * per_class for part in parts)
    assert np.bincount(np.concatenate(pairs)).tolist() == [20] * 10
    assert len(set(pairs)) > 20  # not the same pairs over and over


@given(labels=labels_strategy, devices=st.integers(1, 8), shards=st.integers(1, 3), seed=st.integers(0, 99))
def test_shards_are_equal_disjoint_and_few_classed(labels: np.ndarray, devices: int, shards: int, seed: int) -> None:
    assume(devices * shards <= len(labels))
    parts = partition(labels, f"shards:devices={devices},shards={shards}", seed)
    size = len(labels) // (devices * shards)
    assert disjoint(parts)
    assert all(len(part) == shards * size for part in parts)


def test_a_shard_holds_neighbours_in_the_sorted_order() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    parts = partition(labels, "shards:devices=10,shards=2,size=50", 0)
    assert all(len(part) == 100 for part in parts)
    assert max(len(np.unique(labels[part])) for part in parts) == 2


@given(labels=labels_strategy, devices=st.integers(1, 8), seed=st.integers(0, 99))
def test_dirichlet_deals_out_everything(labels: np.ndarray, devices: int, seed: int) -> None:
    parts = partition(labels, f"dirichlet:devices={devices},alpha=1.0", seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(map(len, parts)) >= 1


def test_a_small_alpha_gives_few_classes_and_a_large_one_all() -> None:
    labels = np.repeat(np.arange(10), 500)

    def classes(alpha: float) -> float:
        parts = partition(labels, f"dirichlet:devices=10,alpha={alpha}", 0)
        return float(np.mean([(np.bincount(labels[p], minlength=10) > 0.02 * len(p)).sum() for p in parts]))

    assert classes(0.05) < 5 < 9.5 < classes(100)


SPECS = [
    "iid:devices=4",
    "classes:devices=4,per_class=5",
    "shards:devices=4",
    "dirichlet:devices=4,alpha=0.5",
    "natural",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_seed_repeats_and_another_differs_and_the_global_state_is_untouched(spec: str) -> None:
    labels = np.repeat(np.arange(5), 40)
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    torch_state = torch.get_rng_state()
    first, same, other = (partition(labels, spec, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, same, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))
    by_torch = [partition(torch.from_numpy(labels), spec, torch.Generator().manual_seed(4)) for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*by_torch, strict=True))
    assert (np.random.get_state()[1] == state).all()  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_every_registered_partition_is_tested_here() -> None:
    assert PARTITIONS.names() == sorted(spec.partition(":")[0] for spec in SPECS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("iid:devices=0", "devices=0: give a whole number from 1"),
        ("iid:devices=101", "asks for 101 examples and the data set has 100"),
        ("iid:devices=2,per_device=0", "per_device=0: give a whole number from 1"),
        ("classes:devices=0", "devices=0: give a whole number from 1"),
        ("classes:devices=100,classes=2,per_class=100", "asks for 20000"),
        ("classes:devices=4,classes=6,per_class=1", "only 5 classes"),
        ("classes:devices=3,classes=2,per_class=16", "too few examples"),
        ("shards:devices=0", "devices=0: give a whole number from 1"),
        ("shards:devices=60,shards=2", "asks for 120"),
        ("dirichlet:devices=0", "devices=0: give a whole number from 1"),
        ("dirichlet:devices=4,alpha=0", "alpha=0: give a number from 0.001"),
        ("dirichlet:devices=50,alpha=0.001", "Raise alpha"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(spec: str, message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        partition(np.repeat(np.arange(5), 20), spec, 0)


def test_bad_labels_and_specs_are_refused() -> None:
    for labels in (np.zeros((3, 2), int), np.zeros(3)):
        for spec in ("classes:devices=2", "shards:devices=2", "dirichlet:devices=2"):
            with pytest.raises(DataError, match=r"by class needs labels .* whole numbers; got .* Use iid"):
                partition(labels, spec)
    with pytest.raises(DataError, match="asks for 2 examples"):
        partition(np.zeros(0), "iid:devices=2")
    with pytest.raises(SpecError, match="Did you mean 'classes'"):
        partition(np.zeros(3, int), "clases")
    with pytest.raises(DataError, match="no partition"):
        partition(np.zeros(3, int), object())


@pytest.mark.parametrize("labels", [np.linspace(-1, 1, 7), np.eye(7, 2, dtype=np.int64)])
def test_targets_of_any_kind_are_dealt_out_alike(labels: Any) -> None:
    parts = partition(labels, "iid:devices=3", 4)
    assert [p.tolist() for p in parts] == [p.tolist() for p in partition(np.zeros(7, int), "iid:devices=3", 4)]
