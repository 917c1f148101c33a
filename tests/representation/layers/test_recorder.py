"""The recorder: right, or silent; never wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from gradveil.representation.jacobian import FunctionJacobian, Tape
from gradveil.representation.recorder import record, walk, walkable
from gradveil.representation.scores import leak_scores, linearise
from reference.leak_scores import reference_scores
from reference.score_models import BUILDERS, make


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.fc = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)


class WriteToView(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.view(-1).relu_()
        return self.fc(h)


class WriteToBase(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h[:, :3]
        h.mul_(2.0)
        return self.fc(torch.cat([view, h[:, 3:]], 1))


class WriteToDetached(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.detach().mul_(3.0)
        return self.fc(h)


class StopGradient(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.fc(h * torch.sigmoid(h.detach()) - h.detach().view(-1, 6).mean())


class WriteInPlace(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu_(self.a(x), 0.2) + 0.1
        h = F.hardtanh_(h, -0.3, 0.4)
        h = self.b(h).sigmoid_()
        h = h + self.b(h)
        h -= 0.1
        h *= torch.full_like(h, 1.5)
        h /= 2
        return self.fc(F.elu_(h))


class CopyInto(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6, dtype=x.dtype)
        h[:, :3] = self.a(x)[:, :3]
        return self.fc(h + self.b(self.a(x)))


class Masked(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.fc(h * (h > 0) - torch.zeros_like(h))


class Uses(_Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sigmoid()
        return self.fc(h * h + h.tanh() * 0.5 - h.neg())


class FusedDropout(_Model):  # what CUDA uses for dropout
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.b(torch.native_dropout(self.a(x), 0.4, True)[0]))


MODELS = [WriteToView, WriteToBase, WriteToDetached, StopGradient, WriteInPlace, CopyInto, Masked, Uses, FusedDropout]


@pytest.mark.parametrize("kind", MODELS)
def test_writes_in_place_and_aliases_do_not_lead_astray(kind: type[_Model]) -> None:
    model, x = kind().double(), torch.randn(3, 4, dtype=torch.float64)
    expected = reference_scores(model, "fc", x)
    assert_close(leak_scores(model, "fc", x, "exact"), expected)
    assert_close(leak_scores(model, "fc", x, "loop"), expected)


@pytest.mark.parametrize("kind", [StopGradient, WriteInPlace, Masked, Uses, FusedDropout])
def test_the_recorder_follows_what_it_can(kind: type[_Model]) -> None:
    assert isinstance(record(kind(), "fc", torch.randn(3, 4)).linearise(), Tape)


@pytest.mark.parametrize("kind", [WriteToView, WriteToBase, CopyInto])
def test_the_recorder_says_what_stopped_it(kind: type[_Model]) -> None:
    assert isinstance(record(kind(), "fc", torch.randn(3, 4)).linearise(), str)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_products_with_the_jacobian_agree_with_automatic_differentiation(name: str) -> None:
    model, layer, x = make(name)
    explicit = linearise(model, layer, x)
    if isinstance(explicit, FunctionJacobian):
        pytest.skip("no explicit maps for this model")
    plain = FunctionJacobian(model, layer, x)
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(4, *plain.r.shape, generator=generator, dtype=x.dtype)
    t = torch.randn(4, *x.shape, generator=generator, dtype=x.dtype)
    assert_close(explicit.pull(g), plain.pull(g))
    assert_close(explicit.push(t), plain.push(t))
    assert_close(explicit.push(t[:, :1]), plain.push(t[:, :1].expand_as(t)))


@pytest.mark.parametrize("name", ["linear", "identity", "strided", "even", "pooled"])
def test_walking_a_chain_gives_the_recorded_tape(name: str) -> None:
    model, layer, x = make(name)
    layers = walkable(model, layer, x)
    assert layers is not None
    walked, recorded = walk(layers, x), record(model, layer, x).linearise()
    assert isinstance(walked, Tape)
    assert isinstance(recorded, Tape)
    assert_close(walked.r, recorded.r)
    t = torch.randn(2, *x.shape, dtype=x.dtype)
    assert_close(walked.push(t), recorded.push(t))
    assert_close(walked.spread(), recorded.spread())


def _double(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 2,)


def test_a_hook_that_changes_the_input_is_honoured() -> None:
    model, layer, x = make("even")
    plain = leak_scores(model, layer, x, "exact")
    for part in (model, model[2]):
        handle = part.register_forward_pre_hook(_double)
        found = leak_scores(model, layer, x, "exact")
        assert_close(found, leak_scores(model, layer, x, "loop"))
        assert not torch.allclose(found, plain)
        handle.remove()


def test_a_replaced_forward_is_honoured() -> None:
    model, layer, x = make("even")
    original = model[2].forward
    model[2].forward = lambda h: original(h) * 3
    assert_close(leak_scores(model, layer, x, "exact"), leak_scores(model, layer, x, "loop"))


def test_nested_chains_are_walked_up_to_a_layer_inside() -> None:
    model, _, x = make("even")
    nested = nn.Sequential(nn.Sequential(*model[:3]), nn.Sequential(*model[3:6], nn.Sequential(*model[6:])))
    layers = walkable(nested, "1.3.1", x)
    assert layers is not None
    assert len(layers) == 7
    assert_close(leak_scores(nested, "1.3.1", x, "exact"), leak_scores(model, "7", x, "exact"))


def test_an_activation_that_works_in_place_does_not_write_to_the_input() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    before = x.clone()
    leak_scores(model, "1", x, "exact")
    assert torch.equal(x, before)
