"""Rows of a table: what is measured of them, worked out by hand."""

import json

import pytest
import torch
from torch import Tensor

from gradveil.data import load
from gradveil.modalities.table import Column, Table
from gradveil.models import build

AGE = Column("age", (), low=20.0, high=70.0, mean=45.0, std=10.0, whole=True)
SMOKER = Column("smoker", ("current", "former", "never"))
BMI = Column("bmi", (), low=15.0, high=35.0, mean=25.0, std=4.0)
TABLE = Table((AGE, SMOKER, BMI))


def row(age: float, smoker: str, bmi: float) -> Tensor:
    place = [float(name == smoker) for name in SMOKER.categories]
    return torch.tensor([(age - 20) / 50, *place, (bmi - 15) / 20])


def measured(found: list[Tensor], truth: list[Tensor], gallery: list[Tensor] | None = None) -> dict[str, list[float]]:
    others = None if gallery is None else torch.stack(gallery)
    values, _ = TABLE.measure(torch.stack(found), torch.stack(truth), others, (0.0, 1.0))
    return {name: value.tolist() for name, value in values.items()}


def test_a_number_counts_within_a_third_of_its_columns_deviation_and_a_category_if_it_is_the_same() -> None:
    truth = row(50, "never", 24.0)
    values = measured([row(53, "never", 24.0)], [truth])  # 0.3 of 10
    assert values["wrong"] == [0.0]
    assert values["numbers"] == pytest.approx([0.15])
    assert measured([row(54, "never", 24.0)], [truth])["wrong"] == pytest.approx([1 / 3])
    other = measured([row(50, "former", 25.2)], [truth])  # 0.3 of 4
    assert other["wrong"] == pytest.approx([1 / 3])
    assert other["categories"] == [1.0]
    assert other["numbers"] == pytest.approx([0.15], abs=1e-5)


def test_what_an_attack_left_between_categories_or_outside_a_range_is_made_a_row_first() -> None:
    loose = torch.tensor([1.7, 0.2, 0.9, 0.4, torch.nan])
    _, found = TABLE.measure(loose[None], row(70, "former", 25.0)[None], None, (0.0, 1.0))
    assert torch.allclose(found[0], row(70, "former", 25.0))
    between = torch.tensor([0.413, 1.0, 0.0, 0.0, 0.5])
    assert [cell.text for cell in TABLE.cells(between) or []] == ["41", "current", "25"]


def test_rows_are_paired_so_that_the_fewest_cells_are_wrong() -> None:
    truth = [row(30, "never", 20.0), row(60, "current", 30.0)]
    assert measured(truth[::-1], truth)["wrong"] == [0.0, 0.0]
    half = [row(60, "never", 30.0), row(30, "never", 20.0)]
    assert measured(half, truth)["wrong"] == pytest.approx([0.0, 1 / 3])


def test_a_row_is_identified_when_it_is_nearest_to_its_own_and_a_tie_counts_against_it() -> None:
    truth, other = row(50, "never", 24.0), row(20, "current", 35.0)
    assert measured([row(48, "never", 25.0)], [truth], [other])["identified"] == [1.0]
    assert measured([truth], [truth], [other, truth])["identified"] == [0.0]


def test_blind_guesses_are_the_middle_and_each_columns_mean_or_mode() -> None:
    public = torch.stack([row(40, "never", 20.0), row(50, "never", 22.0), row(60, "former", 30.0)])
    assert torch.allclose(TABLE.typical(public), row(50, "never", 24.0))
    middle = TABLE.unit(TABLE.ignorant(public, (0.0, 1.0)), (0.0, 1.0))
    assert torch.allclose(middle[0], row(45, "current", 25.0))


def test_free_numbers_become_shares_of_categories_that_add_up_to_one() -> None:
    wide = Table((SMOKER, AGE, Column("sex", ("female", "male"))))
    free = torch.tensor([[0.0, 1.0, 2.0, 0.3, -1.0, 1.0]])
    relaxed = wide.relaxed(free)
    assert torch.allclose(relaxed[0, :3], free[0, :3].softmax(0))
    assert torch.allclose(relaxed[0, 4:], free[0, 4:].softmax(0))
    assert relaxed[0, 3] == free[0, 3]


def test_cells_are_marked_by_their_original() -> None:
    cells = TABLE.cells(row(60, "never", 24.1), row(50, "never", 24.0)) or []
    assert [(cell.text, cell.right) for cell in cells] == [("60", False), ("never", True), ("24.1", True)]
    assert [cell.off for cell in cells] == [pytest.approx(10, abs=1e-3), None, pytest.approx(0.1, abs=1e-3)]


def test_a_run_folder_keeps_the_columns() -> None:
    assert Table.from_row(json.loads(json.dumps(TABLE.row()))) == TABLE


def test_the_model_standardises_numbers_in_a_layer_that_is_not_trained() -> None:
    data = load("diabetes")
    model = build("mlp", data.input_shape, 1, modality=data.modality)
    whole = torch.cat([data.train.batch().inputs, data.test.batch().inputs])
    seen = model[0](whole)
    numbers = torch.tensor([not c.categories for c in data.modality.columns])[data.modality.owner]
    assert torch.allclose(seen[:, numbers].mean(0), torch.zeros(9), atol=1e-4)
    assert torch.allclose(seen[:, numbers].std(0, correction=0), torch.ones(9), atol=1e-4)
    assert torch.equal(seen[:, ~numbers], whole[:, ~numbers])
    assert not list(model[0].parameters())
