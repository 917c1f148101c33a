"""Sequences of tokens: the first attention of a model, the span of what it saw, and sequences put together in it.

Nothing is asked of a model but that its first attention is softmax(q kᵀ/√d) v in heads: the layers are found by running
it, and the number of heads is the one that gives what the next layer saw. The gradient of a linear layer is
dW = Σ δ xᵀ, so every input x lies in the span of its rows.

A causal model is decoded token by token: what attention gives at a place hangs on the tokens up to it alone.

Where all tokens are seen at once, what attention gives a token, Σ aₜ vₜ / Σ aₜ over the tokens of its sequence, lies in
a known span. For a token whose place is known that is a linear equation in which tokens stand beside it,
but for the sum Σ aₜ of each head, which changes little. So a choice of one token for each place is relaxed to weights,
solved for by alternating projections (ADMM) while the sums follow, and rounded; then again from several of its tokens
at once, which is far more equations. A sequence is taken where what attention gives lies in the span at every place.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Generator, Tensor, nn

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
        s, vt = directions(gradient.double())
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
        inside = self.rank < self.null.shape[1]  # the smaller product; in float64 it is good to 1e-8
        part = (x @ (self.basis if inside else self.null)).norm(dim=-1) / seen.norm(dim=-1).clamp_min(1e-30)
        share: Tensor = (1 - part.square()).clamp_min(0).sqrt() if inside else part
        return share


def directions(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular values (width,) and all right singular vectors (width, width) of a gradient (out, width)."""
    rows, width = gradient.shape
    padded = torch.cat([gradient, gradient.new_zeros(max(0, width - rows), width)])
    _, s, vt = torch.linalg.svd(padded, full_matrices=False)
    return s, vt


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
    found, module = [], seen.model.get_submodule(layer)
    for name, _ in module.named_parameters():
        path = f"{layer}.{name}"
        if (
            path not in seen.visible
            or seen.update.gradient[path].ndim != 2
            or not bool(seen.update.gradient[path].any())
        ):
            continue
        gradient, through = seen.update.gradient[path].double(), None
        if "lora_b" in name.lower():
            first = name.replace("lora_b", "lora_a").replace("lora_B", "lora_A")
            through = module.get_parameter(first).detach().double()
        elif type(module.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D":  # Hugging Face's has (in, out)
            gradient = gradient.T
        found.append(Shown(gradient.double(), through, seen.noise.get(path, 0.0)))
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

    with hooked(names, heard), suppress(_Seen):
        model(x)
    return calls


@contextmanager
def hooked(modules: Iterable[nn.Module], heard: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
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
                f"{type(model).__name__} does not begin with attention: {same[0]!r} comes first, and span needs one "
                "layer that makes queries, keys and values, or three. Use tag."
            )
        made = torch.cat([y for name, _, y in calls if name in same], -1)
        out, o = rest[0]
        if made.shape[-1] != 3 * o.shape[-1]:
            raise AttackError(f"{out!r} sees {o.shape[-1]} numbers a token, not the {made.shape[-1] // 3} of values.")
        causal = bool(torch.allclose(o[0, 0], o[1, 0], rtol=1e-9))
        return cls(model, length, words, vocabulary, tuple(same), out, _heads(made, o, causal), causal)

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
        norms = (m for m in self.model.modules() if isinstance(m, nn.LayerNorm))
        with hooked(norms, lambda m, x, y: kept.append((x, y))):
            x = self.inputs(ids)
        return next((before for before, after in kept if after is x), None)

    def place_rows(self) -> tuple[str, Tensor] | None:
        """Return the embedding of places, and its rows for them (L,); None: there is no such table."""
        ids, kept = torch.full((1, self.length), self.vocabulary - 1), list[tuple[nn.Module, Tensor]]()
        tables: dict[nn.Module, str] = {m: n for n, m in self.model.named_modules() if isinstance(m, nn.Embedding)}
        with hooked(tables, lambda m, x, y: kept.append((m, x))):
            self.inputs(ids)
        rows = ((tables[m], x.reshape(-1)) for m, x in kept)
        return next((one for one in rows if len(one[1].unique()) == self.length > 1), None)


def word_table(seen: Observation) -> str:
    """Return the name of the embedding of tokens: the first that there is."""
    tables: list[str] = [name for name, m in seen.model.named_modules() if isinstance(m, nn.Embedding)]
    if not tables or len(seen.input_shape) != 1:
        kind = type(seen.model).__name__
        raise AttackError(f"{kind} has no nn.Embedding of ids: span and tag are attacks on text. Use gs or newton.")
    return tables[0]


def layer_span(seen: Observation, layers: Sequence[str], width: int, most: int) -> Span | None:
    """Return the span of what layers that see the same saw, by the gradients of their weights; None: nothing shows it.

    Of low-rank factors B A the gradient of A shows the inputs, that of B shows A times them, which is all there is
    while B is zero.
    """
    shown = [one for layer in layers for one in shown_inputs(seen, layer)]
    whole, noise = [one.gradient for one in shown if one.through is None], max((s.noise for s in shown), default=0.0)
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


Parts = tuple[Tensor, Tensor, Tensor]


def extended(parts: Parts, span: Span, allowed: Tensor, count: int, close: float) -> list[Tensor]:
    """Return sequences, each as numbers of tokens (length,), that lie in the span at every place.

    ``parts`` are queries, keys and values of each token at each place (T, L, heads, d), ``span`` that of what
    attention gives, ``allowed`` (T, L) where a token may stand. A sequence that no token goes on with has ended there;
    where the span is not clear, the best go on.
    """
    q, k, v = parts
    scale = q.shape[-1] ** -0.5
    begun, ended = torch.zeros(1, 0, dtype=torch.long), []
    for place in range(q.shape[1]):
        before = torch.arange(place)
        keys, values = k[begun, before], v[begun, before]  # (B, place, heads, d)
        fit = torch.einsum("thd,bphd->bthp", q[:, place], keys)
        own = (q[:, place] * k[:, place]).sum(-1)[None, :, :, None].expand(len(begun), -1, -1, 1)
        weights = (torch.cat([fit, own], -1) * scale).softmax(-1)
        given = torch.einsum("bthp,bphd->bthd", weights[..., :place], values) + weights[..., place:] * v[:, place]
        away = span.away(given.flatten(2)).masked_fill(~allowed[:, place], torch.inf)  # (B, T)
        best = away.flatten().topk(min(count, int(allowed[:, place].sum()) * len(begun)), largest=False)
        kept = best.indices[best.values < close] if span.clear else best.indices
        from_, token = kept // len(q), kept % len(q)
        going = torch.isin(torch.arange(len(begun)), from_)
        ended += [one for one in begun[~going] if place]
        begun = torch.cat([begun[from_], token[:, None]], 1)
        if not len(begun):
            break
    return [*begun, *ended]


EQUATIONS = 256  # of one token that are used, at most
TOGETHER = 8  # tokens that are asked at once
STEPS, OFTEN = 90, 30  # of the projections, and how often the sums follow
ROUNDS = 3  # of asking, each with more of what the one before says
MOST, FEW = 64, 4  # tokens that are asked in a row without a sequence being found; under noise so many a sequence
PASSES = 3  # over the tokens that are in no sequence yet

Pair = tuple[int, int]  # a token and its place


@dataclass
class Assembly:
    """Tokens (T,) at places, and the sequences that were put together of them."""

    parts: Parts  # queries, keys and values (T, L, heads, d)
    span: Span  # of what attention gives
    allowed: Tensor  # (T, L): where a token may stand
    known: Tensor  # (T,): the place of a token that stands there alone, else -1
    count: int  # of sequences
    close: float
    rng: Generator

    def __post_init__(self) -> None:
        self.found: list[Tensor] = []  # each (length,), as numbers of tokens
        self.missed: dict[Pair, tuple[float, Tensor]] = {}  # the best choice so far by what was asked
        null = self.span.null
        if null.shape[1] > EQUATIONS:  # random mixtures of the equations say the same
            mix = torch.randn(null.shape[1], EQUATIONS, generator=self.rng, dtype=null.dtype)
            null = null @ mix / EQUATIONS**0.5
        self.null = null

    def assembled(self) -> list[Tensor]:
        for _ in range(PASSES if self.span.clear else 1):  # noise lets nothing fit, and asking takes long
            before = len(self.found)
            self._pass()
            if len(self.found) in (before, self.count):
                break
        return self.found

    def guesses(self) -> list[Tensor]:
        """Return choices that do not fit at every place, the best first, for the sequences that were not found."""
        kept: list[Tensor] = []
        for _, one in sorted(self.missed.values(), key=lambda miss: miss[0]):
            if not any(_agree(one, other) for other in (*self.found, *kept)):  # else it is of the same sequence
                kept.append(one)
        return kept[: self.count - len(self.found)]

    def _pass(self) -> None:
        grid = _Grid.of(self)
        tried: set[Pair] = set()
        most, in_vain = MOST if self.span.clear else min(MOST, FEW * self.count), 0
        while len(self.found) < self.count and in_vain < most:
            asked = [pair for pair in self._asked() if pair not in tried][: min(TOGETHER, most)]
            if not asked:
                return
            tried |= set(asked)
            before = len(self.found)
            for pair in asked:
                together = [pair]
                for _ in range(ROUNDS):
                    if self._explained(pair[0]):
                        break
                    chosen, weights = grid.solved(together)
                    self._keep(pair, chosen)
                    together = self._surest(pair, chosen, weights)
            in_vain = in_vain + len(asked) if len(self.found) == before else 0

    def _asked(self) -> list[Pair]:
        """Return tokens that are in no sequence yet with their places; those whose place is not known come last."""
        missing = [i for i in range(len(self.known)) if not self._explained(i)]
        known, rest = [(i, int(self.known[i])) for i in missing if self.known[i] >= 0], list[Pair]()
        if self.span.clear:  # else they are far too many, and nothing tells which are right
            rest = [(i, int(p)) for i in missing if self.known[i] < 0 for p in self.allowed[i].nonzero()[:, 0]]
        sure = [pair for pair in known if int(self.allowed[:, pair[1]].sum()) > 1]  # not what all of them begin with
        return [*sure, *rest] or known

    def _explained(self, token: int) -> bool:
        return any(bool((one == token).any()) for one in self.found)

    def _surest(self, asked: Pair, chosen: Tensor, weights: Tensor) -> list[Pair]:
        """Return the tokens of a rounded choice that are to be asked together: those with the largest weights."""
        order = weights.argsort(descending=True).tolist()
        pairs = [(int(chosen[p]), p) for p in order if int(chosen[p]) >= 0 and int(self.allowed[:, p].sum()) > 1]
        return list(dict.fromkeys([asked, *pairs]))[:TOGETHER]

    def _keep(self, asked: Pair, chosen: Tensor) -> None:
        """Take a choice (L,) where it lies in the span at every place; -1: no token. Else it is a guess."""
        q, k, v = self.parts
        length = int((chosen >= 0).sum())
        one, place = chosen[:length], torch.arange(length)
        if not length or bool((one < 0).any()) or any(torch.equal(one, other) for other in self.found):
            return
        given = attend(q[one, place][None], k[one, place][None], v[one, place][None], causal=False)
        away = self.span.away(given)
        if float(away.max()) < self.close:
            self.found.append(one)
        elif asked not in self.missed or float(away.mean()) < self.missed[asked][0]:
            self.missed[asked] = (float(away.mean()), one)


def _agree(one: Tensor, other: Tensor) -> bool:
    shorter = min(len(one), len(other))
    return float((one[:shorter] == other[:shorter]).double().mean()) > 0.5


@dataclass(frozen=True)
class _Grid:
    """What may stand at each place, side by side: (L, C), the first of each place being no token at all."""

    whole: Assembly
    tokens: Tensor  # (L, C), -1: none
    there: Tensor  # (L, C): whether there is such a choice
    keys: Tensor  # (L, C, heads, d)
    outside: Tensor  # (heads, L C, equations): the part of a value outside the span

    @classmethod
    def of(cls, whole: Assembly) -> "_Grid":
        used = torch.zeros(len(whole.allowed), dtype=torch.bool)
        if whole.found:
            used[torch.cat(whole.found)] = True
        open_ = whole.allowed & ~(used & (whole.known >= 0) & ~(whole.allowed.sum(0) == 1)[whole.known])[:, None]
        length, most = open_.shape[1], int(open_.sum(0).max())
        tokens = torch.full((length, 1 + most), -1)
        for place in range(length):
            mine = open_[:, place].nonzero()[:, 0]
            tokens[place, 1 : 1 + len(mine)] = mine
        there = tokens >= 0
        there[:, 0] = True
        at = torch.arange(length)[:, None].expand_as(tokens)
        _, k, v = whole.parts
        values = v[tokens.clamp_min(0), at] * (tokens >= 0)[..., None, None]
        heads = v.shape[2]
        null = whole.null.unflatten(0, (heads, -1))  # (heads, d, equations)
        outside = torch.einsum("lchd,hde->hlce", values, null).flatten(1, 2)
        return cls(whole, tokens, there, k[tokens.clamp_min(0), at], outside.float())

    def solved(self, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
        """Return the choice (L,) for tokens with their places that stand in one sequence, and its weights."""
        q = self.whole.parts[0]
        token, place = (torch.tensor(one) for one in zip(*pairs, strict=True))
        there = self.there.clone()
        for i, p in pairs[:1]:  # of the others one is less sure
            there[p] &= self.tokens[p] == i
        fit = torch.einsum("qhd,lchd->qhlc", q[token, place], self.keys) * q.shape[-1] ** -0.5
        attention = (fit.exp() * (there & (self.tokens >= 0))).flatten(2).float()  # (Q, heads, L C)
        y = (there / there.sum(1, keepdim=True)).float()
        y[:, 0] = y[:, 0] * there[:, 1:].any(1).logical_not()
        y = y / y.sum(1, keepdim=True)
        u = torch.zeros_like(y)
        for step in range(STEPS):
            if step % OFTEN == 0:
                sums = attention @ y.flatten()  # (Q, heads)
                m = torch.einsum("qhv,hve->vqe", attention / sums[..., None], self.outside).flatten(1)
                m = m / m.norm(dim=1).mean().clamp_min(1e-30) * there.flatten()[:, None]
                inner = torch.linalg.cholesky(m.T @ m + torch.eye(m.shape[1]))
            z = (y - u).flatten()[:, None]
            x = (z - m @ torch.cholesky_solve(m.T @ z, inner)).view_as(y)
            y = _on_simplex(x + u, there)
            u = u + x - y
        weight, choice = y.max(1)
        return self.tokens.gather(1, choice[:, None])[:, 0], weight


def _on_simplex(z: Tensor, there: Tensor) -> Tensor:
    """Return the nearest rows (L, C) that are not negative, sum to one and are zero where nothing may stand."""
    z = z.masked_fill(~there, -1e9)
    falling = z.sort(-1, descending=True).values
    over = (falling.cumsum(-1) - 1) / torch.arange(1, z.shape[-1] + 1)
    last = (falling > over).sum(-1, keepdim=True) - 1
    return (z - over.gather(-1, last)).clamp_min(0)
