"""Whole batches of text, exactly: spans, a decoder's and an encoder's sequences, labels, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attacks.helpers_text import BERT, GPT, LENGTH, observed, observed_of, rng, rows, text
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.sequences import MOST, ROUNDS, Assembly, FirstAttention, Span, _Grid
from gradveil.attacks.span import SpanCheck, places
from gradveil.errors import AttackError
from gradveil.models import build
from gradveil.types import Observation, Update


@pytest.mark.parametrize("which", [GPT, BERT], ids=["decoder", "encoder"])
@pytest.mark.parametrize("count", [1, 4])
def test_every_sequence_comes_back_with_its_label_and_its_length(which: tuple[str, int, str], count: int) -> None:
    ids = text(count)
    seen, labels = observed(which, ids)
    found = build_attack("span").reconstruct(seen, rng())
    assert rows(found.inputs) == rows(ids[:, :-1])
    assert found.converged
    order = [rows(ids[:, :-1]) and found.inputs.long().tolist().index(one) for one in ids[:, :-1].tolist()]
    assert found.labels is not None
    assert torch.equal(found.labels[order], labels)


def test_a_decoder_gives_its_text_away_without_a_gradient_of_its_embedding() -> None:
    seen, _ = observed(GPT, text(3), frozen="tokens")
    assert "tokens.words.weight" not in seen.update.gradient
    assert rows(build_attack("span").reconstruct(seen, rng()).inputs) == rows(text(3)[:, :-1])


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later"])
def test_low_rank_factors_give_the_text_away_where_the_rank_allows(warm: bool) -> None:
    for rank, exact in ((32, True), (4, False)):
        spec, classes, loss = GPT
        seen, _ = observed((f"{spec},lora={rank}", classes, loss), text(3), frozen="tokens", warm=warm)
        assert "blocks.0.attention.qkv.weight" not in seen.update.gradient
        assert bool(seen.update.gradient["blocks.0.attention.qkv.lora_a"].any()) == warm
        found = build_attack("span").reconstruct(seen, rng())
        assert (rows(found.inputs) == rows(text(3)[:, :-1])) == exact


def test_noise_leaves_no_clear_span_and_the_attack_says_so() -> None:
    seen, _ = observed(GPT, text(3))
    noisy = {n: g + 0.5 * g.std() * torch.randn(g.shape, generator=rng()) for n, g in seen.update.gradient.items()}
    found = build_attack("span").reconstruct(replace(seen, update=replace(seen.update, gradient=noisy)), rng())
    assert not found.converged
    assert len(rows(found.inputs) & rows(text(3)[:, :-1])) < 3


def test_more_tokens_than_the_model_is_wide_are_not_recovered_and_not_claimed() -> None:
    ids = torch.randint(3, 40, (12, LENGTH + 1), generator=rng())
    seen, _ = observed(("gpt_tiny:width=32,heads=2", 40, "next_token"), ids)
    assert not build_attack("span").reconstruct(seen, rng()).converged


def test_a_span_is_that_of_the_inputs() -> None:
    x, delta = torch.randn(5, 30, generator=rng()), torch.randn(5, 20, generator=rng())
    span = Span.of(delta.T @ x, 8)
    assert (span.rank, span.clear) == (5, True)
    assert float(span.away(x.double()).max()) < 1e-5
    assert float(span.away(torch.randn(9, 30, dtype=torch.double, generator=rng())).min()) > 0.5
    wide = Span.of((delta.T @ x)[:, :6], 5)  # the other product
    assert float(wide.away(x[:, :6].double()).max()) < 1e-5


def test_inputs_that_weigh_little_count_as_those_that_weigh_much() -> None:
    x, delta = torch.randn(8, 64, generator=rng()), torch.randn(8, 40, generator=rng())
    delta[2:] *= 1e-4  # a gap of 10,000, as between the token that classes are told from and the others
    gradient = (delta.T @ x).double()
    gradient += 1e-7 * torch.randn(gradient.shape, generator=rng())
    span = Span.of(gradient, 8)
    assert (span.rank, span.clear) == (8, True)
    assert float(span.away(x.double()).max()) < 0.01
    assert not Span.of(gradient[:6], 8).clear  # as many rows as are filled show no end


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often an encoder's sequences were solved for: what its attack's time hangs on."""
    calls, solved = [0], _Grid.solved

    def counted(self: _Grid, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        return solved(self, pairs)

    monkeypatch.setattr(_Grid, "solved", counted)
    return calls


def test_an_encoder_with_small_weights_gives_its_batch_away(asked: list[int]) -> None:
    # as Hugging Face draws a BERT: attention is nearly even, and the span of what it gives has a gap within
    model = build("bert_tiny:width=96,heads=4,vocabulary=40,depth=2", (LENGTH,), 3, seed=1)
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.02, generator=rng())
    seen, _ = observed_of(model, text(3), 3, "cross_entropy")
    found = build_attack("span").reconstruct(seen, rng())
    assert rows(found.inputs) == rows(text(3)[:, :-1])
    assert found.converged
    assert asked[0] < 30


def test_what_fits_nowhere_is_not_asked_for_ever(asked: list[int]) -> None:
    tokens, length = 30, 6
    parts = tuple(torch.randn(tokens, length, 2, 8, dtype=torch.double, generator=rng()) for _ in range(3))
    span = Span.of(torch.randn(16, 16, dtype=torch.double, generator=rng())[:, :4] @ torch.eye(4, 16).double(), 4)
    assert span.clear
    allowed, known = torch.ones(tokens, length, dtype=torch.bool), torch.full((tokens,), -1)
    assembly = Assembly(parts, span, allowed, known, 5, 1e-3, rng())
    assert assembly.assembled() == []
    assert 0 < asked[0] <= ROUNDS * MOST


def test_the_attention_is_found_by_running_the_model() -> None:
    for which, causal in ((GPT, True), (BERT, False)):
        seen, _ = observed(which, text(2))
        first = FirstAttention.find(seen)
        assert (first.heads, first.causal, first.width, first.vocabulary) == (4, causal, 64 if causal else 96, 40)
        assert first.sources == ("blocks.0.attention.qkv",)
        assert first.out == "blocks.0.attention.out"
        assert (first.before_norm(torch.tensor([5])) is not None) == (not causal) or causal


def test_the_place_of_a_token_is_read_off_its_embeddings_gradient() -> None:
    ids = text(3)
    seen, _ = observed(BERT, ids)
    before = FirstAttention.find(seen).before_norm(torch.arange(40))
    assert before is not None
    found = places(before, seen.update.gradient["tokens.words.weight"].double())
    inputs = ids[:, :-1]
    for token in range(3, 40):
        at = {int(p) for p in (inputs == token).nonzero()[:, 1]}
        if at:
            assert int(found[token]) == (at.pop() if len(at) == 1 else -1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(40, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.words(ids.long()).mean(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(LENGTH, 3)), "attacks on text"),
        (Recurrent(), "no linear layer that sees every token"),
    ],
)
def test_what_is_no_attention_is_refused_in_one_line(model: nn.Module, message: str) -> None:
    gradient = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    with pytest.raises(AttackError, match=message) as error:
        build_attack("span").reconstruct(Observation(model, Update(gradient), (LENGTH,), 3), rng())
    assert "\n" not in str(error.value)


def test_a_frozen_attention_is_refused() -> None:
    seen, _ = observed(GPT, text(2), frozen="blocks.0.attention")
    with pytest.raises(AttackError, match="no gradient of the first attention"):
        build_attack("span").reconstruct(seen, rng())


def test_factors_beside_queries_and_values_alone_are_refused_before_the_vocabulary_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, _ = observed(BERT, text(1))
    out = FirstAttention.find(seen).out
    rest = {name: g for name, g in seen.update.gradient.items() if not name.startswith(out)}
    monkeypatch.setattr(SpanCheck, "_tokens", None)  # is not called
    with pytest.raises(AttackError, match="which tells sequences apart"):
        build_attack("span").reconstruct(replace(seen, update=replace(seen.update, gradient=rest)), rng())
