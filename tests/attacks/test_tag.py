"""Text by matching with mixtures of embeddings: where span works, and where it does not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.helpers_text import BERT, GPT, observed, rng, rows
from gradveil.attacks.base import build as build_attack
from gradveil.errors import AttackError
from gradveil.gradients.functional import trial_updates
from gradveil.modalities.tokens import Tokens, wrong
from gradveil.models import build
from gradveil.types import Observation, Update

TAG = "tag:steps=100"


def full(count: int, length: int = 8, seed: int = 0) -> Tensor:
    """Sequences without padding, with the token after the last."""
    return torch.randint(3, 40, (count, length), generator=torch.Generator().manual_seed(seed))


def right(found: Tensor, ids: Tensor) -> float:
    """The share of tokens at their places, sequences in the best order."""
    true = ids[:, :-1].float()
    return 1 - float(wrong(found[Tokens().order(found, true)], true).mean())


def noisy(seen: Observation, share: float) -> Observation:
    draws = rng()
    gradient = seen.update.gradient.items()
    return replace(
        seen,
        update=replace(
            seen.update, gradient={n: g + share * g.std() * torch.randn(g.shape, generator=draws) for n, g in gradient}
        ),
    )


@pytest.mark.parametrize("which", [GPT, BERT], ids=["decoder", "encoder"])
def test_a_sequence_comes_back_with_its_labels_by_a_matched_gradient(which: tuple[str, int, str]) -> None:
    ids = full(1)
    seen, labels = observed(which, ids)
    found = build_attack(TAG).reconstruct(seen, rng())
    assert rows(found.inputs) == rows(ids[:, :-1])
    assert found.converged
    assert found.labels is not None
    assert torch.equal(found.labels, labels)


def test_noise_that_closes_the_span_leaves_most_of_a_batch_to_it() -> None:
    ids = full(3)
    seen = noisy(observed(GPT, ids)[0], 0.5)
    assert right(build_attack("span").reconstruct(seen, rng()).inputs, ids) < 0.6
    found = build_attack(TAG).reconstruct(seen, rng())
    assert right(found.inputs, ids) > 0.8
    assert not found.converged


def test_more_tokens_than_the_model_is_wide() -> None:
    ids, narrow = full(4), ("gpt_tiny:width=24,heads=2", 40, "next_token")
    seen, _ = observed(narrow, ids)
    assert right(build_attack("span").reconstruct(seen, rng()).inputs, ids) < 0.3
    assert right(build_attack("tag:steps=300").reconstruct(seen, rng()).inputs, ids) > 0.7


def test_several_local_steps_are_unrolled() -> None:
    ids = full(1)
    seen, labels = observed(GPT, ids)
    update = Update(seen.update.gradient, 1, num_steps=3, lr=0.5)
    asked = replace(seen, update=update)
    names = tuple(seen.update.gradient)
    sent = trial_updates(asked, names)(ids[None, :, :-1].float(), seen.loss.rows(labels, 40)[None].float())
    asked = replace(asked, update=replace(update, gradient={n: g[0].detach() for n, g in sent.items()}))
    found = build_attack(TAG).reconstruct(asked, rng())
    assert rows(found.inputs) == rows(ids[:, :-1])
    assert found.objective < 0.01


def test_updates_of_several_clients_come_back_as_each_alone() -> None:
    seen = [observed(GPT, full(2, seed=seed))[0] for seed in (0, 1)]
    seen[1] = replace(seen[1], model=seen[0].model)
    short = build_attack("tag:steps=20")
    both = short.reconstruct_many(seen, [rng(), rng()])
    for one, s in zip(both, seen, strict=True):
        assert torch.equal(one.inputs, short.reconstruct(s, rng()).inputs)
    assert not torch.equal(both[0].inputs, both[1].inputs)


def test_the_model_that_was_attacked_still_takes_ids() -> None:
    ids = full(1)
    seen, _ = observed(GPT, ids)
    before = seen.model(ids[:, :-1])
    build_attack("tag:steps=1").reconstruct(seen, rng())
    assert torch.equal(seen.model(ids[:, :-1]), before)


def test_what_is_no_text_is_refused_in_one_line() -> None:
    model = build("mlp", (1, 8, 8), 3, seed=1)
    gradient = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    with pytest.raises(AttackError, match="span and tag are attacks on text") as error:
        build_attack("tag").reconstruct(Observation(model, Update(gradient), (1, 8, 8), 3), rng())
    assert "\n" not in str(error.value)
