"""Trial gradients: every form agrees with autograd, one problem at a time, once and twice differentiated."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from gradveil.errors import AttackError
from gradveil.gradients.by_hand import Geometry, known_chain, pull_back
from gradveil.gradients.functional import alone_pays, batch_norm, quiet, trial_gradients
from gradveil.models import build
from gradveil.tree import parameters


def strided() -> nn.Module:
    """Odd sizes, uneven strides and paddings, poolings and an activation without a written derivative."""
    return nn.Sequential(
        nn.Conv2d(2, 3, (5, 4), stride=2, padding=(2, 1)), nn.Sigmoid(),
        nn.Sequential(nn.Conv2d(3, 4, 2, stride=(1, 2), bias=False), nn.Tanh(), nn.AvgPool2d(2, 1)),
        nn.Conv2d(4, 3, 2, stride=3, padding=1), nn.Softplus(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def pooled() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.BatchNorm2d(4, affine=False), nn.LeakyReLU(), nn.Flatten(), nn.Linear(100, 6, bias=False), nn.ELU(),
        nn.Linear(6, 3),
    )  # fmt: skip
    for norm in (model[1], model[4]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model.eval()


class Residual(nn.Module):
    """No chain: a skip connection, and batch norm in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.last = nn.Linear(2 * 9 * 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x + torch.tanh(self.norm(self.first(x)))).flatten(1))


class Stubborn(nn.Module):
    """Looks at a value, so that it cannot be traced by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2 * 9 * 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x.flatten(1))
        return self.last(h if h.sum().item() > -1e9 else -h)


@pytest.fixture(params=[strided, pooled, Residual, Stubborn])
def network(request: pytest.FixtureRequest) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return request.param().double()


def one_at_a_time(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Plain autograd through the module itself, problem by problem: gradients, and a derivative of them by x."""
    model, out = deepcopy(model), []
    for layer in model.modules():
        layer.training = layer.training and not isinstance(layer, nn.Dropout)
    for xi, yi in zip(x, y, strict=True):
        xi = xi.clone().requires_grad_()
        loss = cross_entropy(model(xi), yi)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (second,) = torch.autograd.grad(sum((g**3).sum() for g in found), xi)
        out.append([*(g.detach() for g in found), second])
    return [torch.stack(parts) for parts in zip(*out, strict=True)]


@pytest.mark.parametrize("shape", [(3, 2, 4, 3), (5, 2)])
def test_batch_norm_has_the_first_and_second_derivatives_of_the_formula(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(2)
    x, w, b = (torch.randn(size, generator=rng, dtype=torch.double).requires_grad_() for size in (shape, 2, 2))
    torch.testing.assert_close(batch_norm(x, w, b, 0.1), F.batch_norm(x, None, None, w, b, True, 0.0, 0.1))
    torch.testing.assert_close(batch_norm(x, None, None, 0.1), F.batch_norm(x, None, None, None, None, True, 0.0, 0.1))
    assert torch.autograd.gradcheck(lambda *v: batch_norm(*v, 0.1), (x, w, b))
    assert torch.autograd.gradgradcheck(lambda *v: batch_norm(*v, 0.1), (x, w, b))


def test_wide_convolutions_run_one_by_one_on_a_cpu_but_for_a_chain() -> None:
    assert alone_pays(build("resnet18", (3, 8, 8), 10))
    assert not alone_pays(build("resnet18:width=2", (3, 8, 8), 10))
    assert not alone_pays(build("convnet", (3, 32, 32), 10))


@pytest.mark.parametrize("form", ["auto", "manual", "vmap", "loop"])
def test_every_form_equals_autograd_one_problem_at_a_time(network: nn.Module, form: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 2, 9, 10, generator=rng, dtype=torch.double)
    y = torch.randn(3, 2, 3, generator=rng, dtype=torch.double).softmax(-1)
    if form == "manual" and known_chain(network) is None:
        with pytest.raises(AttackError, match="not a chain"):
            trial_gradients(network, parameters(network), "manual")
        return
    if form == "vmap" and isinstance(network, Stubborn):
        with pytest.raises(RuntimeError):
            trial_gradients(network, parameters(network), "vmap")(x, y)
        return
    for problems in (3, 1):
        free = x[:problems].clone().requires_grad_()
        found = trial_gradients(network, parameters(network), form)(free, y[:problems])  # type: ignore[arg-type]
        (second,) = torch.autograd.grad(sum((g**3).sum() for g in found.values()), free)
        expected = one_at_a_time(network, x[:problems], y[:problems])
        for got, wanted in zip([*found.values(), second], expected, strict=True):
            torch.testing.assert_close(got.detach(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", ["lenet", "lenet:activation=relu,normalize=half", "leaknet", "probe", "logistic"])
def test_the_manual_form_of_the_papers_networks_agrees_to_single_precision(spec: str) -> None:
    model = build(spec, (3, 32, 32), 10)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(4, 1, 3, 32, 32, generator=rng), torch.rand(4, 1, 10, generator=rng).softmax(-1)
    seconds = []
    for form in ("manual", "vmap"):
        free = x.clone().requires_grad_()
        found = trial_gradients(model, parameters(model), form)(free, y)  # type: ignore[arg-type]
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in found.values()), free)[0])
    scale = float(seconds[1].abs().max())
    torch.testing.assert_close(seconds[0], seconds[1], rtol=0, atol=5e-6 * scale)


def test_only_the_wanted_tensors_come_back() -> None:
    model = strided()
    found = trial_gradients(model, ["7.bias", "3.weight"])(torch.rand(2, 1, 2, 9, 10), torch.rand(2, 1, 3))
    assert {n: g.shape[1:] for n, g in found.items()} == {"7.bias": (3,), "3.weight": (3, 4, 2, 2)}


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("size", [(9, 10), (11, 7)])
def test_pulling_back_by_phases_is_the_transposed_convolution(stride: int, size: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(2, 3, (5, 3), stride=stride, padding=(2, 1)).double()
    x = torch.randn(2, 2, *size, generator=rng, dtype=torch.double, requires_grad=True)
    b = layer(x)
    delta = torch.randn(b.shape, generator=rng, dtype=torch.double)
    (expected,) = torch.autograd.grad(b, x, delta)
    torch.testing.assert_close(pull_back(delta, layer.weight.detach(), size, Geometry.of(layer)), expected)


def test_hooks_and_tied_weights_make_a_model_no_chain() -> None:
    model = strided()
    assert known_chain(model) is not None
    handle = model[0].register_forward_hook(lambda *_: None)
    assert known_chain(model) is None
    handle.remove()
    layer = nn.Linear(3, 3)
    assert known_chain(nn.Sequential(layer, nn.Tanh(), layer)) is None


def test_evaluating_leaves_the_model_as_it_was() -> None:
    model = Residual()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    trial_gradients(model, parameters(model))(torch.rand(2, 3, 2, 9, 10), torch.rand(2, 3, 3))
    assert model.norm.training
    assert model.norm.track_running_stats
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_attention_by_a_function_drops_nothing_out() -> None:
    x = torch.rand(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    plain = F.scaled_dot_product_attention(x, x, x)
    with quiet(nn.Identity()):
        assert torch.allclose(F.scaled_dot_product_attention(x, x, x, None, 0.9), plain)
        assert torch.allclose(F.scaled_dot_product_attention(x, x, x, dropout_p=0.9), plain)
