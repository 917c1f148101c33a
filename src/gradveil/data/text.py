"""Text: a file of one's own, or the manual that comes with Python; words and signs become ids of a vocabulary."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

from gradveil.data.base import DATASETS, Array, Dataset, Source, Split, hold_out, inside
from gradveil.errors import DataError, MissingExtraError
from gradveil.files import wrap_parse_errors
from gradveil.modalities.tokens import PADDING, SPECIAL, START, UNKNOWN, Tokens
from gradveil.ranges import Between, Range

PAGES = 8  # of the manual that are told apart
LARGEST_OF_ALL = 2**27  # letters of texts in rows
LARGEST = 2**25  # bytes of a file: each of its words is an object, of some hundred bytes where all differ

Length = Annotated[int, Range(2, 4096)]
Size = Annotated[int, Range(len(SPECIAL) + 1, 10**6)]


def words_of(text: str) -> list[str]:
    """Return the words and signs of a text, in small letters; a sign that is repeated counts as one."""
    return [found[0] for found in re.finditer(r"\w+|([^\w\s])\1*", text.lower())]


def from_texts(
    name: str,
    texts: Sequence[str],
    labels: Sequence[str] | None = None,
    length: int = 32,
    vocabulary: int = 2048,
    test_share: float = 0.2,
    tokenizer: str = "",
    test_from: int | None = None,
) -> Dataset:
    """Return a data set of texts, each with its class; without classes, of passages whose next tokens are the targets.

    The vocabulary is the most frequent words of all the texts, and public. Texts with a class are cut to ``length``
    tokens; those without are cut into passages of that many. Those with a class from number ``test_from`` on are the
    test; without it a share is set aside. A ``tokenizer`` is that of a pretrained model: its pieces are the vocabulary,
    and what it puts around a text with a class stays.
    """
    if labels is not None and len(labels) != len(texts):
        raise DataError(f"{name} has {len(texts)} texts and {len(labels)} labels; give one for each.")
    if (size := sum(map(len, texts))) > LARGEST_OF_ALL:
        raise DataError(
            f"{name} has {size:,} letters of text, and the most is {LARGEST_OF_ALL:,}. Leave some texts out."
        )
    if tokenizer:
        ids, kind = _in_pieces(texts, Path(tokenizer).expanduser(), whole=labels is not None)
    else:
        ids, kind = _in_words(texts, vocabulary, [] if labels is None else [START])
    if not any(one[labels is not None :] for one in ids):
        raise DataError(f"{name} has no words in it: it is empty, or holds no text.")
    if labels is None:
        inputs, targets = _passages(name, ids, length)
        names = kind.vocabulary
    else:
        names = tuple(sorted(set(labels)))
        inputs = np.stack([_row(one, length) for one in ids])
        place = {name: i for i, name in enumerate(names)}
        targets = np.array([place[label] for label in labels], np.int64)
    if len(inputs) < 2:
        raise DataError(f"{name} makes one passage of {length} tokens, and two are needed. Give more text.")
    everyone = np.arange(len(inputs))
    parts = hold_out(targets, test_share) if test_from is None else (everyone[:test_from], everyone[test_from:])
    train, test = (Split(inputs[i], torch.from_numpy(targets[i]), 1.0) for i in parts)
    return Dataset(name, train, test, names, kind)


def _in_words(texts: Sequence[str], vocabulary: int, before: list[int]) -> tuple[list[list[int]], Tokens]:
    """Return the ids of texts by their most frequent words, each text with ``before`` in front of it."""
    split = [words_of(text) for text in texts]
    counts = Counter(word for words in split for word in words)
    known = tuple(word for word, _ in counts.most_common(vocabulary - len(SPECIAL)))
    number = {word: i for i, word in enumerate(known, len(SPECIAL))}
    return [[*before, *(number.get(word, UNKNOWN) for word in words)] for words in split], Tokens((*SPECIAL, *known))


def _in_pieces(texts: Sequence[str], path: Path, whole: bool) -> tuple[list[list[int]], Tokens]:
    """Return the ids of texts by a pretrained tokenizer, with what it puts around them where they are whole."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("A pretrained tokenizer", "transformers") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    with wrap_parse_errors(file, DataError, "Give a folder that save_pretrained() wrote; nothing is downloaded."):
        spell = Tokenizer.from_file(str(file))
    spell.no_padding()
    spell.no_truncation()
    pieces = [spell.id_to_token(i) or "" for i in range(spell.get_vocab_size())]
    if pieces[PADDING] not in ("[PAD]", "<pad>"):
        raise DataError(f"{file}: token {PADDING} is {pieces[PADDING]!r} and not padding, as it is in BERT's and T5's.")
    ids = [one.ids for one in spell.encode_batch(list(texts), add_special_tokens=whole)]
    return ids, Tokens(("", *pieces[1:]))


def _row(ids: Sequence[int], length: int) -> Array:
    return np.array([*ids[:length], *[PADDING] * (length - len(ids))], np.int32)


def _passages(name: str, texts: Sequence[Sequence[int]], length: int) -> tuple[Array, Array]:
    """Return passages of all texts (N, L) and, for each token, the one that follows (N, L), padding at an end."""
    cut = [one[i : i + length + 1] for one in texts for i in range(0, max(len(one) - 1, 0), length)]
    if not cut:
        raise DataError(f"{name} has no two words that follow each other.")
    whole = np.stack([_row(one, length + 1) for one in cut])
    return whole[:, :-1].copy(), whole[:, 1:].astype(np.int64)


@DATASETS.register("text")
@dataclass(frozen=True)
class TextFile(Source):
    """Your own text: ``text:path=notes.txt``, in UTF-8; its passages, each token's target being the next one.

    Where every line is a label, a tab and a text, the lines are the examples and the labels their classes.
    """

    path: str = ""
    length: Length = 32  # tokens of a sequence
    vocabulary: Size = 2048  # tokens at most; rarer words are unknown
    test_share: Between = 0.2
    tokenizer: str = ""  # of a pretrained model: its folder, or its tokenizer.json; in place of a vocabulary

    def load(self, data: Path | None) -> Dataset:
        path = inside(data, self.path)
        if not self.path or not path.is_file():
            raise DataError(f"There is no file {self.path or 'of text'}. Give --dataset notes.txt, or text:path=FILE.")
        if (size := path.stat().st_size) > LARGEST:
            raise DataError(f"{path} has {size:,} bytes, and the most is {LARGEST:,}. Give a part of it.")
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8 (byte {error.start}). Save it as UTF-8.") from error
        settings = (self.length, self.vocabulary, self.test_share, self.tokenizer)
        lines = [line.split("\t", 1) for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and all(len(line) == 2 for line in lines):
            return from_texts(path.name, [line[1] for line in lines], [line[0].strip() for line in lines], *settings)
        return from_texts(path.name, [text], None, *settings)


@DATASETS.register("manual")
@dataclass(frozen=True)
class Manual(Source):
    """The manual that comes with Python's help(): passages, and the next tokens or, of the longest pages, which it is.

    Its words depend on the version of Python.
    """

    task: Literal["next", "page"] = "next"
    length: Length = 32  # tokens of a sequence
    vocabulary: Size = 2048  # tokens at most; rarer words are unknown
    test_share: Between = 0.2

    def load(self, data: Path | None) -> Dataset:
        from pydoc_data.topics import topics

        settings = (self.length, self.vocabulary, self.test_share)
        if self.task == "next":
            return from_texts("manual", [topics[name] for name in sorted(topics)], None, *settings)
        longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:PAGES]
        step = self.length - 1  # the start takes a place
        cut = {name: words_of(topics[name]) for name in longest}
        parts = [(name, words[i : i + step]) for name, words in cut.items() for i in range(0, len(words), step)]
        texts, labels = [" ".join(words) for _, words in parts], [name for name, _ in parts]
        return from_texts("manual", texts, labels, *settings)
