"""Figures of predictions, against scikit-learn's, and the answers that look at no input."""

import math

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, r2_score, recall_score, roc_auc_score
from torch import Generator

from gradveil.metrics import ClassOutcome, NumberOutcome, auc, outcome


@pytest.mark.parametrize("classes", [2, 3])
def test_figures_of_classes_are_those_of_scikit_learn(classes: int, rng: Generator) -> None:
    target = torch.multinomial(torch.tensor([0.7, 0.2, 0.1][:classes]), 400, replacement=True, generator=rng)
    output = torch.randn(400, classes, generator=rng) + torch.nn.functional.one_hot(target, classes)
    output[:50] = output[50:100].clone()  # ties
    found = outcome(output, target)
    assert isinstance(found, ClassOutcome)
    guessed, chances = output.argmax(1), output.double().softmax(1)
    right = roc_auc_score(target, chances[:, 1] if classes == 2 else chances, multi_class="ovr")
    assert found.auc == pytest.approx(right)
    assert found.balanced == pytest.approx(balanced_accuracy_score(target, guessed))
    assert found.recall == pytest.approx(recall_score(target, guessed, average=None).tolist())
    assert found.accuracy == pytest.approx(float((guessed == target).double().mean()))
    assert found.majority == pytest.approx(float((target == 0).double().mean()))


def test_a_model_that_always_says_no_is_seen_as_one() -> None:
    target = torch.tensor([0] * 72 + [1] * 28)
    found = outcome(torch.tensor([[1.0, 0.0]]).expand(100, 2), target)
    assert isinstance(found, ClassOutcome)
    assert found.line(("no", "yes")) == (
        "accuracy 72.0% (always 'no': 72.0%), balanced 50.0%, AUC 0.50, recall no 100.0%, yes 0.0%"
    )


def test_classes_that_are_not_there_do_not_count() -> None:
    found = outcome(torch.eye(3)[[0, 1, 1]], torch.tensor([0, 1, 0]))
    assert isinstance(found, ClassOutcome)
    assert math.isnan(found.recall[2])
    assert found.balanced == pytest.approx(0.75)
    assert math.isnan(auc(torch.rand(3), torch.ones(3, dtype=torch.bool)))


def test_numbers_stand_beside_the_mean(rng: Generator) -> None:
    target = torch.randn(50, generator=rng)
    output = target[:, None] + 0.5 * torch.randn(50, 1, generator=rng)
    found = outcome(output, target)
    assert isinstance(found, NumberOutcome)
    assert found.explained == pytest.approx(r2_score(target, output[:, 0]))
    blind = outcome(target.mean().expand(50, 1), target)
    assert isinstance(blind, NumberOutcome)
    assert blind.explained == pytest.approx(0, abs=1e-6)
    assert blind.error == pytest.approx(blind.mean_error)
    assert "R² 0.00" in blind.line()


def test_targets_that_are_neither_have_no_figures() -> None:
    assert outcome(torch.rand(4, 5, 7), torch.zeros(4, 5, dtype=torch.long)) is None
    assert outcome(torch.rand(4, 2), torch.tensor([0, 1, 2, 0])) is None


def test_one_logit_is_that_of_yes() -> None:
    target = torch.tensor([1, 0, 1, 0])
    found = outcome(torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), target)
    assert isinstance(found, ClassOutcome)
    assert (found.accuracy, found.auc, found.recall) == (1.0, 1.0, (1.0, 1.0))


def test_of_many_classes_there_is_no_auc_but_all_else() -> None:
    target = torch.arange(30)
    found = outcome(torch.eye(30), target)
    assert isinstance(found, ClassOutcome)
    assert math.isnan(found.auc)
    assert found.line() == "accuracy 100.0% (always '0': 3.3%), balanced 100.0%"
