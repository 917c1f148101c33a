"""The diffusion prior: its network denoises, Gaussian images give newton's answer, and of others it tells more."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gradveil import pace
from gradveil.attacks import diffusion
from gradveil.attacks.diffusion import SIGMAS, Diffusion, Forms, Wiener, train
from gradveil.attacks.gauss_newton.equations import Prior
from gradveil.attacks.newton import Newton, ready
from gradveil.data import load
from gradveil.errors import AttackError, SpecError
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import observe
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction

DIGITS = load("digits")
FEW = DIGITS.test.batch(slice(0, 40))
TRUTH = DIGITS.train.batch(slice(0, 2))
SMALL = Diffusion(steps=2, width=4, pairs=1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observed(defense: str, public: Batch, truth: Batch = TRUTH, model: str = "lenet:strides=2/1") -> list[Observation]:
    net, prior, noise = (
        build(model, public.inputs.shape[1:], 10, 0),
        GaussianPrior.fit(public.inputs),
        build_defense(defense),
    )
    out = [observe(net, truth[i : i + 1], noise, rng(i), 10, prior) for i in range(len(truth))]
    return [replace(noise.servers(net)[0].view(s), public=public) for s in out]


@pytest.fixture(scope="module")
def seen() -> list[Observation]:
    return observed("gaussian:scale=0.1", FEW)


@pytest.fixture(scope="module")
def dots() -> tuple[list[Observation], Batch]:
    """Images of a few white dots, which are far from Gaussian, behind noise."""
    images = (torch.rand(230, 1, 4, 4, generator=rng()) > 0.85).float()
    every = Batch(images, torch.arange(230) % 10)
    return observed("gaussian:scale=0.2", every[30:], every[:30], "logistic"), every[:30]


def error(found: list[Reconstruction], truth: Batch) -> float:
    return float((torch.cat([r.inputs for r in found]) - truth.inputs).square().mean())


def test_of_gaussian_images_the_wiener_filter_is_the_posterior_mean(seen: list[Observation]) -> None:
    gaussian = GaussianPrior.fit(FEW.inputs, rank=6)
    wiener = Wiener(Prior.of(replace(seen[0], prior=gaussian), 0, torch.device("cpu")))
    x, sigma, covariance = FEW.inputs[:3].flatten(1), torch.tensor([0.05, 0.3, 2.0]), gaussian.covariance()
    for i, s in enumerate(sigma):
        gain = covariance @ torch.linalg.inv(covariance + s**2 * torch.eye(64))
        right = gaussian.mean + gain @ (x[i] - gaussian.mean)
        torch.testing.assert_close(wiener(x, sigma)[i], right, rtol=1e-3, atol=1e-4)
        left = torch.trace(covariance - gain @ covariance) / 64
        torch.testing.assert_close(wiener.error(sigma)[i], left.sqrt(), rtol=1e-3, atol=1e-4)


def test_it_tells_more_than_newton_of_images_that_are_not_gaussian(dots: tuple[list[Observation], Batch]) -> None:
    seen, truth = dots
    rngs = [rng(i) for i in range(len(seen))]
    attack = Diffusion(steps=120, width=8)
    trained, found = attack._trained(seen[0]), attack.reconstruct_many(seen, rngs)
    assert min(trained.errors) < 0.8  # on images held out; the Wiener filter's own is 1
    assert found[0].objective == found[0].details["held_out"] < 0.8 * found[0].details["newton"]
    assert error(found, truth) < 0.8 * error(Newton().reconstruct_many(seen, rngs), truth)


def test_how_much_of_the_network_is_taken_is_what_errs_least(dots: tuple[list[Observation], Batch]) -> None:
    trained, level = Diffusion(steps=120, width=8)._trained(dots[0][0]), 4
    x, classes = trained.held.inputs, trained.held.labels
    noisy = x + trained.sigmas[level] * torch.randn(x.shape, generator=rng(3))
    assert max(trained.errors) <= 1.0

    def left(share: float) -> float:
        shares = [share] * len(SIGMAS)
        return float((replace(trained, shares=shares).clean(noisy, classes, level) - x).square().mean())

    assert left(trained.shares[level]) < min(left(0.0), left(trained.shares[level] + 0.5))


def test_gaussian_images_give_newtons_answer_at_every_level(seen: list[Observation]) -> None:
    plain = replace(SMALL._trained(seen[0]), shares=[0.0] * len(SIGMAS), errors=[1.0] * len(SIGMAS))
    for way in SMALL._ways(plain, ready(seen, [rng(), rng(1)], "diffusion"), [rng(), rng(1)]):
        end = way.points[1 : 1 + len(SIGMAS)]  # at width 1
        torch.testing.assert_close(end, end[:1].expand_as(end), rtol=0, atol=1e-4)
        assert (end[0] - way.points[0]).square().mean() < 2e-4  # a step of newton more; its error is 1e-2
        assert torch.equal(way.newton.inputs.flatten(), way.points[0].float().clamp(0, 1))


def test_its_likelihood_is_that_of_the_equations(seen: list[Observation]) -> None:
    solved = Newton().solve(ready(seen, [rng(), rng(1)], "newton"), [rng(), rng(1)])
    form = Forms.at(solved, solved.best.point)
    variance = solved.rows.noise.square() + (solved.best.floor[:, None] * solved.rows.rms).square()

    def exponent(y: torch.Tensor) -> torch.Tensor:
        z = form.with_beside(form.point + y)
        residual = solved.rows.residual(z, torch.full((2,), diffusion.SHARP).double())
        return (residual.square() / variance).sum(1) / 2 + z[:, 64:].square().sum(1) / 2

    y = 1e-3 * torch.randn(2, 64, generator=rng(2)).double()
    bent = (y * (form.curvature @ y[..., None])[..., 0]).sum(1) / 2
    torch.testing.assert_close(exponent(y) - exponent(0 * y), bent - (form.pull * y).sum(1), rtol=0.02, atol=1e-3)


def test_without_a_defence_it_recovers_and_its_network_is_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(diffusion, "train", lambda *given: calls.append(1) or train(*given))
    bare = observed("none", Batch(FEW.inputs.clone(), FEW.labels))
    found = SMALL.reconstruct_many(bare, [rng(), rng(1)])
    SMALL._trained(bare[0])
    assert error(found, TRUTH) < 1e-8
    assert len(calls) == 1
    assert all(r.converged for r in found)


def test_its_time_is_over(seen: list[Observation], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(pace, "clock", look)
    with pace.Limit(12):
        found = SMALL.reconstruct(replace(seen[0], public=Batch(FEW.inputs.clone(), FEW.labels)), rng())
    assert found.details["out_of_time"] == 1
    assert not found.converged
    assert found.inputs.isfinite().all()


def test_updates_of_another_size_say_nothing(dots: tuple[list[Observation], Batch]) -> None:
    """No update of a held-out image is as large, so that it is newton's answer."""
    one = dots[0][0]
    large = replace(one, update=replace(one.update, gradient={n: 5 * g for n, g in one.update.gradient.items()}))
    found = Diffusion(steps=120, width=8).reconstruct(large, rng())
    assert "sigma" not in found.details
    assert torch.equal(found.inputs, Newton().reconstruct(large, rng()).inputs)


REFUSED: list[tuple[Callable[[Observation], Observation], str]] = [
    (lambda s: replace(s, public=None), "needs 8 labelled public images"),
    (lambda s: replace(s, public=FEW[:7]), "needs 8 labelled public images"),
    (lambda s: replace(s, public=Batch(FEW.inputs, FEW.labels - 10)), "needs 8 labelled public images"),
    (lambda s: replace(s, public=Batch(torch.rand(20, 64), torch.zeros(20).long())), "needs 8 labelled public images"),
    (lambda s: replace(s, update=replace(s.update, num_examples=200), public=Batch(
        FEW.inputs.repeat(40, 1, 1, 1), FEW.labels.repeat(40))), "at most 8192 numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_where_it_does_not_fit_it_says_so_in_one_line(
    change: Callable[[Observation], Observation], said: str, seen: list[Observation]
) -> None:
    with pytest.raises(AttackError, match=said) as refused:
        SMALL.reconstruct(change(seen[0]), rng())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"width": 6}, {"pairs": 0}])
def test_settings_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises((SpecError, ValueError), match=r"give a whole number from 1|multiple of 4"):
        Diffusion(**wrong)
