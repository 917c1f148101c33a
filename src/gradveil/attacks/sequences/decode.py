"""Sequences put together from tokens: of a causal model, of one that sees all tokens at once, of embeddings alone.

Causal: what attention gives at a place hangs on the tokens up to it alone, so sequences are extended token by token.

All at once: what attention gives a token, Σ aₜ vₜ / Σ aₜ over the tokens of its sequence, lies in a known span. For a
token whose place is known (``places``) that is a linear equation in which tokens stand beside it, but for the sum Σ aₜ
of each head, which changes little. So a choice of one token for each place is relaxed to weights, solved for by
alternating projections (ADMM) while the sums follow, and rounded; then again from several of its tokens at once, which
is far more equations. A sequence is taken where what attention gives lies in the span at every place.

Embeddings, where noise or several local steps have filled the spans: each token of a batch adds its gradient to a row
of the embedding of tokens and to one of the embedding of places. So the rows of the tokens that are there stand out,
and a place's row is the sum of what its tokens added: least squares give the share of each token's row that arose at
each place, in any number of local steps. The loss of a sequence sends all of its tokens much the same gradient: tokens
whose rows point the same way stand in one sequence.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks.sequences.attention import Span, attend

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


STANDS_OUT = 1.5  # times the lower quartile of all rows' lengths, which noise makes alike
LEAST = 0.25  # copies of a token at a place, below which it does not stand there
RARE = 0.6  # share of a token's row that arose at one place, above which it counts as one of one sequence
STARTS, DEALS = 8, 20  # of dealing out tokens to sequences


def present(words: Tensor, most: int) -> Tensor:
    """Return the tokens whose rows (V, width) stand out, ``most`` of them at most."""
    size = words.norm(dim=1)
    out = size > STANDS_OUT * size.quantile(0.25)
    found: Tensor = size.where(out, 0).topk(min(most, int(out.sum()))).indices.sort().values
    return found


def by_rows(words: Tensor, places: Tensor, count: int) -> Tensor:
    """Return sequences (count, L) as numbers of tokens, from the rows of tokens (T, width) and places (L, width)."""
    share = torch.linalg.lstsq(words.T, places.T, driver="gelsd").solution  # (T, L)
    largest = share.amax(1).clamp(1 / places.shape[0], 1)
    copies = share / largest[:, None]  # those of a token at its places are alike, so that the largest share is one copy
    best = copies.topk(min(count, len(copies)), dim=0)
    there = best.indices.where(best.values > LEAST, best.indices[:1])  # (count or T, L); the first may stand in several
    return _dealt(words, there.T, largest > RARE, count)


def _dealt(words: Tensor, there: Tensor, rare: Tensor, count: int) -> Tensor:
    """Deal the tokens that stand at each place (L, count) out to sequences, one to each; the best of several starts."""
    way = words / words.norm(dim=1, keepdim=True)
    there = there[:, torch.arange(count) % there.shape[1]]
    starts = rare[there].sum(1).argsort(descending=True)[:STARTS]
    tries = [_from(way, there, rare, way[there[start]]) for start in starts]
    return max(tries, key=lambda one: one[0])[1]


def _from(way: Tensor, there: Tensor, rare: Tensor, middle: Tensor) -> tuple[float, Tensor]:
    """Return how well tokens point the way of their sequences' middles (count, width), and the sequences."""
    from scipy.optimize import linear_sum_assignment

    sequences, total = there.T.clone(), 0.0
    for _ in range(DEALS):
        mixed = torch.linalg.lstsq(middle.T, way.T, driver="gelsd").solution.T  # (T, count): those of several sequences
        mixed = mixed / mixed.abs().sum(1, keepdim=True).clamp_min(1e-30)
        alike = (way @ middle.T).where(rare[:, None], mixed)
        before, total = sequences.clone(), 0.0
        for place, tokens in enumerate(there):
            which, whose = (torch.as_tensor(i) for i in linear_sum_assignment(-alike[tokens].cpu().numpy()))
            sequences[whose, place] = tokens[which]
            total += float(alike[tokens[which], whose].sum())
        if torch.equal(before, sequences):
            break
        weight = rare[sequences].to(way) + 1e-6
        middle = (way[sequences] * weight[..., None]).sum(1)
        middle = middle / middle.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return total, sequences
