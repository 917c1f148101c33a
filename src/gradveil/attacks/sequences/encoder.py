"""Sequences of a model that sees all tokens at once: which of the tokens found stand together, and where.

What attention gives a token, Σ aₜ vₜ / Σ aₜ over the tokens of its sequence, lies in a known span. For a token whose
place is known (``places``) that is a linear equation in which tokens stand beside it, but for the sum Σ aₜ of each
head, which changes little. So a choice of one token for each place is relaxed to weights, solved for by alternating
projections (ADMM) while the sums follow, and rounded; then again from several of its tokens at once, which is far more
equations. A sequence is taken where what attention gives lies in the span at every place.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks.sequences.attention import attend
from gradveil.attacks.sequences.decoder import Parts
from gradveil.attacks.sequences.spans import Span

EQUATIONS = 256  # of one token that are used, at most
TOGETHER = 8  # tokens that are asked at once
STEPS, OFTEN = 90, 30  # of the projections, and how often the sums follow
ROUNDS = 3  # of asking, each with more of what the one before says
MOST, FEW = 64, 4  # tokens that are asked in a row without a sequence being found; under noise so many a sequence
PASSES = 3  # over the tokens that are in no sequence yet
RIGHT_ANGLE = 3e-7  # cosine, below which it is one

Pair = tuple[int, int]  # a token and its place


def places(before: Tensor, words: Tensor) -> Tensor:
    """Return the place of each token of which all stand at one place (T,), -1 of the others.

    A layer norm's gradient by its input is at a right angle to that input less its mean. ``before`` (T, L, width) is
    that input for each token at each place, ``words`` (T, width) the gradient of its embedding.
    """
    centred = before - before.mean(-1, keepdim=True)
    cosine = torch.einsum("tlw,tw->tl", centred, words).abs()
    cosine = cosine / (centred.norm(dim=-1) * words.norm(dim=-1, keepdim=True)).clamp_min(1e-300)
    least, place = cosine.min(1)
    found: Tensor = place.where(least < RIGHT_ANGLE, -1)
    return found


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
        """Return the sequences found."""
        for _ in range(PASSES if self.span.clear else 1):  # noise lets nothing fit, and asking takes long
            before = len(self.found)
            self._pass()
            if len(self.found) in (before, self.count):
                break
        return self.found

    def guesses(self) -> list[Tensor]:
        """Return choices that do not fit at every place, the best first, for the sequences that were not found."""
        rest = sorted(self.missed.values(), key=lambda miss: miss[0])
        kept: list[Tensor] = []
        for _, one in rest:  # one for each sequence: those that agree in most places are of the same
            if not any(_agree(one, other) for other in (*self.found, *kept)):
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
        missing = [int(i) for i in range(len(self.known)) if not self._explained(int(i))]
        known = [(i, int(self.known[i])) for i in missing if self.known[i] >= 0]
        rest = [(i, int(p)) for i in missing if self.known[i] < 0 for p in self.allowed[i].nonzero()[:, 0]]
        rest = rest if self.span.clear else []  # far too many to be asked where nothing tells which are right
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
