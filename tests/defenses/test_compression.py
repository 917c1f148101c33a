"""Signs and levels: entry by entry as the papers have them, and what a server makes of them."""

from math import floor

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.errors import SpecError
from gradveil.protection.defense import build
from gradveil.types import Observation, Update


@pytest.fixture
def tensor(rng: Generator) -> Tensor:
    return torch.randn(6, 7, generator=rng) * torch.rand(6, 7, generator=rng).square()


def sent(spec: str, g: Tensor, seed: int = 0) -> Tensor:
    return build(spec).on_gradient({"w": g}, Generator().manual_seed(seed))["w"]


def test_sign_entry_by_entry(tensor: Tensor) -> None:
    tensor[2, 3] = 0.0
    mean = sum(abs(v) for v in tensor.flatten().tolist()) / tensor.numel()
    slow = [[mean * ((v > 0) - (v < 0)) for v in row] for row in tensor.tolist()]
    torch.testing.assert_close(sent("sign", tensor), torch.tensor(slow))


def test_quantise_entry_by_entry(tensor: Tensor) -> None:
    unit = max(abs(v) for v in tensor.flatten().tolist()) / 7
    slow = [[min(range(-7, 8), key=lambda level: abs(level * unit - v)) * unit for v in row] for row in tensor.tolist()]
    torch.testing.assert_close(sent("quantise:bits=4", tensor), torch.tensor(slow))


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_qsgd_entry_by_entry_and_right_on_average(tensor: Tensor, norm: str) -> None:
    spec = f"qsgd:levels=3,norm={norm}"
    size = float(tensor.norm() if norm == "l2" else tensor.abs().max())
    unit, chances = size / 3, torch.rand(tensor.shape, generator=Generator().manual_seed(0)).flatten().tolist()
    slow = []
    for v, chance in zip(tensor.flatten().tolist(), chances, strict=True):
        below = floor(abs(v) / unit)
        up = chance >= 1 - (abs(v) / unit - below)  # with the chance of what is left over
        slow.append((1 if v > 0 else -1) * (below + up) * unit)
    torch.testing.assert_close(sent(spec, tensor).flatten(), torch.tensor(slow))
    mean = torch.stack([sent(spec, tensor, seed) for seed in range(400)]).mean(0)
    assert float((mean - tensor).abs().max()) < 6 * unit / 2 / 400**0.5


def test_zeros_stay_zeros() -> None:
    for spec in ("sign", "quantise", "qsgd", "qsgd:norm=max"):
        assert torch.equal(sent(spec, torch.zeros(3, 2)), torch.zeros(3, 2))


def test_on_update_leaves_steps_alone(tensor: Tensor, rng: Generator) -> None:
    defense = build("sign:on=update")
    assert defense.on_gradient({"w": tensor}, rng)["w"] is tensor
    assert len(defense.on_update(Update({"w": tensor}), rng).gradient["w"].abs().unique()) == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("quantise:bits=1", "2 to 16"),
        ("qsgd:levels=0", "1 to 4,096"),
        ("qsgd:norm=l1", "l2, max"),
        ("sign:on=weights", "gradient, update"),
    ],
)
def test_settings_that_make_no_sense_are_refused(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build(spec)


@pytest.mark.parametrize("spec", ["sign", "quantise:bits=3"])
def test_slopes_of_a_trial_pass_straight_through(spec: str, tensor: Tensor) -> None:
    (server,) = build(spec).servers(nn.Linear(2, 2))
    seen = server.view(Observation(nn.Linear(2, 2), Update({}), (2,), 2))
    g = tensor.clone().requires_grad_()
    trial = seen.sent({"w": g})["w"]
    torch.testing.assert_close(trial.detach(), sent(spec, tensor))
    assert float(torch.autograd.grad((trial * tensor).sum(), g)[0].abs().min()) > 0


def test_the_strength_of_random_rounding_is_read_off_the_levels(rng: Generator) -> None:
    g = torch.randn(4000, generator=rng)
    (server,) = build("qsgd:levels=40").servers(nn.Linear(2, 2))
    y = sent("qsgd:levels=40", g)
    seen = server.view(Observation(nn.Linear(2, 2), Update({"w": y}), (2,), 2))
    assert seen.noise["w"] == pytest.approx(float((y - g).square().mean().sqrt()), rel=0.2)
    assert not server.view(Observation(nn.Linear(2, 2), Update({"w": y}, num_steps=3), (2,), 2)).noise
