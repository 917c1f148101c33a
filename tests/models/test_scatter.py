"""Fixed wavelet features, and directions that public examples decide."""

import torch

from gradveil.models import build, fit_to_public
from gradveil.models.scatter import CHANNELS, Basis, Scattering


def test_a_shift_by_the_grid_shifts_the_features_and_a_flat_image_has_no_waves() -> None:
    x = torch.zeros(1, 1, 40, 40)
    x[..., 14:20, 14:20] = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    found, moved = Scattering()(x), Scattering()(torch.roll(x, (4, 4), (2, 3)))
    assert found.shape == (1, CHANNELS, 10, 10)
    assert torch.allclose(moved[..., 1:, 1:], found[..., :-1, :-1], atol=1e-5)
    flat = Scattering()(torch.full((1, 2, 12, 9), 0.7))
    assert torch.allclose(flat[:, :2], torch.tensor(0.7))
    assert flat[:, 2:].abs().max() < 1e-5


def test_an_edge_is_seen_by_the_wavelets_across_it() -> None:
    x = torch.zeros(1, 1, 32, 32)
    x[..., 16:, :] = 1.0
    angles = Scattering()(x)[0, 1:9, 3:5, 4].amax(1)
    assert angles.argmax() == 0  # waves that run down the image
    assert angles[4] < 1e-4  # those that run along the edge


def test_fitted_directions_are_uncorrelated_and_weighed_by_the_root_of_their_size() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(200, 3, 4, 4, generator=rng) * torch.linspace(0.1, 2, 16).view(4, 4)
    basis = Basis(48, 60)
    basis.fit(x)
    rows = x.flatten(1) @ basis.directions.T + basis.offset
    covariance = (rows.T @ rows / 200).double()
    lengths = covariance.diagonal()[:48]
    assert torch.allclose(covariance, covariance.diagonal().diag(), atol=1e-3 * float(lengths.max()))
    assert (lengths[:-1] >= lengths[1:] - 1e-6).all()
    assert not rows[:, 48:].any()  # more directions than there are
    standard = ((x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)).flatten(1)
    sizes = torch.linalg.svdvals(standard - standard.mean(0))
    assert torch.allclose(lengths[0] / lengths[9], (sizes[0] / sizes[9]).double(), rtol=1e-3)


def test_public_examples_change_the_directions_and_nothing_that_is_trained() -> None:
    model = build("scatter:dims=5", (1, 12, 12), 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit_to_public(model, None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    fit_to_public(model, torch.rand(20, 1, 12, 12))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {"basis.directions", "basis.offset"}
    assert torch.allclose(model.get_submodule("basis")(torch.rand(2, CHANNELS, 3, 3)).norm(dim=1), torch.ones(2))


def test_attacks_in_float64_see_the_same_features() -> None:
    x = torch.rand(2, 2, 13, 18, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(Scattering()(x.double()).float(), Scattering()(x), atol=1e-6)
