"""No weights, inputs, maps, types or roads make a record count for more than the clip; each hole that there was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from faults.clip_roads import cancel, on_a_road
from faults.clip_search import Case, Draw, at_layers, ratios, side_by_side, watched, worst
from faults.conftest import LONG, Count
from gradveil.defenses.veil import Coordinates, Veil, check_clip, save
from gradveil.errors import DefenseError, SpecError
from gradveil.losses import CROSS_ENTROPY
from gradveil.protection.capture import records_of
from gradveil.protection.protect import protect
from gradveil.protection.records import Held, Records
from gradveil.tree import parameters
from gradveil.types import Batch

BLOCKS = range(40 if LONG else 2)
SEEDS = 50 if LONG else 8  # of a block


def searched(case_of: Callable[[int], Case | None], block: int, seeds: int, count: Count) -> None:
    for seed in range(block * seeds, (block + 1) * seeds):
        case = case_of(seed)
        if case is None:
            count("networks refused, or without such a road")
            continue
        found = worst(case, Draw(seed))
        assert float(found.max()) <= 1, f"seed {seed}: {float(found.max())} clips: {case.family}, {case.said}"
        count(f"clip: {case.family}", len(found))


@pytest.mark.parametrize("block", BLOCKS)
def test_what_layers_see_never_moves_the_sum_by_more_than_the_clip(block: int, count: Count) -> None:
    searched(at_layers, block, SEEDS, count)


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_that_are_held_never_do(block: int, count: Count) -> None:
    searched(side_by_side, block, SEEDS, count)


@pytest.mark.parametrize("block", BLOCKS)
def test_networks_on_every_road_never_do(block: int, count: Count) -> None:
    searched(on_a_road, block, SEEDS, count)


# --- the holes that there were ---------------------------------------------------------------------------------------


def moved(records: Records, veil: Veil, slot: int = 0) -> float:
    return float(ratios(Case("", records, veil, torch.zeros(1, records.count), ""), torch.tensor([slot])))


def protected(model: nn.Module, batch: Batch) -> Records:
    """Return the records that a guarded step has seen."""
    with watched() as seen, protect(model, "veil:clip=1e-3"):
        F.cross_entropy(model(batch.inputs).float(), batch.labels).backward()
    return seen[-1]


@pytest.mark.parametrize("bias", [1e6, 1e7, 1e8])
def test_two_tokens_and_a_large_bias(bias: float) -> None:
    """Family: cancellation. ||g||² came out of float32 as nothing, or less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 60), nn.Linear(60, 50), nn.Flatten(), nn.Linear(100, 3))
    cancel(model, bias, 1e3, halves=True)
    records = protected(model, Batch(torch.randn(8, 2, 4), torch.arange(8) % 3))
    assert max(moved(records, Veil(clip=1e-3), slot) for slot in range(8)) <= 1


@pytest.mark.parametrize("bias", [1e6, 1e7, 1e8])
def test_an_ordinary_convolution(bias: float) -> None:
    """Family: cancellation; four positions whose slopes cancel in pairs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 40, 3, 2), nn.Flatten(), nn.Linear(160, 3))
    cancel(model, bias, 1e3)
    records = protected(model, Batch(torch.rand(8, 1, 7, 7), torch.arange(8) % 3))
    assert max(moved(records, Veil(clip=1e-3), slot) for slot in range(8)) <= 1


def wide_map(tmp_path: Path, value: float) -> tuple[nn.Module, str]:
    """Return a layer of 30,000 inputs, and a server's map that shrinks one direction of it."""
    model, path = nn.Linear(30_000, 1, bias=False), str(tmp_path / "map.safetensors")
    with torch.no_grad():
        model.weight.zero_()
    u = torch.linspace(1, 2, 30_000)[None]
    save(Coordinates(u / u.norm(), torch.tensor([1.0])), parameters(model), path, 1.0)
    save_file(load_file(path) | {"values": torch.tensor([value])}, path)
    return model, path


@pytest.mark.parametrize("value", [1.0, 1e2, 1e4])
def test_a_map_in_range_costs_accuracy_only(value: float, tmp_path: Path) -> None:
    """Family: maps. A record along the direction that a map shrinks, in a layer so wide that u·g is rounded."""
    model, path = wide_map(tmp_path, value)
    veil = Veil(shape=path).for_round(model, None)
    g = veil.measured.coordinates.directions * 1e4  # type: ignore[union-attr]
    assert moved(Held({"weight": g.view(1, 1, -1)}), veil) <= 1


@pytest.mark.parametrize("value", [1e12, 0.5, float("inf"), float("nan"), -1.0])
def test_a_map_out_of_range_is_refused(value: float, tmp_path: Path) -> None:
    model, path = wide_map(tmp_path, value)
    with pytest.raises(DefenseError, match="not all from 1 to 10000"):
        Veil(shape=path).for_round(model, None)


@pytest.mark.parametrize("clip", [1e-9, 1e9, 0.0, float("nan"), float("inf")])
def test_a_clip_of_others_out_of_range_is_refused(clip: float, tmp_path: Path) -> None:
    """Family: a server's clip. 1e-9² is no number of float32."""
    with pytest.raises(DefenseError, match="must be from 1e-06 to 1e"):
        check_clip(clip, "that the server sent")
    model, path = wide_map(tmp_path, 1.0)
    save_file(load_file(path) | {"clip": torch.tensor(clip, dtype=torch.float64)}, path)
    with pytest.raises(DefenseError, match="must be from 1e-06 to 1e"):
        Veil(shape=path).for_round(model, None)


@pytest.mark.parametrize("clip", [1e-12, 1e-9, 1e-6])
def test_an_own_clip_holds_however_small(clip: float) -> None:
    """Family: underflow. Slopes of 1e-25, whose squares are no numbers of float32, times inputs of 1e18."""
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([56.0, 0.0, 0.0]))
    batch = Batch(1e18 * torch.ones(4, 5), torch.zeros(4, dtype=torch.long))
    assert moved(protected(model, batch), Veil(clip=clip)) <= 1


def test_an_own_clip_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(SpecError, match="less than single precision"):
        Veil(clip=1e-13)


@pytest.mark.parametrize("way", ["held", "layers", "protect"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_1024_records_alike(way: str, dtype: torch.dtype) -> None:
    """Family: types. A sum of many records alike in bfloat16 moves in steps larger than the clip."""
    torch.manual_seed(0)
    model = nn.Linear(40, 3).to(dtype)
    batch = Batch(torch.rand(1, 40).expand(1024, 40).to(dtype), torch.zeros(1024, dtype=torch.long))
    if way == "protect":
        records = protected(model, batch)
    else:
        records = records_of(model, batch, CROSS_ENTROPY)
        records = Held(records.each()) if way == "held" else records
    assert moved(records, Veil(clip=0.01), 1000) <= 1
    assert Veil(clip=0.01).clipped_sum(records).dtype in (torch.float32, torch.float64)
