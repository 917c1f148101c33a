"""Sequences of tokens: ids of a vocabulary, measured place by place and as text."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.modalities.base import MODALITIES, Bounds, Cell, Metric, Modality, by_name

# The ids that every vocabulary begins with.
PADDING = 0  # fills a sequence up; not seen by models, and no loss is taken there
UNKNOWN = 1  # a word that is not in the vocabulary
START = 2  # stands before a sequence that is to be told to a class
SPECIAL = ("", "<unknown>", "<start>")  # as text


Words = list[int]  # the ids of a sequence, without padding


def wrong(found: Tensor, truth: Tensor) -> Tensor:
    """Return the share of each sequence's places that are wrong, where one of the two has a token: -> (N,)."""
    counts = (found != PADDING) | (truth != PADDING)
    return ((found != truth) & counts).sum(-1) / counts.sum(-1).clamp_min(1)


def exact(found: Tensor, truth: Tensor) -> Tensor:
    """Return 1 where a whole sequence is right: -> (N,)."""
    return (found == truth).all(-1).float()


def rouge(n: int, found: Tensor, truth: Tensor) -> Tensor:
    """Return the F1 of runs of n tokens that both have, in any order (Lin 2004): -> (N,)."""
    return _each(
        lambda a, b: _f1(sum((_runs(a, n) & _runs(b, n)).values()), len(a) - n + 1, len(b) - n + 1), found, truth
    )


def precision(found: Tensor, truth: Tensor) -> Tensor:
    """Return the share of the different words found that are in the text: -> (N,)."""
    return _each(lambda a, b: len({*a} & {*b}) / max(len({*a}), 1), found, truth)


def recall(found: Tensor, truth: Tensor) -> Tensor:
    """Return the share of the text's different words that were found: -> (N,)."""
    return _each(lambda a, b: len({*a} & {*b}) / max(len({*b}), 1), found, truth)


def rouge_l(found: Tensor, truth: Tensor) -> Tensor:
    """Return the F1 of the longest common subsequence (Lin 2004): -> (N,)."""
    return _each(lambda a, b: _f1(_common(a, b), len(a), len(b)), found, truth)


def _each(score: Callable[[Words, Words], float], found: Tensor, truth: Tensor) -> Tensor:
    pairs = zip(found.long().tolist(), truth.long().tolist(), strict=True)
    return torch.tensor([score([i for i in a if i != PADDING], [i for i in b if i != PADDING]) for a, b in pairs])


def _runs(ids: Words, n: int) -> Counter[tuple[int, ...]]:
    return Counter(zip(*(ids[i:] for i in range(n)), strict=False))


def _f1(both: int, mine: int, true: int) -> float:
    return 2 * both / (mine + true) if both else 0.0


def _common(a: Words, b: Words) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


@MODALITIES.register("tokens")
@dataclass(frozen=True)
class Tokens(Modality):
    """Sequences of one length, filled up with padding, over this vocabulary."""

    vocabulary: tuple[str, ...] = SPECIAL

    one, many, part = "sequence", "sequences", "token"
    guesses = ("unknown words", "most frequent tokens", "most frequent tokens of the class")
    metrics: ClassVar[Mapping[str, Metric]] = by_name(
        Metric("wrong", wrong, "lower", "Share of the tokens that are wrong, place by place."),
        Metric("exact", exact, "higher", "Sequences that are right from end to end.", True, "exact", ".0%"),
        *(
            Metric(name, function, "higher", said, False, title, ".2f")
            for name, function, said, title in (
                ("precision", precision, "Words found that are in the text, each once.", "precision"),
                ("recall", recall, "Words of the text that were found, each once.", "recall"),
                ("rouge1", partial(rouge, 1), "F1 of tokens, in any order.", "ROUGE-1"),
                ("rouge2", partial(rouge, 2), "F1 of pairs of neighbouring tokens.", "ROUGE-2"),
                ("rougeL", rouge_l, "F1 of the longest common subsequence.", "ROUGE-L"),
            )
        ),
    )
    error, error_name, error_axis = "wrong", "tokens wrong", "share of tokens wrong"
    error_text = "Share of a sequence's tokens that are wrong, each at its place"
    guess_text = "a word nobody knows, the most frequent token of each place, or that among sequences of the class"
    is_share = True
    default_model = "gpt_tiny"

    @property
    def last(self) -> float:
        return float(len(self.vocabulary) - 1)

    def unit(self, x: Tensor, bounds: Bounds) -> Tensor:
        return x.detach().cpu().float().nan_to_num(UNKNOWN).round().clamp(0, len(self.vocabulary) - 1)

    def ignorant(self, like: Tensor, bounds: Bounds) -> Tensor:
        return torch.full_like(like, UNKNOWN)

    def typical(self, public: Tensor) -> Tensor:
        return public.mode(dim=0).values

    def order(self, found: Tensor, truth: Tensor) -> Tensor:
        from scipy.optimize import linear_sum_assignment

        _, order = linear_sum_assignment(wrong(found[None], truth[:, None]).numpy())
        return torch.from_numpy(order)

    def identified(self, found: Tensor, truth: Tensor, gallery: Tensor) -> Tensor:
        """Return 1 where a sequence shares more tokens with its original than with every other one (N,).

        At their places, or in any order: words alone tell a text from others.
        """
        own, others = wrong(found, truth), wrong(found[:, None], gallery[None])
        bags = [rouge(1, one.expand_as(gallery), gallery) for one in found]
        words = rouge(1, found, truth)
        told = [bool((words[i] > bag).all()) for i, bag in enumerate(bags)]
        return ((own[:, None] < others).all(dim=1) | torch.tensor(told)).float()

    def cells(self, x: Tensor, truth: Tensor | None = None) -> list[Cell] | None:
        ids = self.unit(x[None], (0.0, 1.0))[0].long().tolist()
        true: Sequence[int | None] = [None] * len(ids) if truth is None else truth.long().tolist()
        last = max((i + 1 for i, one in enumerate(ids) if one != PADDING), default=0)
        return [
            Cell(self.vocabulary[one] or "_", None if there is None else one == there)
            for one, there in list(zip(ids, true, strict=True))[:last]
        ]

    def row(self) -> dict[str, Any]:
        return {"vocabulary": list(self.vocabulary)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Tokens":
        return cls(tuple(row["vocabulary"]))
