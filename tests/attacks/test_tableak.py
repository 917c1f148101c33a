"""Rows behind an update: several starts, pooled cell by cell."""

from dataclasses import replace

import pytest
import torch
from torch import Generator

from gradveil.attacks.tableak import TabLeak, in_range
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.errors import AttackError
from gradveil.federated.settings import Local
from gradveil.modalities import IMAGE
from gradveil.modalities.table import Table
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import Public, measured, observe
from gradveil.types import Batch, Observation, Reconstruction


@pytest.fixture(scope="module")
def patients() -> Dataset:
    return load("made_up_patients:rows=300")


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def attacked(data: Dataset, count: int, epochs: int = 1, size: int | None = None) -> tuple[Observation, Batch]:
    model = build("mlp", data.input_shape, data.num_classes, 0, data.modality)
    held, local = data.train.sample(count, rng(1)), Local(epochs=epochs, batch_size=size)
    seen = observe(
        model, held, build_defense("none"), rng(), data.num_classes, lr=0.1, local=local, modality=data.modality
    )
    return seen, held


def cells_wrong(found: Reconstruction, held: Batch, data: Dataset) -> float:
    values, _ = measured(found, held, modality=data.modality)
    return float(values["wrong"].mean())


def test_a_batch_of_rows_comes_back_and_blind_guesses_do_not(patients: Dataset) -> None:
    seen, held = attacked(patients, 2)
    found = TabLeak(steps=200, starts=2).reconstruct(seen, rng(2))
    public = Public.draw(patients, rng()).batch
    guess = Reconstruction(patients.modality.typical(public.inputs).expand_as(held.inputs), None, 0.0, True)
    assert cells_wrong(found, held, patients) <= 0.05
    assert cells_wrong(guess, held, patients) >= 0.4


def test_two_epochs_are_unrolled(patients: Dataset) -> None:
    seen, held = attacked(patients, 2, epochs=2)
    assert seen.update.num_steps == 2
    attack = TabLeak(steps=150, starts=1)
    assert cells_wrong(attack.reconstruct(seen, rng(2)), held, patients) <= 0.15


def test_several_starts_say_how_sure_they_are_of_each_cell(patients: Dataset) -> None:
    seen, held = attacked(patients, 8)
    found = TabLeak(steps=150, starts=6, within=1e9).reconstruct(seen, rng(2))  # far from done: they disagree
    table = patients.modality
    assert isinstance(table, Table)
    assert found.confidence is not None
    assert found.confidence.shape == (8, len(table.columns))
    mine = table.unit(found.inputs, (0.0, 1.0))
    order = table.order(mine, held.inputs)
    right, sure = table.right(mine[order], held.inputs), found.confidence[order]
    agreed = sure >= sure.quantile(0.5)
    assert right[agreed].float().mean() > right[~agreed].float().mean() + 0.1


def test_pooled_cells_are_medians_and_the_likeliest_categories(
    patients: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, held = attacked(patients, 1)
    starts = held.inputs.repeat(3, 1) * 4.0  # as free numbers: categories are clear, numbers lie beyond the range
    starts[:, 0] = torch.tensor([0.1, 0.2, 0.9])
    each = [Reconstruction(x[None], held.labels, 1.0 + i, False, raw=x[None]) for i, x in enumerate(starts)]
    monkeypatch.setattr(TabLeak, "_all_starts", lambda self, seen, rngs: [each])
    found = TabLeak(starts=3).reconstruct(seen, rng())
    table = patients.modality
    assert isinstance(table, Table)
    low, middle, _ = (float(in_range(table, x)[0]) for x in starts)
    assert float(found.inputs[0, 0]) == pytest.approx(middle)
    assert found.details["pooled"] == 3
    assert found.confidence is not None
    assert 0 < float(found.confidence[0, 0]) < 1
    assert bool((found.confidence[0, 5:] == 1).all())
    best = TabLeak(starts=3, within=1.5).reconstruct(seen, rng())  # the other starts ended too far away
    assert float(best.inputs[0, 0]) == pytest.approx(low)


def test_numbers_beyond_their_range_count_as_its_end_and_find_back(patients: Dataset) -> None:
    table = patients.modality
    assert isinstance(table, Table)
    free = torch.zeros(1, patients.input_shape[0]).index_fill(1, torch.tensor([0]), 3.0).requires_grad_()
    rows = in_range(table, free)
    assert float(rows[0, 0].detach()) == 1.0
    (slope,) = torch.autograd.grad(rows[0, 0], free)
    age = table.columns[0]
    assert float(slope[0, 0]) == pytest.approx(age.std / age.span)  # a standard deviation is a step of 1


def test_images_are_refused(patients: Dataset) -> None:
    seen, _ = attacked(patients, 1)
    with pytest.raises(AttackError, match="tableak rebuilds rows of tables, and these are images"):
        TabLeak().reconstruct(replace(seen, modality=IMAGE), rng())
