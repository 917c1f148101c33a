"""Sequences of a causal model, token by token: what attention gives at a place hangs on the tokens up to it alone."""

import torch
from torch import Tensor

from gradveil.attacks.sequences.spans import Span

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
