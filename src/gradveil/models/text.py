"""Small language models: an encoder that tells classes, and a decoder that tells the next token."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import SpecError
from gradveil.modalities import Modality
from gradveil.modalities.tokens import PADDING
from gradveil.models.base import MODELS, Builder, Init, Rank, Shape, Width, initialise, low_rank
from gradveil.models.chains import Depth, TransformerBlock
from gradveil.ranges import Range

SPREAD = 0.02  # standard deviation of embeddings at the start, as in BERT and GPT-2

USUAL = 2048  # tokens, where nothing is known of the data
Vocabulary = Annotated[int, Range(2, 10**6)]
Length = Annotated[int, Range(1, 10**5)]


class Embedded(nn.Module):
    """The sum of each token's embedding and of that of its place."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        out: Tensor = self.words(ids) + self.places(places)
        return out


class PostNormBlock(TransformerBlock):
    """The block as BERT has it: each part is added first, and the sum normalised."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.attention(x, hidden))
        out: Tensor = self.norm2(x + self.perceptron(x))
        return out


class TextModel(nn.Module):
    """Ids (examples, tokens) in; logits of classes out, or of the next token at each place. Padding is not seen.

    Ids may come as floats that are whole numbers: examples of every kind travel as such.
    """

    def __init__(self, tokens: Embedded, blocks: list[TransformerBlock], outputs: int, causal: bool) -> None:
        super().__init__()
        width = tokens.words.embedding_dim
        self.causal = causal
        self.tokens = tokens
        self.norm = nn.LayerNorm(width, eps=1e-5 if causal else 1e-12)
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(width, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        length = ids.shape[1]
        hidden = (ids == PADDING)[:, None, None]  # as keys
        if self.causal:
            hidden = hidden | torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tokens(ids)
        x = x if self.causal else self.norm(x)
        for block in self.blocks:
            x = block(x, hidden)
        logits: Tensor = self.fc(self.norm(x) if self.causal else x[:, 0])
        return logits


class TextBuilder(Builder):
    """What the two share."""

    takes = "tokens"
    causal: ClassVar[bool]
    depth: int
    width: int
    heads: int
    length: int
    init: str
    lora: int

    def network(self, input_shape: Shape, vocabulary: int, outputs: int, rng: Generator) -> nn.Module:
        if len(input_shape) != 1:
            raise SpecError(f"Model {self.spec_name!r} takes sequences of ids, not inputs of shape {input_shape}.")
        if input_shape[0] > self.length:
            raise SpecError(
                f"The sequences have {input_shape[0]} tokens and {self.spec_name} has places for {self.length}. "
                f"Shorten them, or give {self.spec_name}:length={input_shape[0]}."
            )
        block = TransformerBlock if self.causal else PostNormBlock
        blocks = [block(self.width, self.heads, 1e-5 if self.causal else 1e-12) for _ in range(self.depth)]
        tokens = Embedded(vocabulary, self.length, self.width)
        model = TextModel(tokens, blocks, outputs, self.causal)
        initialise(model, self.init, rng)
        for part in (tokens.words, tokens.places):
            nn.init.normal_(part.weight, std=SPREAD, generator=rng)
        return low_rank(model, self.lora, rng)


@MODELS.register("bert_tiny")
@dataclass(frozen=True)
class Bert(TextBuilder):
    """A small encoder for classes: tokens and places, post-norm, GELU (Devlin et al. 2019).

    Classes are told from the first token. No dropout, no pooler and no segments. Padding (id 0) is not attended to.
    """

    causal = False

    vocabulary: Vocabulary | None = None  # as many tokens as the data has
    depth: Depth = 3
    width: Width = 768
    heads: Width = 12
    length: Length = 128  # tokens of a sequence, at most
    init: Init = "default"
    lora: Rank = 0  # of the low-rank factors that alone are trained, beside the last layer; 0: all weights are

    def build(self, input_shape: Shape, num_classes: int, rng: Generator, modality: Modality) -> nn.Module:
        known = int(modality.last) + 1 if modality.last else USUAL
        return self.network(input_shape, self.vocabulary or known, num_classes, rng)


@MODELS.register("gpt_tiny")
@dataclass(frozen=True)
class Gpt(TextBuilder):
    """A small decoder for the next token: tokens and places, pre-norm, GELU, causal (Radford et al. 2019).

    No dropout; the last layer is not tied to the embedding. The vocabulary is as large as the data's.
    """

    causal = True

    depth: Depth = 2
    width: Width = 768
    heads: Width = 12
    length: Length = 128  # tokens of a sequence, at most
    init: Init = "default"
    lora: Rank = 0  # of the low-rank factors that alone are trained, beside the last layer; 0: all weights are

    def build(self, input_shape: Shape, num_classes: int, rng: Generator, modality: Modality) -> nn.Module:
        return self.network(input_shape, num_classes, num_classes, rng)
