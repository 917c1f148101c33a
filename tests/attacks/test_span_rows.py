"""Text from the rows of the embeddings' gradients: noise, pruning, several local steps and narrow models."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.helpers_text import BERT, GPT, observed, rng
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.sequences import FirstAttention
from gradveil.attacks.span import by_rows, present
from gradveil.gradients.functional import trial_updates
from gradveil.modalities.tokens import Tokens, wrong
from gradveil.types import Observation

LENGTH, COUNT = 7, 3
BLIND = 1 / 37  # a token of the 37 that are drawn from, at random


def drawn(seed: int = 0) -> Tensor:
    """Sequences without padding, with the token after the last."""
    return torch.randint(3, 40, (COUNT, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def right(found: Tensor, ids: Tensor) -> float:
    """The share of tokens at their places, sequences in the best order."""
    true = ids[:, :-1].float()
    return 1 - float(wrong(found[Tokens().order(found, true)], true).mean())


def changed(seen: Observation, kind: str) -> Observation:
    """Return an update as it is under noise, or pruned, or after more steps."""
    sent, draws = seen.update.gradient, rng()
    if kind == "noise":
        gradient = {n: g + 0.1 * g.std() * torch.randn(g.shape, generator=draws) for n, g in sent.items()}
    elif kind == "pruned":
        gradient = {n: g * (g.abs() >= g.abs().quantile(0.5)) if g.numel() < 10**6 else g for n, g in sent.items()}
    else:
        raise ValueError(kind)
    return replace(seen, update=replace(seen.update, gradient=gradient))


@pytest.mark.parametrize("which", [GPT, BERT], ids=["decoder", "encoder"])
@pytest.mark.parametrize("kind", ["noise", "pruned"])
def test_most_of_a_batch_comes_back_where_the_spans_are_filled(which: tuple[str, int, str], kind: str) -> None:
    shares = []
    for seed in range(3):
        ids = drawn(seed)
        found = build_attack("span").reconstruct(changed(observed(which, ids)[0], kind), rng())
        assert not found.converged
        shares.append(right(found.inputs, ids))
    assert sum(shares) / 3 > 0.5 > 10 * BLIND


def test_a_decoders_fragments_give_way_to_rows_that_fit_better() -> None:
    ids = torch.randint(3, 40, (1, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    seen, _ = observed(GPT, ids)
    draws, sent = rng(), seen.update.gradient
    slight = {n: g + 3e-3 * g.std() * torch.randn(g.shape, generator=draws) for n, g in sent.items()}
    found = build_attack("span").reconstruct(replace(seen, update=replace(seen.update, gradient=slight)), rng())
    assert right(found.inputs, ids) == 1
    assert not found.converged


def test_several_local_steps_of_an_encoder() -> None:
    ids = drawn()
    seen, labels = observed(BERT, ids)
    asked = replace(seen, update=replace(seen.update, num_steps=4, lr=0.05))
    y = seen.loss.rows(labels, 3)[None].float()
    sent = trial_updates(asked, tuple(seen.update.gradient))(ids[None, :, :-1].float(), y)
    asked = replace(asked, update=replace(asked.update, gradient={n: g[0].detach() for n, g in sent.items()}))
    assert right(build_attack("span").reconstruct(asked, rng()).inputs, ids) > 0.6


def test_rows_that_are_sums_of_others_tell_who_stands_where() -> None:
    # one begins all of them
    ids = torch.tensor([[0, 1, 2, 3, 11], [0, 4, 5, 12, 6], [0, 7, 8, 9, 10]])
    ways = torch.randn(3, 1, 64, dtype=torch.double, generator=rng())  # of each sequence
    added = ways + 0.5 * torch.randn(3, 5, 64, dtype=torch.double, generator=rng())
    words = torch.zeros(20, 64, dtype=torch.double).index_add_(0, ids.flatten(), added.flatten(0, 1))
    noisy = words + 0.1 * torch.randn(words.shape, dtype=torch.double, generator=rng())
    assert present(words, 15).tolist() == present(noisy, 15).tolist() == list(range(13))
    assert len(present(words, 4)) == 4
    found = by_rows(noisy[:13], added.sum(0), 3)
    assert {tuple(one) for one in found.tolist()} == {tuple(one) for one in ids.tolist()}


def test_the_embedding_of_places_is_found_by_running_the_model() -> None:
    first = FirstAttention.find(observed(BERT, drawn())[0])
    found = first.place_rows()
    assert found is not None
    assert (found[0], found[1].tolist()) == ("tokens.places", list(range(LENGTH)))


def test_a_frozen_embedding_shows_no_rows() -> None:
    ids = drawn()
    seen = changed(observed(BERT, ids, frozen="tokens")[0], "noise")
    assert right(build_attack("span").reconstruct(seen, rng()).inputs, ids) < 0.5


@pytest.mark.parametrize("which", [GPT, BERT], ids=["decoder", "encoder"])
def test_pruning_leaves_every_word(which: tuple[str, int, str]) -> None:
    """Of an update of which 80 % are zero, the rows of the embedding show the words."""
    seen, _ = observed(which, ids := drawn())
    gradient = {n: g * (g.abs() >= g.abs().flatten().sort().values[int(0.8 * g.numel())]) for n, g in
                seen.update.gradient.items()}  # fmt: skip
    found = build_attack("words").reconstruct(replace(seen, update=replace(seen.update, gradient=gradient)), rng())
    words, true = ({int(i) for i in x.flatten() if i} for x in (found.inputs, ids[:, :-1]))
    assert true <= words
    assert len(words - true) <= COUNT  # a decoder's targets have no rows of their own in an embedding that is not tied
