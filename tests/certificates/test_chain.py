"""The walked chain is the model: same values, any module names, and a clear refusal where it is not a chain."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certificates.random_networks import fill, pairs, random_network
from gradveil.errors import CertificateError
from gradveil.representation.problem import has_modes, step_chain
from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.base import Affine
from gradveil.representation.rules.shapes import Reshape
from gradveil.representation.rules.windows import Convolution


class Functional(nn.Module):
    """A model written by hand, with operations that are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 9, 2)
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        _ = x.mean()  # an operation on the side that nothing depends on
        x = 2 - (x - self.mean) / 0.25
        x = F.leaky_relu(self.norm(self.conv(x)), 0.2)
        x = F.max_pool2d(x, 2, ceil_mode=True)
        x = torch.relu_(x * 1.5)
        return self.out(torch.flatten(F.adaptive_avg_pool2d(x, 3), 1))


def test_random_networks_are_walked_exactly() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(40):
        model, shape = random_network(rng)
        x, _ = pairs(model, shape, 3, rng)
        chain = step_chain(model.double(), None, x)
        expected = model[:-1](x.double()).flatten(1)
        jump = 1e-8 if any(isinstance(m, nn.Softplus) for m in model) else 1e-12  # of torch's softplus at its threshold
        torch.testing.assert_close(chain(x), expected, rtol=1e-12, atol=jump)
        assert chain.out_size == expected.shape[1]


def test_a_model_written_with_functions_is_walked_exactly() -> None:
    model = Functional().eval()
    fill(model, torch.Generator().manual_seed(1))
    x = torch.rand(2, 3, 11, 11)
    chain = step_chain(model, "out", x)
    inner: list[Tensor] = []
    model.double().out.register_forward_pre_hook(lambda _, args: inner.append(args[0]))
    model(x.double())
    torch.testing.assert_close(chain(x), inner[0])


def test_normalisation_and_batch_norm_are_folded_into_the_convolution() -> None:
    model = Functional().eval()
    fill(model, torch.Generator().manual_seed(1))
    chain = step_chain(model, "out", torch.rand(1, 3, 11, 11))
    assert isinstance(chain.steps[0], Affine)
    assert isinstance(chain.steps[0].operator, Convolution)
    before_pool = [type(getattr(s, "operator", s)) for s in chain.steps[:2]]
    assert Scale not in before_pool
    assert has_modes(model)


def test_walking_leaves_model_mode_dtype_and_random_state_alone() -> None:
    model = Functional().train()
    model.norm.eval()  # the one part that would be another function in training
    kept = {n: b.clone() for n, b in model.state_dict().items()}
    state = torch.get_rng_state()
    step_chain(model, "out", torch.rand(2, 3, 11, 11, generator=torch.Generator().manual_seed(0)))
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, kept[n]) and v.dtype == kept[n].dtype for n, v in model.state_dict().items())


def test_the_identity_is_a_chain_too() -> None:
    chain = step_chain(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), None, torch.rand(2, 1, 2, 2))
    assert str(chain) == "identity"
    assert all(isinstance(s, Affine) and isinstance(s.operator, Reshape) for s in chain.steps)
    assert chain.out_size == 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + torch.relu(self.a(x)))


@pytest.mark.parametrize(
    ("model", "x", "says"),
    [
        (Residual(), torch.rand(2, 4), "not a chain: 'add' joins two paths"),
        (nn.Sequential(nn.Softmax(1), nn.Linear(4, 2)), torch.rand(2, 4), "Cannot walk through '_softmax'"),
        (nn.Sequential(nn.ConvTranspose2d(1, 1, 2), nn.Flatten(), nn.Linear(9, 2)), torch.rand(2, 1, 2, 2), "convol"),
        (nn.Sequential(nn.GELU(approximate="tanh"), nn.Linear(4, 2)), torch.rand(2, 4), "Cannot walk through 'gelu'"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)), torch.rand(2, 4), "batch_norm"),
    ],
)
def test_what_is_no_chain_is_refused_in_words(model: nn.Module, x: Tensor, says: str) -> None:
    with pytest.raises(CertificateError, match=says):
        step_chain(model, None, x)
