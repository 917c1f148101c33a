"""The weight of the total variation that a search chooses from a grid, by its own terms alone."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil import Observation, Update
from gradveil.attacks.base import build
from gradveil.attacks.search.restarts import FAR, TVS, corner


def test_the_least_product_of_distance_and_roughness_comes_first() -> None:
    distance = torch.tensor([[0.02, 0.4], [0.01, 0.1], [0.009, 0.05]])  # three weights, two updates
    rough = torch.tensor([[0.10, 0.05], [0.30, 0.10], [0.60, 0.60]])
    order = corner(distance, rough, torch.tensor([0, 1]))
    assert order.T.tolist() == [[0, 1, 2], [1, 2, 0]]  # 0.4 is beyond FAR times 0.05, so it has given up the update
    for unit in (1e-6, 1e6):
        assert torch.equal(corner(unit * distance, rough / unit, torch.tensor([0, 1])), order)


def test_a_blank_image_never_wins_and_the_starts_of_an_update_go_together() -> None:
    distance = torch.tensor([[0.9, 0.9], [0.1, 0.2]])
    rough = torch.tensor([[1e-9, 1e-9], [0.2, 0.2]])
    assert FAR * 0.2 < 0.9
    assert corner(distance, rough, torch.tensor([0, 0]))[0].tolist() == [1, 1]
    torn = torch.tensor([[0.1, 0.1], [0.3, 0.12]])
    assert corner(torn, torch.full((2, 2), 0.2), torch.tensor([0, 0]))[0].tolist() == [0, 0]
    assert corner(torch.tensor([[torch.nan], [0.1]]), torch.ones(2, 1), torch.tensor([0]))[0].tolist() == [1]


def ramp(rng: Generator) -> Tensor:
    """A smooth image: one slope, from a corner to the other."""
    line = torch.linspace(0.1, 0.9, 8)
    return (0.5 * line[:, None] + 0.5 * line + 0.02 * torch.rand(1, generator=rng)).clamp(0, 1)[None, None]


def observe(network: nn.Module, x: Tensor, noise: float = 0.0) -> Observation:
    names, weights = zip(*network.named_parameters(), strict=True)
    found = torch.autograd.grad(nn.functional.cross_entropy(network(x), torch.tensor([2])), weights)
    rng = Generator().manual_seed(1)
    gradient = {n: g + noise * torch.randn(g.shape, generator=rng) for n, g in zip(names, found, strict=True)}
    return Observation(network, Update(gradient), (1, 8, 8), 5, labels=torch.tensor([2]))


def error(spec: str, seen: Observation, x: Tensor) -> tuple[float, dict[str, float]]:
    found = build(spec).reconstruct(seen, Generator().manual_seed(0))
    return float((found.inputs - x).square().mean()), found.details


def test_a_grid_chooses_smoothness_where_the_update_is_noisy_and_little_where_it_is_not(network: nn.Module) -> None:
    """What is chosen is near the best of the weights with all evaluations each, though it has them together."""
    x = ramp(Generator().manual_seed(0))
    chosen = {}
    for noise in (0.0, 0.05):
        seen = observe(network, x, noise)
        alone = {tv: error(f"gs:steps=300,tv={tv}", seen, x)[0] for tv in (0.3, 0.001)}
        grid, details = error("gs:steps=300,tv=0.3/0.001", seen, x)
        chosen[noise] = details["tv"]
        assert grid < 0.5 * max(alone.values()) or max(alone.values()) < 2 * min(alone.values()), (noise, alone, grid)
    assert chosen[0.05] == pytest.approx(0.3)


def test_a_grid_takes_no_more_evaluations_than_a_weight_alone(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradveil.attacks.search.matching import MatchingObjective

    seen, count, plain = observe(network, ramp(Generator().manual_seed(0))), [0], MatchingObjective.__call__

    def counted(self: MatchingObjective, point: Tensor) -> tuple[Tensor, Tensor]:
        count[0] += len(point)
        return plain(self, point)

    monkeypatch.setattr(MatchingObjective, "__call__", counted)
    for spec in ("gs:steps=90,tv=0.01", "gs:steps=90", "gs:steps=90,restarts=2"):
        count[0] = 0
        build(spec).reconstruct(seen, Generator().manual_seed(0))
        assert 0.9 * 90 <= count[0] / (2 if "restarts" in spec else 1) <= 90, spec


def test_the_choice_is_each_updates_own_and_part_of_the_answer(network: nn.Module) -> None:
    model = network.double()
    seen = [observe(model, ramp(Generator().manual_seed(i)).double(), noise) for i, noise in enumerate((0.0, 0.05))]
    together = build("gs:steps=90").reconstruct_many(seen, [Generator().manual_seed(i) for i in range(2)])
    for i, found in enumerate(together):
        alone = build("gs:steps=90").reconstruct(seen[i], Generator().manual_seed(i))
        assert torch.allclose(found.inputs, alone.inputs, atol=1e-6)
        assert found.details["tv"] == alone.details["tv"]
        assert any(found.details["tv"] == pytest.approx(tv) for tv in TVS)
    fixed = build("gs:steps=30,tv=0.01").reconstruct(seen[0], Generator())
    assert "tv" not in fixed.details
    vector = replace(seen[0], model=nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).double(), input_shape=(64,))
    flat = {n: torch.ones_like(p) for n, p in vector.model.named_parameters()}
    rows = build("gs:steps=30").reconstruct(replace(vector, update=Update(flat)), Generator())
    assert "tv" not in rows.details  # there is nothing to be smooth
