"""Nothing a chain does inside a box escapes its intervals, its slopes or its planes."""

from math import inf

import pytest
import torch
from torch import Tensor, nn

from certificates.random_networks import ACTIVATIONS, pairs, random_network
from gradveil.representation.certify import lipschitz
from gradveil.representation.intervals import (
    Region,
    box_lipschitz,
    lines,
    plane,
    propagate,
    pull_rows,
    slope_product,
    tighten,
    unit_rows,
)
from gradveil.representation.norms import operator_norm
from gradveil.representation.problem import StepChain, step_chain
from gradveil.representation.rules.activations import Pointwise


def curve_of(module: type[nn.Module]) -> Pointwise:
    step = step_chain(nn.Sequential(module(), nn.Linear(2, 2)), None, torch.rand(1, 2)).steps[0]
    assert isinstance(step, Pointwise)
    return step


def boxes(chain: StepChain, x: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """A box around x and 64 points in it, half of them corners."""
    low, high = (x.double() - radius).clamp(0, 1), (x.double() + radius).clamp(0, 1)
    rng = torch.Generator().manual_seed(0)
    at = torch.rand(64, *chain.in_shape, generator=rng, dtype=torch.float64)
    at[::2] = at[::2].round()
    return low, high, low + (high - low) * at


def jacobian(chain: StepChain, x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda z: chain(z[None])[0])(x).flatten(1)


@pytest.mark.parametrize("module", [*ACTIVATIONS, nn.ReLU6])
def test_values_slopes_and_lines_enclose_the_curve(module: type[nn.Module]) -> None:
    curve = curve_of(module).curve
    rng = torch.Generator().manual_seed(0)
    low = 6 * torch.randn(400, generator=rng, dtype=torch.float64)
    high = low + 1e-3 + 4 * torch.rand(400, generator=rng, dtype=torch.float64) ** 3
    at = low + (high - low) * torch.linspace(0, 1, 201, dtype=torch.float64)[:, None]
    value = module()(at)
    least, most = curve.values(low, high)
    assert ((value >= least - 1e-12) & (value <= most + 1e-12)).all()
    assert (value.amax(0) >= most - 0.02).all()  # and tightly: as far as 201 points show it
    assert (value.amin(0) <= least + 0.02).all()
    flat, steep = curve.slopes(low, high)
    rise = (value[1:] - value[:-1]) / (at[1:] - at[:-1])
    assert ((rise >= flat - 1e-6) & (rise <= steep + 1e-6)).all()
    for (slope, start), side in zip(lines(curve, low, high), (-1, 1), strict=True):
        assert (side * (slope * at + start - value) >= -1e-9).all()


@pytest.mark.parametrize(
    ("module", "steepest"),
    [(nn.Sigmoid, 0.25), (nn.Tanh, 1.0), (nn.ReLU, 1.0), (nn.GELU, 1.12890434), (nn.SiLU, 1.09983932), (nn.ELU, 1.0)],
)
def test_the_steepest_slope_of_each_curve(module: type[nn.Module], steepest: float) -> None:
    assert curve_of(module).curve.steepest() == pytest.approx(steepest, rel=1e-6)


@pytest.mark.parametrize("radius", [0.02, 0.3, 1.0])
def test_values_and_jacobians_inside_a_box_stay_in_their_intervals(radius: float) -> None:
    rng = torch.Generator().manual_seed(3)
    for _ in range(12):
        model, shape = random_network(rng)
        x, _ = pairs(model, shape, 1, rng)
        chain = step_chain(model, None, x)
        low, high, points = boxes(chain, x, radius)
        region = Region.ball(x, inf, radius, (0.0, 1.0))
        rows = torch.randn(3, chain.out_size, generator=rng, dtype=torch.float64)
        for bounds in (propagate(chain, low, high), tighten(chain, region)):
            values = points
            for step, (least, most) in zip((None, *chain.steps), bounds, strict=True):
                values = values if step is None else step(values)
                assert ((values >= least - 1e-12) & (values <= most + 1e-12)).all()
            slopes, constant = plane(chain, bounds, rows)
            taken = values.flatten(1) @ rows.T
            assert (
                taken <= points.flatten(1) @ slopes.T + constant + 1e-9
            ).all()  # the plane lies above, point by point
            assert (taken <= region.highest(slopes, constant) + 1e-9).all()
            centre, spread = torch.cat(
                [torch.stack(pull_rows(chain, bounds, u), 1) for u in unit_rows(chain.out_size)]
            ).unbind(1)
            for point in points[:4]:
                assert ((jacobian(chain, point) - centre).abs() <= spread + 1e-9).all()


def test_planes_tighten_intervals_and_a_smaller_ball_tightens_more() -> None:
    rng = torch.Generator().manual_seed(4)
    gained = 0.0
    for _ in range(10):
        model, shape = random_network(rng)
        x, _ = pairs(model, shape, 1, rng)
        chain = step_chain(model, None, x)
        low, high, _ = boxes(chain, x, 0.1)
        wide = propagate(chain, low, high)[-1]
        tight = tighten(chain, Region.ball(x, inf, 0.1, (0.0, 1.0)))[-1]
        ball = tighten(chain, Region.ball(x, 2, 0.1, (0.0, 1.0)))[-1]
        assert (tight[1] - tight[0] <= wide[1] - wide[0] + 1e-12).all()
        assert (ball[1] - ball[0]).sum() <= (tight[1] - tight[0]).sum() + 1e-9
        gained += float((wide[1] - wide[0]).sum() - (tight[1] - tight[0]).sum())
    assert gained > 0


def test_the_box_constant_bounds_every_jacobian_in_the_box_and_is_exact_for_a_point() -> None:
    rng = torch.Generator().manual_seed(5)
    for _ in range(8):
        model, shape = random_network(rng)
        x, _ = pairs(model, shape, 1, rng)
        chain = step_chain(model.double(), None, x)  # double: a point stays one, up to 1e-13
        low, high, points = boxes(chain, x, 0.2)
        wide, point = propagate(chain, low, high), propagate(chain, x.double(), x.double())
        for p in (1, 2, inf):
            constant = box_lipschitz(chain, wide, p)
            sizes = [float(torch.linalg.matrix_norm(jacobian(chain, z), p)) for z in points[:6]]
            assert max(sizes) <= constant * (1 + 1e-9)
            assert (
                constant
                <= slope_product(chain, wide, p)
                <= lipschitz([operator_norm(s, p) for s in chain.steps]) * (1 + 1e-9)
            )
            at_x = float(torch.linalg.matrix_norm(jacobian(chain, x[0].double()), p))
            assert box_lipschitz(chain, point, p) == pytest.approx(at_x, rel=1e-6, abs=1e-9)


def test_a_pooling_window_with_a_sure_winner_passes_its_gradient_only() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1, 2))
    x = torch.tensor([[0.9, 0.1], [0.2, 0.3]]).reshape(1, 1, 2, 2)
    chain = step_chain(model, None, x)
    sure = propagate(chain, x.double() - 0.2, x.double() + 0.2)
    centre, spread = pull_rows(chain, sure, torch.ones(1, 1))
    assert centre.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert spread.abs().max() == 0
    unsure = propagate(chain, x.double() - 0.34, x.double() + 0.34)
    centre, spread = pull_rows(chain, unsure, torch.ones(1, 1))
    assert centre.tolist() == [[0.5, 0.0, 0.0, 0.5]]
    assert spread.tolist() == [[0.5, 0.0, 0.0, 0.5]]
