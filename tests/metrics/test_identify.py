import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from gradveil.metrics import blind_guesses
from gradveil.modalities.base import identification, label_accuracy
from gradveil.types import Batch


def test_a_close_reconstruction_picks_its_original_out_of_a_hundred() -> None:
    rng = Generator().manual_seed(0)
    truth, gallery = torch.rand(4, 1, 8, 8, generator=rng), torch.rand(99, 1, 8, 8, generator=rng)
    found = truth + 0.1 * torch.randn(truth.shape, generator=rng)
    assert identification(found, truth, gallery).tolist() == [1.0] * 4


def test_a_reconstruction_of_another_image_does_not() -> None:
    rng = Generator().manual_seed(0)
    truth, gallery = torch.rand(4, 1, 8, 8, generator=rng), torch.rand(99, 1, 8, 8, generator=rng)
    assert identification(gallery[:4], truth, gallery).tolist() == [0.0] * 4


def test_a_tie_counts_against_the_attack() -> None:
    truth = torch.tensor([[1.0, 0.0]])
    gallery = torch.tensor([[0.0, 1.0]])
    assert identification(torch.tensor([[0.5, 0.5]]), truth, gallery).item() == 0.0


def test_a_blind_guess_identifies_about_one_in_a_hundred() -> None:
    rng = Generator().manual_seed(1)
    gallery = torch.rand(99, 16, generator=rng)
    truth = torch.rand(400, 16, generator=rng)
    guess = torch.full_like(truth, 0.5)
    assert identification(guess, truth, gallery).mean() < 0.04


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_labels_count_in_any_order(labels: list[int], random: object) -> None:
    shuffled = list(labels)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert label_accuracy(torch.tensor(shuffled), torch.tensor(labels)).tolist() == [1.0] * len(labels)


def test_a_found_label_is_used_once() -> None:
    found, truth = torch.tensor([3, 1, 1]), torch.tensor([3, 3, 1])
    assert label_accuracy(found, truth).tolist() == [1.0, 0.0, 1.0]


def test_several_labels_must_all_be_right_and_numbers_nearly() -> None:
    truth = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert label_accuracy(torch.tensor([[0, 0, 0], [1, 1, 1]]), truth).tolist() == [0.0, 1.0]
    assert label_accuracy(torch.tensor([60, 61]), torch.tensor([61, 62])).tolist() == [1.0, 0.0]
    assert label_accuracy(torch.tensor([-2.01, 5.0]), torch.tensor([5.3, -2.0])).tolist() == [0.0, 1.0]
    assert label_accuracy(torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("labels", [torch.tensor([[0, 1]]), torch.tensor([0.5])])
def test_there_is_no_class_mean_where_there_are_no_classes(labels: torch.Tensor) -> None:
    batch = Batch(torch.rand(1, 1, 3, 3), labels)
    assert set(blind_guesses(batch, batch)) == {"grey", "mean image"}
