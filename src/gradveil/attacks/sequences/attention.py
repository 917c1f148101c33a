"""The first attention of a model of tokens: where it is, what it sees of any token, and the span of what it saw.

Nothing is asked of the model but that its first attention is softmax(q kᵀ/√d) v in heads: the layers are found by
running it, and the number of heads is the one that gives what the next layer saw. The gradient of a linear layer is
dW = Σ δ xᵀ, so every input x lies in the span of its rows.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor, nn

from gradveil.errors import AttackError
from gradveil.modalities.tokens import SPECIAL
from gradveil.types import Observation

GAP = 3.0  # ratio of neighbouring singular values at which rounding begins
NEAR = 10.0  # times the floor: how far above it that may be
SPARE = 16  # one in so many directions is left to tell the floor by, however many inputs there are


@dataclass(frozen=True)
class Span:
    """The directions in which inputs lie, and those in which none does."""

    basis: Tensor  # (width, rank), orthonormal columns, or what leads to them
    null: Tensor  # (width, width - rank)
    rank: int
    through: Tensor | None  # (seen, width): of an input, the part that the gradient shows; None: all
    clear: bool  # there was a gap between signal and rounding; without one, the rank is a guess

    @classmethod
    def of(cls, gradient: Tensor, most: int, noise: float = 0.0, through: Tensor | None = None) -> "Span":
        """Return the span of a weight's gradient (out, width) made of ``most`` inputs at most; ``noise``: its std.

        ``through``: what the layer's inputs go through before that weight.
        """
        rows, width = gradient.shape
        padded = torch.cat([gradient, gradient.new_zeros(max(0, width - rows), width)])
        _, s, vt = torch.linalg.svd(padded.double(), full_matrices=False)
        short = rows < most  # then all rows being filled does not show that there were no more inputs
        most = max(1, min(most, rows, width - max(1, width // SPARE)))
        floor = max(1e-15 * float(s[0]), _floor(s, rows, most), noise * (sqrt(rows) + sqrt(width)), 1e-300)
        ratios = s[:most] / s[1 : most + 1].clamp_min(floor)
        # gaps higher up are between inputs that weigh much and inputs that weigh little
        ratios = ratios * (s[1 : most + 1] < NEAR * floor)
        rank = int(ratios.argmax()) + 1
        clear = bool(ratios[rank - 1] > GAP) and not noise and not (short and rank == rows)
        if not clear:  # noise all over: what stands above it
            rank = max(1, min(most, int((s > floor).sum())))
        basis, null = vt[:rank].mT.contiguous(), vt[rank:].mT.contiguous()
        if through is not None:
            basis, null = through.T @ basis, through.T @ null
        return cls(basis, null, rank, through, clear)

    def away(self, x: Tensor) -> Tensor:
        """Return the share of inputs (..., width) that lies outside the span: (...), 0 for one that was there."""
        seen = x if self.through is None else x @ self.through.T
        size: Tensor = seen.norm(dim=-1).clamp_min(1e-30)
        share: Tensor
        if self.rank < self.null.shape[1]:  # the smaller product; in float64 it is good to 1e-8
            share = (1 - ((x @ self.basis).norm(dim=-1) / size).square()).clamp_min(0).sqrt()
        else:
            share = (x @ self.null).norm(dim=-1) / size
        return share


def _floor(values: Tensor, rows: int, most: int) -> float:
    """Return the largest singular value of the noise or rounding that those beyond ``most`` are made of."""
    width = len(values)
    spread = values[most:].square().sum() / ((rows - most) * (width - most)) if rows > most else values.new_zeros(())
    return float(spread.sqrt()) * (sqrt(rows - most) + sqrt(width - most))


class _Seen(Exception):
    """Raised in a forward pass when all that was asked for was seen."""


@dataclass(frozen=True)
class Shown:
    """A gradient Σ δ xᵀ over what a layer saw."""

    gradient: Tensor  # (out, width), or (out, rank)
    through: Tensor | None  # (rank, width): A of low-rank factors, whose product with x the gradient of B shows
    noise: float  # std


def shown_inputs(seen: Observation, layer: str) -> list[Shown]:
    """Return the gradients that show a layer's inputs: of its weight, or of its low-rank factors, in float64."""
    found = []
    module = seen.model.get_submodule(layer)
    for name, _ in module.named_parameters():
        g = seen.update.gradient.get(f"{layer}.{name}") if f"{layer}.{name}" in seen.visible else None
        if g is None or not bool(g.any()) or g.ndim != 2:
            continue
        gradient, noise = g.double(), seen.noise.get(f"{layer}.{name}", 0.0)
        if "lora_b" in name.lower():
            first = name.replace("lora_b", "lora_a").replace("lora_B", "lora_A")
            found.append(Shown(gradient, module.get_parameter(first).detach().double(), noise))
        else:
            owner = module.get_submodule(name.rpartition(".")[0])
            transposed = type(owner).__name__ == "Conv1D"  # Hugging Face's has (in, out)
            found.append(Shown(gradient.T if transposed else gradient, None, noise))
    return found


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _linear_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers by name; one around which peft has put its factors counts with them as one."""
    found: dict[nn.Module, str] = {}
    around = tuple[str, ...]()
    for name, m in model.named_modules():
        if name.startswith(around):
            continue
        if _is_linear(m) or _is_linear(getattr(m, "base_layer", None)):
            found[m] = name
            around = (*around, f"{name}.")
    return found


def linear_calls(model: nn.Module, x: Tensor, until: str | None = None) -> list[tuple[str, Tensor, Tensor]]:
    """Return the linear layers that ran, each with its input and output; up to the layer named, with that one."""
    names = _linear_layers(model)
    calls: list[tuple[str, Tensor, Tensor]] = []

    def heard(module: nn.Module, given: Tensor, y: Tensor) -> None:
        calls.append((names[module], given, y))
        if names[module] == until:
            raise _Seen

    with hooked(list(names), heard), suppress(_Seen):
        model(x)
    return calls


@contextmanager
def hooked(modules: Sequence[nn.Module], heard: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Within, each of the modules that runs is heard with its input and its output."""
    with ExitStack() as stack:
        for m in modules:
            stack.enter_context(m.register_forward_hook(lambda m, args, y: heard(m, args[0], y)))
        yield


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
