"""Sequences of tokens: how they are measured, guessed and shown."""

import pytest
import torch

from gradveil.metrics import blind_guesses, measure
from gradveil.modalities.tokens import Tokens
from gradveil.types import Batch

KIND = Tokens(("", "<unknown>", "<start>", "the", "cat", "sat", "on", "mat"))
TRUTH = torch.tensor([[3, 4, 5, 6, 3, 7], [3, 7, 5, 0, 0, 0]]).float()


def test_a_copy_in_another_order_is_exact() -> None:
    values, shown = measure(TRUTH.flip(0), None, Batch(TRUTH, torch.zeros(2).long()), modality=KIND)
    assert torch.equal(shown, TRUTH)
    assert values["wrong"].tolist() == [0, 0]
    for name in ("exact", "rouge1", "rouge2", "rougeL"):
        assert values[name].tolist() == [1, 1]


def test_rouge_by_hand() -> None:
    found = torch.tensor([[4, 3, 5, 6, 0, 0]]).float()  # cat the sat on
    values, _ = measure(found, None, Batch(TRUTH[:1], torch.zeros(1).long()), modality=KIND)
    assert float(values["wrong"]) == pytest.approx(4 / 6)  # "sat" and "on" stand right; two are missing
    assert float(values["rouge1"]) == pytest.approx(2 * 4 / (4 + 6))
    assert float(values["rouge2"]) == pytest.approx(2 * 1 / (3 + 5))  # sat on
    assert float(values["rougeL"]) == pytest.approx(2 * 3 / (4 + 6))  # the sat on
    assert float(values["exact"]) == 0


def test_whatever_an_attack_gives_becomes_ids_of_the_vocabulary() -> None:
    unit = KIND.unit(torch.tensor([[-3.0, 2.4, 99.0, torch.nan]]), (0.0, 1.0))
    assert unit.tolist() == [[0, 2, 7, 1]]


def test_blind_guesses_go_by_frequency_and_a_gallery_is_told_apart() -> None:
    public = Batch(torch.tensor([[3, 4], [3, 5], [6, 5]]).float(), torch.tensor([0, 1, 1]))
    truth = Batch(torch.tensor([[3, 5]]).float(), torch.tensor([1]))
    guesses = blind_guesses(truth, public, modality=KIND)
    assert guesses["most frequent tokens"].tolist() == [[3, 5]]
    assert guesses["unknown words"].tolist() == [[1, 1]]
    values, _ = measure(truth.inputs, None, truth, public.inputs[:1], modality=KIND)
    assert float(values["identified"]) == 1
    values, _ = measure(public.inputs[:1], None, truth, public.inputs[:1], modality=KIND)
    assert float(values["identified"]) == 0


def test_a_sequence_is_shown_as_words_with_those_that_are_right_marked() -> None:
    cells = KIND.cells(torch.tensor([3, 7, 6, 0, 0, 0]).float(), TRUTH[1])
    assert cells is not None
    assert [(c.text, c.right) for c in cells] == [("the", True), ("mat", True), ("on", False)]
    assert Tokens.from_row(KIND.row()) == KIND


def test_words_in_no_order_are_measured_and_tell_a_text_from_others() -> None:
    found = torch.tensor([[7, 6, 5, 4, 3, 1]]).float()  # all words of the first, and one that it has not
    gallery = torch.tensor([[3, 7, 5, 0, 0, 0], [6, 6, 6, 6, 6, 6]]).float()
    values, _ = measure(found, None, Batch(TRUTH[:1], torch.zeros(1).long()), gallery, modality=KIND)
    assert float(values["recall"]) == 1
    assert float(values["precision"]) == pytest.approx(5 / 6)
    assert float(values["wrong"]) > 0.5
    assert float(values["identified"]) == 1
