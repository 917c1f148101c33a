"""Defences that train on other examples: ats, mixup, concealed; pixel by pixel, and what undoes them."""

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.defenses import ats
from gradveil.defenses.ats import Ats, transformed
from gradveil.defenses.concealed import _descended, _OfRound
from gradveil.errors import DefenseError, SpecError
from gradveil.federated.client import step_gradient
from gradveil.losses import CROSS_ENTROPY
from gradveil.protection.defense import build
from gradveil.protection.protect import protect
from gradveil.types import Batch, GaussianPrior, Observation, Update


def smooth(count: int, rng: Generator) -> Tensor:
    """Images of a few slow waves in the left half, so that one sees how they were moved."""
    waves = torch.rand(count, 1, 2, 2, generator=rng)
    left = nn.functional.interpolate(waves, size=(8, 5), mode="bilinear")
    return nn.functional.pad(left, (0, 3))


def seen_of(model: nn.Module, gradient: dict[str, Tensor], count: int, rng: Generator) -> Observation:
    prior = GaussianPrior.fit(smooth(200, rng))
    return Observation(model, Update(gradient, count), (1, 8, 8), 5, prior=prior)


def test_ats_draws_for_one_image_after_the_other(rng: Generator) -> None:
    defense, batch = Ats(), Batch(torch.rand(12, 3, 9, 9, generator=rng), torch.arange(12) % 5)
    found = defense.on_batch(batch, Generator().manual_seed(3)).inputs
    drawn = Generator().manual_seed(3)
    for x, y in zip(batch.inputs, found, strict=True):
        assert torch.allclose(transformed(x, defense._drawn(drawn)), y)


def test_ats_pixel_by_pixel(rng: Generator) -> None:
    x = torch.rand(1, 8, 8, generator=rng)
    steps = (("across", 0.25), ("contrast", -0.5), ("down", -0.125))
    moved = [[float(x[0, i, j + 2]) if j + 2 < 8 else 0.0 for j in range(8)] for i in range(8)]
    mean = sum(map(sum, moved)) / 64
    grey = [[mean + 0.5 * (v - mean) for v in row] for row in moved]
    slow = [[grey[i - 1][j] if i >= 1 else 0.0 for j in range(8)] for i in range(8)]
    torch.testing.assert_close(transformed(x, steps), torch.tensor([slow]))  # type: ignore[arg-type]
    brighter = transformed(x, (("brightness", 0.5),))
    torch.testing.assert_close(brighter, (1.5 * x).clamp(0, 1))


def test_every_image_gets_one_of_the_possible_transformations(batch: Batch, rng: Generator) -> None:
    found = Ats().on_batch(batch, rng).inputs
    every = [torch.stack([transformed(x, steps) for x in batch.inputs]) for steps in Ats().possible()]
    assert len(every) == 16
    for n, x in enumerate(found):
        assert any(torch.equal(x, one[n]) for one in every)


def test_a_server_finds_the_transformation_of_an_image(
    model: nn.Module, rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ats, "POLICIES", ((("across", 0.25), ("contrast", 1 / 3)),))
    defense = build("ats")
    one = Batch(smooth(1, rng), torch.tensor([2]))
    changed = defense.on_batch(one, Generator().manual_seed(1)).inputs
    (server,) = defense.servers(model)
    seen = seen_of(model, step_gradient(model, Batch(changed, one.labels), build("none"), rng), 1, rng)
    view = server.view(seen)
    torch.testing.assert_close(view.model(one.inputs), model(changed))


def test_mixup_by_its_formula(batch: Batch) -> None:
    found = build("mixup").on_batch(batch, Generator().manual_seed(2))
    rng = Generator().manual_seed(2)
    partner = torch.randperm(3, generator=rng).tolist()
    gamma = torch._standard_gamma(torch.ones(2), generator=rng).tolist()
    share, chances = gamma[0] / sum(gamma), torch.rand(3, generator=rng).tolist()
    for i, j in enumerate(partner):
        torch.testing.assert_close(found.inputs[i], share * batch.inputs[i] + (1 - share) * batch.inputs[j])
        assert int(found.labels[i]) == int(batch.labels[i if chances[i] < share else j])


def test_mixed_numbers_and_a_batch_of_one(rng: Generator) -> None:
    numbers = Batch(torch.rand(2, 1, 8, 8, generator=rng), torch.tensor([1.0, 3.0]))
    assert float(build("mixup").on_batch(numbers, Generator().manual_seed(3)).labels.sum()) == pytest.approx(4.0)
    torch.testing.assert_close(build("mixup").on_batch(numbers[:1], rng).inputs, numbers.inputs[:1])


def test_a_server_unmixes_two_images(model: nn.Module, rng: Generator) -> None:
    two = Batch(smooth(2, rng), torch.tensor([0, 3]))
    mixed = Batch(0.7 * two.inputs + 0.3 * two.inputs.flip(0), two.labels)
    (server,) = build("mixup").servers(model)
    view = server.view(seen_of(model, step_gradient(model, mixed, build("none"), rng), 2, rng))
    torch.testing.assert_close(view.model(two.inputs), model(mixed.inputs))


def test_concealed_samples_come_after_the_examples_and_start_as_mixtures(model: nn.Module, batch: Batch) -> None:
    public = Batch(torch.rand(20, 1, 8, 8), torch.arange(20) % 5)
    both = build("concealed:steps=0,mix=0.6").for_round(model, public).on_batch(batch, Generator().manual_seed(0))
    rng = Generator().manual_seed(0)
    some, chances = torch.randint(20, (3,), generator=rng), torch.rand(3, generator=rng)
    assert torch.equal(both.inputs[:3], batch.inputs)
    torch.testing.assert_close(both.inputs[3:], 0.6 * public.inputs[some] + 0.4 * batch.inputs)
    wanted = torch.where(chances >= 0.6, batch.labels, public.labels[some])
    assert torch.equal(both.labels, torch.cat([batch.labels, wanted]))


def test_concealed_samples_get_a_gradient_like_that_of_the_examples(model: nn.Module, batch: Batch) -> None:
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p *= 4  # so that gradients depend on images
    own = Batch(batch.inputs.double(), batch.labels)
    start = Batch(torch.rand(3, 1, 8, 8, dtype=torch.float64), batch.labels)
    known, flat = _OfRound(model, CROSS_ENTROPY, None), []
    for z in (own.inputs, start.inputs, _descended(known, own, start, 40)):
        gradient = step_gradient(model, Batch(z, own.labels), build("none"), Generator())
        flat.append(torch.cat([g.flatten() for g in gradient.values()]))
    before, after = (1 - float(torch.cosine_similarity(flat[0], one, dim=0)) for one in flat[1:])
    assert after < 0.8 * before


def test_a_server_takes_the_concealed_samples_off(model: nn.Module, rng: Generator) -> None:
    one = Batch(smooth(1, rng), torch.tensor([2]))
    defense = build("concealed:steps=3").for_round(model, Batch(torch.rand(9, 1, 8, 8), torch.arange(9) % 5))
    sent = step_gradient(model.double(), Batch(one.inputs.double(), one.labels), defense, Generator().manual_seed(1))
    view = defense.servers(model)[0].view(seen_of(model, sent, 1, rng))
    true = step_gradient(model, Batch(one.inputs.double(), one.labels), build("none"), rng)
    before, after = (
        sum(float((tree[n] - g).square().sum()) for n, g in true.items()) for tree in (sent, view.update.gradient)
    )
    assert after < 0.01 * before


@pytest.mark.parametrize("spec", ["mixup:alpha=0", "concealed:mix=2", "concealed:steps=-1"])
def test_settings_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        build(spec)


@pytest.mark.parametrize(
    ("spec", "shape", "said"), [("ats", (2, 9), "images"), ("mixup", (2, 9), "labels"), ("concealed", (2, 9), "labels")]
)
def test_where_they_cannot_act_they_say_so(spec: str, shape: tuple[int, ...], said: str) -> None:
    model = nn.Linear(9, 3)
    guard = protect(model, spec)
    with pytest.raises(DefenseError, match=said):
        guard(torch.rand(shape))
