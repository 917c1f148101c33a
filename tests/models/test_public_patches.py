"""Responses to patches of public images, and features in which an image is its mirror image."""

import torch
from torch import Tensor, nn

from gradveil.models import build, fit_to_public
from gradveil.models.scatter import Mirrored, PublicPatches


def images(count: int, side: int = 16) -> Tensor:
    coarse = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    return nn.functional.interpolate(coarse, (side, side), mode="bilinear")


def test_an_image_and_its_mirror_image_are_alike_and_one_upside_down_is_not() -> None:
    model = build("scatter:patches=8,dims=6,init=uniform", (3, 16, 16), 4)
    fit_to_public(model, images(30))
    x = images(5)
    assert torch.equal(model(x.flip(-1)), model(x))
    assert (model(x.flip(-2)) - model(x)).abs().max() > 1e-2


def test_a_patch_is_found_where_it_was_cut_whatever_its_brightness_and_contrast() -> None:
    patches, x = PublicPatches(3, 6, 40), images(50)
    patches.fit(x)
    found = patches(x[:4])
    assert found.shape == (4, 80, 3, 3)
    assert torch.allclose(patches(0.5 * x[:4] + 0.3), found, atol=0.02)  # FLAT keeps it from being exact
    assert not patches(torch.full((1, 3, 16, 16), 0.7)).isnan().any()


def test_responses_to_public_images_are_white() -> None:
    x = torch.rand(60, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    x[..., 1:] += x[..., :-1].clone()  # neighbours are alike
    patches = PublicPatches(1, 3, 9)
    patches.fit(x)
    cut = x.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).flatten(0, 3).double()
    cut = cut - cut.mean(1, keepdim=True)
    cut = cut / cut.square().mean(1, keepdim=True).sqrt()
    responses = cut @ patches.kernels.flatten(1).double().T + patches.offset
    assert torch.allclose(responses.var(0), torch.ones(9, dtype=torch.float64), atol=0.25)
    raw = cut @ nn.functional.normalize(patches.kernels.flatten(1), dim=1).double().T
    assert raw.var(0).max() / raw.var(0).min() > responses.var(0).max() / responses.var(0).min()


def test_the_layer_has_no_bias_and_public_examples_change_nothing_that_is_trained() -> None:
    model = build("scatter:patches=4,dims=5", (1, 8, 9), 3)
    assert [tuple(p.shape) for p in model.parameters()] == [(3, 5)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit_to_public(model, torch.rand(20, 1, 8, 9, generator=torch.Generator().manual_seed(0)))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {f"scatter.parts.1.{name}" for name in ("kernels", "offset")} | {
        "basis.directions",
        "basis.offset",
    }


def test_attacks_in_float64_see_the_same_features_one_by_one_and_through_derivatives() -> None:
    x = images(3)
    first = Mirrored(PublicPatches(3, 6, 10))
    first.fit(x)
    assert torch.allclose(first(x.double()).float(), first(x), atol=1e-5)
    one_by_one = torch.func.vmap(lambda one: first(one[None])[0])(x.double())
    assert torch.allclose(one_by_one, first(x.double()))
    start, way = x[:1].double(), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double()
    _, slope = torch.func.jvp(first, (start,), (way,))
    step = (first(start + 1e-6 * way) - first(start - 1e-6 * way)) / 2e-6
    assert torch.allclose(slope, step, atol=1e-4)
