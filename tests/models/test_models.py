"""Every network: sizes of the paper, settings, seeds, and clear refusals."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from gradveil.errors import SpecError
from gradveil.models import MODELS, build
from gradveil.modules import representation
from gradveil.registry import describe

SIZES = [
    ("lenet", (3, 32, 32), "fc", 768),
    ("lenet", (1, 28, 28), "fc", 588),
    ("convnet", (3, 32, 32), "fc", 1152),
    ("leaknet", (3, 32, 32), "fc1", 400),
    ("leaknet", (1, 28, 28), "fc2", 120),
    ("logistic", (1, 28, 28), "fc", 784),
    ("probe", (3, 32, 32), "fc", 9408),
    ("probe:stride=2,padding=2", (3, 32, 32), "fc", 3072),
]


@pytest.mark.parametrize(("spec", "shape", "layer", "length"), SIZES)
def test_the_representation_has_the_length_of_the_paper(
    spec: str, shape: tuple[int, ...], layer: str, length: int
) -> None:
    model = build(spec, shape, 10)
    assert representation(model.eval(), layer, torch.rand(2, *shape)).flatten(1).shape == (2, length)


def test_layer_counts_and_widths_are_those_of_the_paper() -> None:
    def widths(spec: str) -> list[int]:
        return [m.out_channels for m in build(spec, (3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d)]

    assert widths("lenet") == [12, 12, 12, 12]
    assert widths("convnet") == [32, 64, 64, 128, 128, 128, 128, 128, 128]
    assert widths("leaknet") == [6, 16]
    strides = [m.stride[0] for m in build("lenet", (3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d)]
    assert strides == [2, 2, 1, 1]


@pytest.mark.parametrize("name", [name for name, builder in MODELS if builder.takes == "image"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 40, 33)])
def test_every_model_takes_any_size_and_channel_count(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7)
    logits = model(torch.rand(3, *shape))
    assert logits.shape == (3, 7)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", [name for name, builder in MODELS if builder.takes == "image"])
def test_every_model_is_a_chain_of_named_layers(name: str) -> None:
    model = build(name, (3, 32, 32), 10)
    assert isinstance(model, nn.Sequential)
    assert not any(key.isdigit() for key, _ in model.named_children())


@pytest.mark.parametrize("name", [name for name, builder in MODELS if builder.takes == "image"])
def test_weights_come_from_the_seed_alone_and_the_global_state_is_untouched(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = (build(name, (1, 28, 28), 10, seed=s).state_dict() for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", [name for name, builder in MODELS if builder.takes == "image"])
def test_a_description_builds_the_same_model(name: str) -> None:
    builder = MODELS.build(f"{name}:init=kaiming,normalize=half")
    assert MODELS.build(describe(builder)) == builder


def test_initialisations_have_the_ranges_they_name() -> None:
    fan_in = 12 * 25
    for init, weight, bias in [
        ("uniform", 0.5, 0.5),
        ("default", 1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)),
        ("kaiming", math.sqrt(6 / fan_in), 0.0),
    ]:
        conv = build(f"lenet:init={init}", (3, 32, 32), 10).get_submodule("conv2")
        assert isinstance(conv, nn.Conv2d)
        assert conv.weight.abs().max().item() == pytest.approx(weight, rel=0.01)
        assert conv.bias is not None
        assert conv.bias.abs().max().item() <= bias
        assert (conv.bias.abs().max().item() > bias / 3) or bias == 0
    assert build("logistic:init=zeros", (1, 8, 8), 10)(torch.rand(1, 1, 8, 8)).abs().max() == 0


def test_normalisation_is_a_layer_on_pixels() -> None:
    x = torch.rand(2, 3, 4, 4)
    half = build("logistic:normalize=half", (3, 4, 4), 2).get_submodule("normalize")
    assert torch.allclose(half(x), (x - 0.5) / 0.5)
    each = build("logistic:normalize=0.1/0.2/0.3/1/2/4", (3, 4, 4), 2).get_submodule("normalize")
    expected = torch.stack([(x[:, 0] - 0.1) / 1, (x[:, 1] - 0.2) / 2, (x[:, 2] - 0.3) / 4], dim=1)
    assert torch.allclose(each(x), expected)
    flat = build("logistic:normalize=0.5/2", (6,), 2)
    assert flat(torch.rand(3, 6)).shape == (3, 2)
    assert "normalize" not in dict(build("logistic", (3, 4, 4), 2).named_children())


@pytest.mark.parametrize("text", ["some", "1/0", "1/2/3", "0.5/-1"])
def test_a_bad_normalisation_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="normalize="):
        build(f"logistic:normalize={text}", (3, 4, 4), 2)


def test_batch_norm_and_activation_are_settings() -> None:
    model = build("lenet:batchnorm=true,activation=tanh", (1, 28, 28), 10)
    kinds = [type(m) for m in model.children()]
    assert kinds.count(nn.BatchNorm2d) == 4
    assert kinds.count(nn.Tanh) == 4
    for a, b in pairwise(kinds):
        assert b is nn.BatchNorm2d or a is not nn.Conv2d


@pytest.mark.parametrize(
    ("spec", "shape"),
    [("convnet", (1, 8, 8)), ("leaknet", (1, 8, 8)), ("probe", (1, 4, 4)), ("lenet", (28, 28)), ("lenet", (0, 28, 28))],
)
def test_an_input_that_is_too_small_or_flat_is_refused_in_one_line(spec: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError) as caught:
        build(spec, shape, 10)
    assert "\n" not in str(caught.value)


def test_settings_can_make_room_for_a_small_input() -> None:
    assert build("convnet:pool=2", (1, 8, 8), 10)(torch.rand(1, 1, 8, 8)).shape == (1, 10)
    assert build("leaknet:padding=2", (1, 8, 8), 10)(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def own_model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def own_model_without_arguments() -> nn.Module:
    return nn.Linear(4, 2)


def not_a_model() -> int:
    return 3


def test_a_users_function_gives_a_model_with_seeded_weights() -> None:
    before = torch.get_rng_state()
    a, b, c = (build(own_model, (1, 2, 2), 3, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a[1].weight, b[1].weight)  # type: ignore[index]
    assert not torch.equal(a[1].weight, c[1].weight)  # type: ignore[index]
    assert isinstance(build(own_model_without_arguments, (1, 2, 2), 3), nn.Linear)


def test_an_import_path_gives_a_model_and_a_bad_one_a_clear_error(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_own_net.py"  # type: ignore[operator]
    path.write_text("from torch import nn\ndef make(num_classes):\n    return nn.Linear(4, num_classes)\nnumber = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = build("my_own_net:make", (4,), 6)
    assert isinstance(made, nn.Linear)
    assert made.out_features == 6
    assert build(made) is made
    with pytest.raises(SpecError, match="give a function or class"):
        build("my_own_net:number")
    with pytest.raises(SpecError, match="returned a int"):
        build(not_a_model)
    with pytest.raises(SpecError, match="Did you mean 'lenet'"):
        build("lenett")
