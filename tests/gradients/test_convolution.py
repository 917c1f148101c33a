"""Weight gradients by patches: torch's own convolution gradients, one problem at a time, and the derivative of them."""

import pytest
import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from gradveil.gradients import by_hand
from gradveil.gradients.by_hand import Geometry, weight_gradient

GEOMETRIES = {
    "same": (Geometry((5, 5), (1, 1), (2, 2)), (6, 6)),
    "no padding, oblong": (Geometry((3, 2), (1, 1), (0, 0)), (4, 5)),
    "stride 2": (Geometry((5, 5), (2, 2), (2, 2)), (3, 3)),
    "stride 2, odd rest": (Geometry((3, 3), (2, 2), (0, 1)), (2, 3)),
}
SIZE = (6, 6)


def _inputs(out: tuple[int, int], images: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(3, images, 2, *SIZE, generator=rng, dtype=torch.float64, requires_grad=True)
    delta = torch.randn(3, images, 4, *out, generator=rng, dtype=torch.float64, requires_grad=True)
    return h, delta


def _one_at_a_time(h: Tensor, delta: Tensor, g: Geometry) -> Tensor:
    shape = (delta.shape[2], h.shape[2], *g.kernel)
    return torch.stack(
        [conv2d_weight(a, shape, d, stride=g.stride, padding=g.padding) for a, d in zip(h, delta, strict=True)]
    )


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_weight_gradients_are_those_of_each_problem_alone(name: str, images: int) -> None:
    g, out = GEOMETRIES[name]
    h, delta = _inputs(out, images)
    assert torch.allclose(weight_gradient(h, delta, g), _one_at_a_time(h, delta, g), atol=1e-12)


@pytest.mark.parametrize("way", ["cpu", "gpu, small", "gpu, large"])  # back to the input
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_their_derivative_is_that_of_each_problem_alone(
    name: str, images: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "cpu":
        monkeypatch.setattr(by_hand, "_by_input", by_hand._by_input_on_a_gpu)
        monkeypatch.setattr(by_hand, "LARGE", 0 if way == "gpu, large" else 2**30)
    g, out = GEOMETRIES[name]
    h, delta = _inputs(out, images)
    bar = torch.randn(3, 4, 2, *g.kernel, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(weight_gradient(h, delta, g), (h, delta), bar)
    wanted = torch.autograd.grad(_one_at_a_time(h, delta, g), (h, delta), bar)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine, other, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: weight_gradient(a, b, g), (h, delta))
