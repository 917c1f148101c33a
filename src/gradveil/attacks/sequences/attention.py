"""The first attention of a language model: where it is, and what it sees of any token at any place.

Nothing is asked of the model but that its first attention is softmax(q kᵀ/√d) v in heads: the layers are found by
running it, and the number of heads is the one that gives what the next layer saw.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.calls import hooked, linear_calls, shown_inputs
from gradveil.attacks.sequences.spans import Span
from gradveil.errors import AttackError
from gradveil.ids import SPECIAL
from gradveil.types import Observation


@dataclass(frozen=True)
class FirstAttention:
    """A model's first attention, in float64."""

    model: nn.Module
    length: int
    words: str  # the embedding of tokens
    vocabulary: int
    sources: tuple[str, ...]  # the layers that make queries, keys and values, or the one that makes all
    out: str  # the layer behind
    heads: int
    causal: bool

    @classmethod
    def find(cls, seen: Observation) -> "FirstAttention":
        """Return the first attention of the model that the server sent."""
        model = copy.deepcopy(seen.model).double().eval().requires_grad_(False)
        words, (length,) = word_table(seen), seen.input_shape
        vocabulary = len(model.get_parameter(f"{words}.weight"))
        least = min(len(SPECIAL), vocabulary - 1)
        ids = least + torch.arange(2 * length).reshape(2, length) % max(vocabulary - least, 1)
        ids[1, :-1] = ids[0, :-1]  # but for the last token the two are the same
        calls = linear_calls(model, ids)
        first = next((i for i, (_, x, _) in enumerate(calls) if x.ndim == 3), None)
        if first is None:
            raise AttackError(f"{type(model).__name__} has no linear layer that sees every token by itself.")
        same = [name for name, x, _ in calls if x is calls[first][1]]
        rest = [(name, x) for name, x, _ in calls[first:] if name not in same]
        if not rest or len(same) not in (1, 3):
            raise AttackError(
                f"{type(model).__name__} does not begin with attention: its first layer on tokens is {same[0]!r}, and "
                f"span needs one that makes queries, keys and values, or three. Use tag."
            )
        made = torch.cat([y for name, _, y in calls if name in same], -1)
        out, o = rest[0]
        if made.shape[-1] != 3 * o.shape[-1]:
            raise AttackError(
                f"{out!r} sees {o.shape[-1]} numbers a token, and not the {made.shape[-1] // 3} of values."
            )
        causal = bool(torch.allclose(o[0, 0], o[1, 0], rtol=1e-9))
        heads = _heads(made, o, causal)
        return cls(model, length, words, vocabulary, tuple(same), out, heads, causal)

    @cached_property
    def width(self) -> int:
        """How many numbers a token has."""
        return int(self.inputs(torch.full((1, self.length), self.vocabulary - 1)).shape[-1])

    def inputs(self, ids: Tensor) -> Tensor:
        """Return what the attention sees of ids (N, L): (N, L, width)."""
        return linear_calls(self.model, ids, self.sources[0])[-1][1]

    def parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of tokens (T,) at every place, each (T, L, heads, d)."""
        calls = linear_calls(self.model, tokens[:, None].expand(-1, self.length), self.out)
        made = torch.cat([y for name, _, y in calls if name in self.sources], -1)
        q, k, v = made.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return q, k, v

    def before_norm(self, tokens: Tensor) -> Tensor | None:
        """Return what the layer norm sees whose output the attention takes, (T, L, width), if that is all it feeds."""
        ids, kept = tokens[:, None].expand(-1, self.length), []
        norms = [m for m in self.model.modules() if isinstance(m, nn.LayerNorm)]
        with hooked(norms, lambda m, x, y: kept.append((x, y))):
            x = self.inputs(ids)
        return next((before for before, after in kept if after is x), None)

    def place_rows(self) -> tuple[str, Tensor] | None:
        """Return the embedding of places, and its rows for them (L,); None: there is no such table."""
        ids, kept = torch.full((1, self.length), self.vocabulary - 1), list[tuple[nn.Module, Tensor]]()
        named = self.model.named_modules()
        tables: dict[nn.Module, str] = {m: name for name, m in named if isinstance(m, nn.Embedding)}
        with hooked(list(tables), lambda m, x, y: kept.append((m, x))):
            self.inputs(ids)
        rows = ((tables[m], x.reshape(-1)) for m, x in kept)
        return next((one for one in rows if len(one[1].unique()) == self.length > 1), None)


def word_table(seen: Observation) -> str:
    """Return the name of the embedding of tokens: the first that there is."""
    tables: list[str] = [name for name, m in seen.model.named_modules() if isinstance(m, nn.Embedding)]
    if not tables or len(seen.input_shape) != 1:
        raise AttackError(
            f"{type(seen.model).__name__} has no nn.Embedding that takes ids of tokens: span and tag are attacks on "
            f"text. Use gs or newton."
        )
    return tables[0]


def layer_span(seen: Observation, layers: Sequence[str], width: int, most: int) -> Span | None:
    """Return the span of what layers that see the same saw, by the gradients of their weights; None: nothing shows it.

    Of low-rank factors B A the gradient of A shows the inputs, that of B shows A times them, which is all there is
    while B is zero.
    """
    shown = [one for layer in layers for one in shown_inputs(seen, layer)]
    whole, noise = (
        [one.gradient for one in shown if one.through is None],
        max((one.noise for one in shown), default=0.0),
    )
    if whole:
        return Span.of(torch.cat(whole), most, noise)
    return Span.of(shown[0].gradient, most, noise, shown[0].through) if shown else None


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return what attention gives, (N, L, width), for queries, keys and values (N, L, heads, d)."""
    fit = torch.einsum("nqhd,nkhd->nhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        fit = fit.masked_fill(torch.ones(fit.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("nhqk,nkhd->nqhd", fit.softmax(-1), v).flatten(2)


def _heads(made: Tensor, o: Tensor, causal: bool) -> int:
    width = o.shape[-1]
    for heads in (h for h in range(1, width + 1) if width % h == 0):
        q, k, v = made.unflatten(-1, (3, heads, width // heads)).unbind(-3)
        if torch.allclose(attend(q, k, v, causal), o, rtol=1e-6, atol=1e-9):
            return heads
    raise AttackError("The first attention is not softmax(q kᵀ/√d) v in heads of one size. Use tag.")
