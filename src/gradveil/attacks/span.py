"""Whole batches of text, exactly, from the spans of the first layers' inputs (Petrov et al. 2024, DAGER).

The gradient of a linear layer's weight is dW = Σ δ xᵀ over all tokens: its rows span the layer's inputs as long as
there are fewer tokens than the layer is wide. So every token at every place is held against the span of the first
attention's inputs, and then sequences against that of what this attention gives (the inputs of the layer behind),
which hangs on a token and on those that it sees. A decoder sees those before: its sequences are extended token by
token. An encoder sees all: its sequences are put together at once.

Where noise or several local steps fill the spans, the embeddings are left: each token of a batch adds its gradient to a
row of the embedding of tokens and to one of the embedding of places. The rows of the tokens that are there stand out,
and least squares give the share of each token's row that arose at each place. The loss of a sequence sends all of its
tokens much the same gradient: tokens whose rows point the same way stand in one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_seen, refuse_adaptive
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.sequences import Assembly, FirstAttention, Span, extended, layer_span, word_table
from gradveil.errors import AttackError, LayerError
from gradveil.gradients.functional import output_of, quiet, trial_gradients
from gradveil.modalities.tokens import PADDING
from gradveil.modules import find_layer, representation
from gradveil.ranges import Between
from gradveil.tree import dot
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("words")
@dataclass(frozen=True)
class Words(Attack):
    """Take the tokens whose rows of the embedding's gradient stand out: the words of the batch, in no order.

    Any number of local steps and any batch. Tokens that stand in several places come once.
    """

    kind = "closed form"
    applies_to = (AppliesTo(("tokens",), default="", turn=1),)

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        check_seen([seen], for_ids=True, sizes_for="words")
        (seen,) = at_one_model([seen])
        name = f"{word_table(seen)}.weight"
        rows = seen.update.gradient.get(name)
        if rows is None:
            raise AttackError(f"The update has no gradient of the embedding {name!r}: it is frozen or was dropped.")
        rows = (rows * seen.weights[name] if name in seen.weights else rows).double().cpu()
        rows[PADDING] = 0.0
        count, (length,) = seen.num_examples, seen.input_shape
        there = present(rows, count * length)
        order = there[rows[there].norm(dim=1).argsort(descending=True)]
        ids = torch.full((count * length,), PADDING)
        ids[: len(order)] = order
        ids = ids.reshape(length, count).T  # each sequence has its share of the plainest
        found = ids.to(next(seen.model.parameters()))
        return Reconstruction(found, seen.labels, 0.0, bool(len(there)), {"words": float(len(there))})


AT_ONCE = 128  # tokens of the vocabulary that are held against the span together


@ATTACKS.register("span")
@dataclass(frozen=True)
class SpanCheck(Attack):
    """Tokens, then sequences, that lie in the span of the first layers' inputs; exact for whole batches.

    For models of text. It is exact with fewer tokens in a batch than the model is wide, in one local step; noise fills
    the span, and then the nearest are taken, or what the rows of the embeddings' gradients show.
    """

    kind = "closed form"
    applies_to = (AppliesTo(("tokens",), default=""),)

    token_close: Between = 0.05  # share of a token's input that may lie outside the span
    close: Between = 1e-3  # the same of what attention gives

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        refuse_adaptive([seen], "span")
        seen = seen.as_one_step()
        first = FirstAttention.find(seen)
        check_seen([seen], for_ids=True)
        most = seen.num_examples * first.length
        own = layer_span(seen, first.sources, first.width, most)
        if own is None:
            raise AttackError(
                f"The update has no gradient of the first attention's {' and '.join(first.sources)}: it is frozen or "
                f"was dropped, so that no span shows what it saw."
            )
        given = layer_span(seen, (first.out,), first.width, most)
        if given is None:
            raise AttackError(f"The update has no gradient of {first.out!r}, which tells sequences apart. Use tag.")
        tokens, allowed = self._tokens(seen, first, own, most)
        given = replace(given, clear=given.clear and own.clear)
        parts = first.parts(tokens)
        if first.causal:
            found, guesses = extended(parts, given, allowed, seen.num_examples, self.close), []
            if not found:  # noise too small to close the gap, and too large for the bound: the best go on
                given = replace(given, clear=False)
                found = extended(parts, given, allowed, seen.num_examples, self.close)
        else:
            known = _known_places(seen, first, tokens, allowed)
            fixed = known >= 0
            allowed[fixed] = torch.zeros_like(allowed[fixed]).scatter_(1, known[fixed, None], True)
            assembly = Assembly(parts, given, allowed, known, seen.num_examples, self.close, rng)
            found, guesses = assembly.assembled(), assembly.guesses()
        ids = _filled([tokens[one] for one in (*found, *guesses)], seen)
        exact = given.clear and bool(found)
        # what an encoder finds fits; what a decoder goes on with, or where it ends, may not
        if not found or (first.causal and (not exact or any(len(one) < first.length for one in found))):
            best = _nearest(seen, [ids, *_by_rows(seen, first, most)])
            exact, ids = exact and best is ids, best
        details = {"tokens": float(len(tokens)), "sequences": float(len(found)), "rank": float(given.rank)}
        missing = 1 - len(found) / seen.num_examples
        labels = seen.labels if seen.labels is not None else read_labels(seen, ids)
        if labels is not None and seen.loss.targets == "tokens":
            ids, labels = _shifted(ids, labels.to(ids))
        return Reconstruction(ids.to(next(seen.model.parameters())), labels, missing, exact and not missing, details)

    def _tokens(self, seen: Observation, first: FirstAttention, span: Span, most: int) -> tuple[Tensor, Tensor]:
        """Return the tokens that lie in the span at some place (T,), and at which (T, L)."""
        rows = seen.update.gradient.get(f"{first.words}.weight")
        likely = torch.ones(first.vocabulary, dtype=torch.bool) if rows is None else rows.any(1).cpu()
        likely[PADDING] = False  # is not seen
        tokens = likely.nonzero()[:, 0]  # those without a gradient of their embedding are not there
        each = (some[:, None].expand(-1, first.length) for some in tokens.split(AT_ONCE))
        outside = torch.cat([span.away(first.inputs(ids)) for ids in each])  # (T, L)
        close = outside < self.token_close
        if not span.clear or not bool(close.any()):
            best = outside.amin(1).topk(min(most, len(tokens)), largest=False).indices
            return tokens[best], torch.ones_like(close[best])
        there = close.any(1)
        return tokens[there], close[there]


def _known_places(seen: Observation, first: FirstAttention, tokens: Tensor, allowed: Tensor) -> Tensor:
    """Return the places of tokens that can stand at one alone, by the span or by their embedding's gradient."""
    place = allowed.double().argmax(1).where(allowed.sum(1) == 1, -1)
    before, words = first.before_norm(tokens), seen.update.gradient.get(f"{first.words}.weight")
    if before is None or words is None:
        return place
    angled = places(before, words[tokens].double())
    return place.where(place >= 0, angled)


def _by_rows(seen: Observation, first: FirstAttention, most: int) -> list[Tensor]:
    """Return the ids (N, L) that the gradients of the embeddings show by themselves, if they were sent."""
    table, gradient = first.place_rows(), seen.update.gradient
    words = gradient.get(f"{first.words}.weight")
    places = None if table is None else gradient.get(f"{table[0]}.weight")
    if table is None or words is None or places is None:
        return []
    words, places = words.double().cpu(), places[table[1]].double().cpu()
    there = present(words, most)
    return [there[by_rows(words[there], places, seen.num_examples)]] if len(there) else []


def _nearest(seen: Observation, answers: Sequence[Tensor]) -> Tensor:
    """Return the ids (N, L) whose gradient points the way of the client's; the last where labels are not to be had."""
    if len(answers) == 1:
        return answers[0]
    sent, like = seen.update.gradient, next(seen.model.parameters())
    trial = trial_gradients(seen.model, tuple(sent), loss=seen.loss)
    distances = []
    for ids in answers:
        labels = seen.labels if seen.labels is not None else read_labels(seen, ids)
        if seen.loss.targets == "tokens":
            labels = _shifted(ids.clone(), torch.zeros_like(ids) if labels is None else labels.to(ids))[1]
        if labels is None:
            return answers[-1]
        y = seen.loss.rows(labels, seen.num_classes)[None].to(like)
        made = {n: g[0].detach() for n, g in trial(ids[None].to(like), y).items()}
        sizes = dot(made, made) * dot(sent, sent)
        distances.append(1 - float(dot(made, sent)) / max(float(sizes) ** 0.5, 1e-300))
    return answers[distances.index(min(distances))]


def _filled(found: Sequence[Tensor], seen: Observation) -> Tensor:
    """Return ids (N, L): the sequences found, again where there were fewer than examples, padded."""
    ids = torch.full((seen.num_examples, *seen.input_shape), PADDING)
    if not found:
        return ids
    for i in range(len(ids)):
        one = found[i % len(found)]
        ids[i, : len(one)] = one
    return ids


def _shifted(ids: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences whose labels are the tokens that follow; a last token has no gradient but as a label."""
    ends = (ids[:, 1:] == PADDING) & (ids[:, :-1] != PADDING)
    ids[:, 1:] = read[:, :-1].where(ends, ids[:, 1:])
    return ids, torch.cat([ids[:, 1:], read[:, -1:].where(ids[:, -1:] != PADDING, PADDING)], 1)


def read_labels(seen: Observation, inputs: Tensor) -> Tensor | None:
    """Return the labels at which inputs that were found give the last layer's gradient; None: it does not show them."""
    try:
        layer = find_layer(seen.model)
    except LayerError:
        return None
    gradient, like = seen.update.gradient.get(f"{layer}.weight"), next(seen.model.parameters())
    if gradient is None:
        return None
    with torch.no_grad(), quiet(seen.model):
        rows = representation(seen.model, layer, inputs.to(like)).double()
    output = output_of(seen.model, inputs).double()
    rows = rows.flatten(0, -2)
    if gradient.shape != (output.shape[-1], rows.shape[1]) or len(rows) > rows.shape[1]:
        return None
    slope = torch.linalg.lstsq(rows.T.cpu(), gradient.double().T.cpu(), driver="gelsd").solution  # dW = slopeᵀ rows
    if slope.numel() != output.numel():  # a mean over what the layer gives at several places, or the like
        return None
    return seen.loss.read(output, slope.view_as(output).to(output))


RIGHT_ANGLE = 3e-7  # cosine, below which it is one


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
