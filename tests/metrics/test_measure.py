import math

import torch
from torch import Generator

from gradveil.metrics import METRICS, measure
from gradveil.types import Batch


def batch() -> Batch:
    rng = Generator().manual_seed(0)
    return Batch(torch.rand(3, 1, 8, 8, generator=rng), torch.tensor([2, 0, 1]))


def test_every_metric_is_measured_once_per_example() -> None:
    truth = batch()
    values, _ = measure(truth.inputs, truth.labels, truth, gallery=torch.rand(5, 1, 8, 8))
    assert values.keys() == METRICS.keys()
    assert all(v.shape == (3,) for v in values.values())
    assert not any(v.isnan().any() for v in values.values())


def test_a_runaway_reconstruction_is_clamped_before_it_is_measured() -> None:
    truth = batch()
    values, found = measure(truth.inputs + 1e6, None, truth)
    assert values["mse"].max() <= 1.0
    assert torch.equal(found, torch.ones_like(found))


def test_what_is_not_a_number_counts_as_grey() -> None:
    truth = batch()
    values, _ = measure(torch.full_like(truth.inputs, torch.nan), None, truth)
    grey, _ = measure(torch.full_like(truth.inputs, 0.5), None, truth)
    assert torch.equal(values["mse"], grey["mse"])


def test_a_batch_that_came_back_in_another_order_is_paired_first() -> None:
    truth = batch()
    order = torch.tensor([2, 0, 1])
    values, found = measure(truth.inputs[order], truth.labels[order], truth)
    assert values["mse"].max() == 0.0
    assert torch.equal(found, truth.inputs)
    assert values["label"].tolist() == [1.0, 1.0, 1.0]


def test_another_data_range_is_scaled_to_one() -> None:
    truth = batch()
    wide = Batch(truth.inputs * 4 - 2, truth.labels)
    found = torch.full_like(truth.inputs, 0.5)
    values, _ = measure(found * 4 - 2, None, wide, bounds=(-2.0, 2.0))
    expected, _ = measure(found, None, truth)
    assert torch.allclose(values["mse"], expected["mse"], atol=1e-6)


def test_without_labels_and_gallery_those_metrics_are_unknown_and_not_zero() -> None:
    truth = batch()
    values, _ = measure(truth.inputs, None, truth)
    assert all(math.isnan(v) for v in values["label"].tolist() + values["identified"].tolist())


def test_the_arguments_stay_as_they_were() -> None:
    truth = batch()
    found = truth.inputs * 3 - 1
    copies = truth.inputs.clone(), found.clone()
    measure(found, truth.labels, truth, gallery=found)
    assert torch.equal(truth.inputs, copies[0])
    assert torch.equal(found, copies[1])
