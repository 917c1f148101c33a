"""Sequences read off the gradients of the embeddings alone, where noise or several local steps have filled the spans.

Each token of a batch adds its gradient to a row of the embedding of tokens and to one of the embedding of places. So
the rows of the tokens that are there stand out, and a place's row is the sum of what its tokens added: least squares
give the share of each token's row that arose at each place, in any number of local steps. The loss of a sequence sends
all of its tokens much the same gradient: tokens whose rows point the same way stand in one sequence.
"""

import torch
from torch import Tensor

STANDS_OUT = 1.5  # times the lower quartile of all rows' lengths, which noise makes alike
LEAST = 0.25  # copies of a token at a place, below which it does not stand there
RARE = 0.6  # share of a token's row that arose at one place, above which it counts as one of one sequence
STARTS, ROUNDS = 8, 20  # of dealing out tokens to sequences


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
    for _ in range(ROUNDS):
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
