"""Pictures of a vision transformer from the spans of its inputs: exactly where the rank allows, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attacks.helpers_attacks import noisy, rng
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.base import default_panel
from gradveil.attacks.patches import _beside, clear_spans
from gradveil.errors import AttackError
from gradveil.federated.client import step_gradient
from gradveil.modalities import IMAGE
from gradveil.models import build
from gradveil.protection.defense import NoDefense
from gradveil.types import Batch, GaussianPrior, Observation, Update

VIT = "vit_tiny:width=48,heads=2,depth=2"
CLASSES = 5


def pictures(count: int) -> Batch:
    return Batch(torch.rand(count, 1, 8, 8, generator=rng(3)), torch.arange(count) % CLASSES)


def observed(count: int, rank: int, warm: bool = False, spec: str = VIT) -> Observation:
    """Return an update at the first weights, or after a step on other examples."""
    model = build(f"{spec},lora={rank}", (1, 8, 8), CLASSES)
    held = pictures(count)
    if warm:
        before = Batch(torch.rand(4, 1, 8, 8, generator=rng(4)), torch.arange(4))
        for name, g in step_gradient(model, before, NoDefense(), rng()).items():
            model.get_parameter(name).data -= 0.5 * g
    return Observation(model, Update(step_gradient(model, held, NoDefense(), rng()), count), (1, 8, 8), CLASSES)


def matched(found: Tensor, truth: Tensor) -> tuple[float, Tensor]:
    """Return the largest error of a pixel, each picture beside the nearest, and which that is; all must be taken."""
    nearest = torch.cdist(truth.flatten(1), found.flatten(1)).argmin(1)
    assert len(nearest.unique()) == len(truth)
    return float((found[nearest] - truth).abs().max()), nearest


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize(("count", "rank"), [(1, 16), (1, 40), (2, 40), (2, 0)])
def test_pictures_come_back_with_their_labels_where_the_rank_allows(count: int, rank: int, warm: bool) -> None:
    seen, held = observed(count, rank, warm), pictures(count)
    if rank:
        assert bool(seen.update.gradient["block1.attention.qkv.lora_a"].any()) == warm
    found = build_attack("patches").reconstruct(seen, rng())
    error, nearest = matched(found.inputs, held.inputs)
    assert error < 1e-2 if warm else error < 1e-3
    assert found.converged
    assert found.labels is not None
    assert torch.equal(found.labels[nearest], held.labels)


def test_too_few_equations_are_the_start_of_newton() -> None:
    likely = GaussianPrior.white(0.25 + 0.5 * pictures(1).inputs.flatten(), 0.2)
    seen = replace(observed(1, 8), prior=likely)
    found = build_attack("patches:restarts=1").reconstruct(seen, rng())
    assert found.details["steps"] > 0
    assert matched(found.inputs, pictures(1).inputs)[0] < 1e-4
    spans, enough = clear_spans(seen, seen.model.double())
    assert spans
    assert not enough


@pytest.mark.parametrize(("count", "layers"), [(1, 1), (2, 4)])
def test_a_batch_has_to_fit_the_layers_of_a_whole_block(count: int, layers: int) -> None:
    seen = observed(count, 40)
    spans, enough = clear_spans(seen, seen.model.double())
    assert enough
    assert len({span.layer for span in spans}) == layers


@pytest.mark.parametrize(("count", "rank", "tokens"), [(1, 4, 5), (1, 5, 5), (4, 16, 17), (12, 0, 49)])
def test_a_rank_that_the_tokens_fill_is_refused(count: int, rank: int, tokens: int) -> None:
    with pytest.raises(AttackError, match=rf"a batch has {tokens} tokens where they have {rank or 48}\."):
        build_attack("patches").reconstruct(observed(count, rank), rng())


def test_noise_is_refused() -> None:
    with pytest.raises(AttackError, match="noise, rounding or a mask fills it"):
        build_attack("patches").reconstruct(noisy(observed(1, 40), 0.1), rng())


def test_frozen_layers_show_no_tokens() -> None:
    seen = observed(1, 16)
    head = {name: g for name, g in seen.update.gradient.items() if name.startswith("fc")}
    for name, p in seen.model.named_parameters():
        p.requires_grad_(name in head)
    with pytest.raises(AttackError, match="no gradient of a layer that sees tokens"):
        build_attack("patches").reconstruct(replace(seen, update=Update(head)), rng())


def test_a_model_without_tokens_is_refused() -> None:
    model, held = build("lenet:strides=2/1", (1, 8, 8), CLASSES), pictures(1)
    seen = Observation(model, Update(step_gradient(model, held, NoDefense(), rng())), (1, 8, 8), CLASSES)
    with pytest.raises(AttackError, match="no linear layer that sees a picture as tokens"):
        build_attack("patches").reconstruct(seen, rng())


def test_no_input_lies_in_the_directions_beside_its_span() -> None:
    x, slopes = torch.randn(6, 20, generator=rng()).double(), torch.randn(6, 30, generator=rng(1)).double()
    beside = _beside(slopes.T @ x, 6)
    assert beside is not None
    assert beside.shape == (20, 14)
    assert float((x @ beside).abs().max()) < 1e-10
    assert _beside(slopes.T @ x, 5) is None  # one more than was said: the gap is elsewhere
    assert _beside(slopes.T @ x, 7) is None
    assert _beside((slopes[:, :6]).T @ x, 6) is None  # as many rows as tokens


def test_the_audit_tries_it_on_factors() -> None:
    factors: nn.Module = build(f"{VIT},lora=16", (1, 8, 8), CLASSES)
    assert "patches" in default_panel(factors, Update({}), IMAGE)
    assert "patches" not in default_panel(factors, Update({}, num_steps=2), IMAGE)
    factors.fill = nn.Linear(1000, 1000)  # a large model: a closed form is tried there as well
    assert "patches" in default_panel(factors, Update({}), IMAGE)
    whole = build(VIT, (1, 8, 8), CLASSES)
    whole.fill = nn.Linear(1000, 1000)
    assert "patches" in default_panel(whole, Update({}), IMAGE)
