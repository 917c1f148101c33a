"""Language models of Hugging Face and low-rank factors of peft, from small random configurations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.helpers_text import observed_of, rng, rows
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.sequences import FirstAttention

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS, LENGTH = 60, 8


class Wrapped(nn.Module):
    """As docs/how-to/text.md has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids.long()).logits
        return logits


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=96, n_layer=2, n_head=4, **more)
    return transformers.GPT2LMHeadModel(config)


def bert(layers: int = 3, width: int = 96) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def text(count: int) -> Tensor:
    return torch.randint(3, TOKENS, (count, LENGTH + 1), generator=rng())


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_with_fused_and_transposed_weights_gives_its_batch_away(tied: bool) -> None:
    seen, labels = observed_of(Wrapped(gpt2(tie_word_embeddings=tied)).eval(), text(3), TOKENS, "next_token")
    first = FirstAttention.find(seen)
    assert (first.heads, first.causal, first.sources) == (4, True, ("model.transformer.h.0.attn.c_attn",))
    found = build_attack("span").reconstruct(seen, rng())
    assert rows(found.inputs) == rows(text(3)[:, :-1])
    # a last layer that is the embedding has its gradient summed with the embedding's, and shows no labels
    assert found.labels is None if tied else rows(found.labels) == rows(labels)


@pytest.mark.parametrize(("layers", "width"), [(3, 96), (2, 128)])
def test_an_encoder_with_three_layers_for_queries_keys_and_values_gives_its_batch_away(layers: int, width: int) -> None:
    seen, labels = observed_of(Wrapped(bert(layers, width)).eval(), text(3), 3, "cross_entropy")
    first = FirstAttention.find(seen)
    assert (first.heads, first.causal, len(first.sources)) == (4, False, 3)
    found = build_attack("span").reconstruct(seen, rng())
    assert rows(found.inputs) == rows(text(3)[:, :-1])
    assert found.converged
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


def test_tag_matches_a_decoder_whose_last_layer_is_its_embedding() -> None:
    seen, _ = observed_of(Wrapped(gpt2()).eval(), text(1), TOKENS, "next_token")
    assert rows(build_attack("tag:steps=100").reconstruct(seen, rng()).inputs) == rows(text(1)[:, :-1])


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize(("rank", "exact"), [(32, True), (4, False)])
def test_factors_of_peft_give_the_text_away_where_the_rank_allows(rank: int, exact: bool, warm: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: peft)")
    config = peft.LoraConfig(r=rank, target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True)
    model = Wrapped(peft.get_peft_model(gpt2(tie_word_embeddings=False), config)).eval()
    for name, p in model.named_parameters():
        if warm and "lora_B" in name:
            nn.init.normal_(p, std=0.1, generator=rng())
    seen, _ = observed_of(model, text(2), TOKENS, "next_token")
    assert all("lora_" in name for name in seen.update.gradient)
    found = build_attack("span").reconstruct(seen, rng())
    assert (rows(found.inputs) == rows(text(2)[:, :-1])) == exact
