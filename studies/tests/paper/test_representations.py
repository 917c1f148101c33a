"""Correlations of representations, and the controls that tell shared structure from a class's own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradveil_studies.paper.representations import (
    class_means,
    class_set_accuracy,
    correlation,
    mean_patch,
    representation_scores,
)


def test_correlation_is_pearsons(rng: torch.Generator) -> None:
    a, b = torch.randn(4, 30, generator=rng), torch.randn(4, 30, generator=rng)
    expected = [np.corrcoef(a[i], b[i])[0, 1] for i in range(4)]
    np.testing.assert_allclose(correlation(a, b), expected, atol=1e-5)


def test_a_constant_vector_correlates_with_nothing() -> None:
    assert correlation(torch.full((7,), 0.1), torch.arange(7.0)) == 0


def test_what_all_classes_share_fools_plain_correlation_and_not_the_controls(rng: torch.Generator) -> None:
    shared = 10 * torch.randn(1, 1, 200, generator=rng)
    truth = shared + torch.randn(40, 4, 200, generator=rng)
    found = (shared + torch.randn(40, 4, 200, generator=rng)) * 3  # knows nothing of the classes
    present = torch.zeros(40, 4, dtype=torch.bool)
    present[:, :2] = True
    scores = {name: float(v.nanmean()) for name, v in representation_scores(found, truth, present).items()}
    assert scores["own"] > 0.95
    assert abs(scores["own"] - scores["wrong"]) < 0.01
    assert abs(scores["nearest"] - 0.5) < 0.2
    assert abs(scores["centred"]) < 0.1


def test_a_perfect_inference_passes_every_control_at_any_scale(rng: torch.Generator) -> None:
    truth = 5 + torch.randn(3, 4, 50, generator=rng)
    present = torch.tensor([[True, True, False, True]] * 3)
    scores = representation_scores(truth * torch.rand(3, 4, 1, generator=rng).add(0.1), truth, present)
    for name in ("own", "nearest", "centred"):
        torch.testing.assert_close(scores[name][present], torch.ones(9))
    assert float(scores["wrong"][present].max()) < 0.9
    assert scores["own"][~present].isnan().all()


def test_a_single_class_has_no_wrong_one(rng: torch.Generator) -> None:
    truth = torch.randn(1, 3, 20, generator=rng)
    present = torch.tensor([[False, True, False]])
    scores = representation_scores(truth, truth, present)
    assert scores["own"][0, 1] == pytest.approx(1.0)
    assert all(scores[name].isnan().all() for name in ("wrong", "nearest", "centred"))


def test_scores_are_those_of_a_plain_loop(rng: torch.Generator) -> None:
    found, truth = torch.randn(5, 4, 30, generator=rng), torch.randn(5, 4, 30, generator=rng)
    present = torch.rand(5, 4, generator=rng) < 0.7
    scores = representation_scores(found, truth, present)
    for d in range(5):
        here = present[d].nonzero().flatten().tolist()
        for c in here:
            cor = {k: np.corrcoef(found[d, c], truth[d, k])[0, 1] for k in here}
            others = [cor[k] for k in here if k != c]
            assert float(scores["own"][d, c]) == pytest.approx(cor[c], abs=1e-5)
            if others:
                assert float(scores["wrong"][d, c]) == pytest.approx(np.mean(others), abs=1e-5)
                assert float(scores["nearest"][d, c]) == float(cor[c] > max(others))


def test_a_class_set_counts_only_when_it_is_exact() -> None:
    truth = torch.tensor([[True, False, True]] * 3)
    guess = torch.tensor([[True, False, True], [True, True, True], [False, False, True]])
    assert class_set_accuracy(guess, truth).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("settings", [{}, {"padding": 2}, {"stride": 2, "padding": 1}, {"padding": "same"}])
def test_the_mean_patch_is_the_mean_of_all_patches(settings: dict[str, int], rng: torch.Generator) -> None:
    layer, x = nn.Conv2d(3, 2, 3, **settings), torch.rand(2, 3, 7, 6, generator=rng)  # type: ignore[arg-type]
    padding = settings.get("padding", 0)
    padding = 1 if padding == "same" else padding
    slow = F.unfold(x, 3, padding=padding, stride=settings.get("stride", 1)).mean(2)
    torch.testing.assert_close(mean_patch(layer, x), slow)


def test_class_means_are_those_of_each_group_and_leave_the_model_alone(rng: torch.Generator) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)).train()
    x, groups = torch.rand(6, 1, 8, 8, generator=rng), torch.tensor([0, 2, 2, 0, 3, 3])
    found = class_means(model, ["0", "3"], x, groups, 5)
    with torch.no_grad():
        r = model[:3](x)  # type: ignore[index]
    for group in (0, 2, 3):
        torch.testing.assert_close(found["3"][group], r[groups == group].mean(0))
        torch.testing.assert_close(found["0"][group], mean_patch(model[0], x[groups == group]).mean(0))  # type: ignore[arg-type]
    assert not found["3"][1].any()
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())
