from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

from gradveil.defenses.decoy import Decoy, load_prior, save_prior
from gradveil.errors import DefenseError, SpecError
from gradveil.protection.defense import build
from gradveil.types import Batch, GaussianPrior, Observation, Update


def images(count: int, seed: int) -> Tensor:
    """Smooth images: a few random waves."""
    rng = Generator().manual_seed(seed)
    grid = torch.linspace(0, 1, 8)
    waves = torch.stack([torch.sin(3.14 * k * grid) for k in range(1, 4)])  # (3, 8)
    mix = torch.randn(count, 3, 3, generator=rng)
    return 0.5 + 0.15 * torch.einsum("nij,ih,jw->nhw", mix, waves, waves)[:, None]


@pytest.fixture
def prior(tmp_path: Path) -> str:
    save_prior(GaussianPrior.fit(images(2000, 0)), tmp_path / "prior.safetensors")
    return str(tmp_path / "prior.safetensors")


def decoys(defense: Decoy, x: Tensor) -> Tensor:
    return defense.on_batch(Batch(x, torch.zeros(len(x), dtype=torch.int64)), Generator()).inputs


def test_the_same_example_always_gets_the_same_noise_and_others_other(prior: str) -> None:
    x = images(3, 1)
    first, again = decoys(Decoy(prior=prior), x), decoys(Decoy(prior=prior), x.flip(0)).flip(0)
    assert torch.equal(first, again)
    v = first - x
    assert not torch.allclose(v[0], v[1])


def test_the_secret_decides_the_noise(prior: str, tmp_path: Path) -> None:
    x = images(2, 1)
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (decoys(Decoy(prior=prior, secret=str(tmp_path / name)), x) for name in "abc")
    assert torch.equal(a, c)
    assert not torch.allclose(a, b)


def test_the_best_linear_estimate_of_gaussian_data_reaches_the_floor_and_no_less(prior: str) -> None:
    known = load_prior(prior)
    rng = Generator().manual_seed(5)
    x = known.mean + torch.randn(4000, known.factor.shape[1], generator=rng) @ known.factor.T
    x = (x + known.ridge**0.5 * torch.randn(4000, 64, generator=rng)).reshape(-1, 1, 8, 8)
    seen = decoys(Decoy(floor=0.005, prior=prior), x).flatten(1)
    centred = torch.cat([seen, torch.ones(4000, 1)], 1)
    fit = torch.linalg.lstsq(centred[:2000], x[:2000].flatten(1)).solution
    error = float((centred[2000:] @ fit - x[2000:].flatten(1)).square().mean())
    assert error == pytest.approx(0.005, rel=0.1)


def test_without_a_prior_the_noise_is_white_and_needs_no_data() -> None:
    x = torch.rand(200, 1, 8, 8, generator=Generator().manual_seed(0))
    v = decoys(Decoy(floor=0.02), x) - x
    c = 0.02 / (1 / 12 - 0.02)
    assert float(v.square().mean()) == pytest.approx(c / 12, rel=0.05)


def test_a_server_that_denoises_is_given_the_estimate_to_search_for(model: nn.Module, prior: str) -> None:
    x, y = images(1, 1), torch.tensor([2])
    defense = Decoy(floor=0.005, prior=prior)
    decoy = decoys(defense, x)
    names = [name for name, _ in model.named_parameters()]
    sent = torch.autograd.grad(F.cross_entropy(model(decoy), y), list(model.parameters()))
    seen = Observation(model, Update(dict(zip(names, sent, strict=True))), (1, 8, 8), 5)
    (counter,) = defense.servers(model)

    view = counter.view(seen)

    known = load_prior(prior)
    mean = known.mean.reshape(1, 8, 8)
    grow = 1 + 0.005 / (float(known.covariance().diagonal().mean()) - 0.005)
    estimate = mean + (decoy - mean) / grow
    assert [name for name, _ in view.model.named_parameters()] == names
    assert_close(view.model(estimate), model(decoy))
    half = {name: p.detach() / 2 for name, p in model.named_parameters()}
    assert_close(functional_call(view.model, half, (estimate,)), functional_call(model, half, (decoy,)))
    assert view.prior is not None
    assert_close(view.prior.covariance(), known.covariance() / grow)
    assert float((estimate - x).square().mean()) < float((decoy - x).square().mean())


def test_a_floor_above_the_variance_and_a_prior_of_another_shape_are_refused(prior: str) -> None:
    with pytest.raises(DefenseError, match=r"floor=0\.5 is not below"):
        decoys(Decoy(floor=0.5), images(1, 0))
    with pytest.raises(DefenseError, match="64 entries; these have 9"):
        decoys(Decoy(floor=0.001, prior=prior), torch.rand(1, 1, 3, 3))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="The prior 'no-such-file' cannot be read"):
        decoys(build("decoy:prior=no-such-file"), images(1, 0))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Cannot read the secret 'nowhere'"):
        decoys(build("decoy:secret=nowhere"), images(1, 0))  # type: ignore[arg-type]


def test_a_prior_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    save_prior(GaussianPrior.white(torch.zeros(4), 1.0), path)
    assert load_prior(path).ridge == 1.0
    save_prior(GaussianPrior.white(torch.zeros(4), 2.0), path)
    assert load_prior(path).ridge == 4.0


def test_a_server_runs_it_with_a_key_of_its_own(rng: Generator) -> None:
    batch = Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    mine = build("decoy+gaussian:scale=0")
    assert torch.equal(mine.on_batch(batch, rng).inputs, mine.on_batch(batch, rng).inputs)
    assert not torch.equal(mine.on_batch(batch, rng).inputs, mine.for_server().on_batch(batch, rng).inputs)
