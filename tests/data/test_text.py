"""Text as data: passages, classes, the vocabulary, bad input; and an audit from a file to the report."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradveil.auditing.audit import audit
from gradveil.data import load
from gradveil.data.base import from_arrays
from gradveil.data.text import from_texts, words_of
from gradveil.errors import DataError, GradveilError, ModelError, ScoreError
from gradveil.federated.settings import Local
from gradveil.protection.defense import build as build_defense
from gradveil.report.page import write_report
from gradveil.threats.setup import AuditConfig, fitting_model
from gradveil.threats.trial import observe

STORY = " ".join(f"the {a} cat saw {b} dogs near house {c} ." for a in "abcde" for b in "fghij" for c in "klmno")


def test_words_and_signs() -> None:
    assert words_of("It's ----- GOOD, (2x)!") == ["it", "'", "s", "-----", "good", ",", "(", "2x", ")", "!"]


def test_a_passages_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(STORY)
    data = load(str(tmp_path / "notes.txt"))
    batch = data.train.batch()
    assert data.input_shape == (32,)
    assert data.modality.spec_name == "tokens"
    assert torch.equal(batch.inputs[:, 1:].long(), batch.labels[:, :-1])
    assert data.fitting_loss("cross_entropy") == "next_token"
    shown = data.modality.cells(batch.inputs[0])
    assert shown is not None
    assert " ".join(cell.text for cell in shown) in STORY


def test_lines_with_labels_are_classes(tmp_path: Path) -> None:
    odd = "\x85 "  # no end of a line: what other encodings leave in a text
    lines = (f"{'spam' if i % 2 else 'ham'}\tmail{odd}number {i}\n" for i in range(20))
    (tmp_path / "mail.txt").write_text("".join(lines), "utf-8")
    data = load("text:length=6,path=mail.txt", tmp_path)
    assert data.class_names == ("ham", "spam")
    batch = data.train.batch()
    assert (batch.inputs[:, 0] == 2).all()
    assert (batch.inputs[:, -1] == 0).all()
    assert data.fitting_loss("cross_entropy") == "cross_entropy"


def test_an_audit_of_lines_with_labels_takes_a_model_that_tells_classes(tmp_path: Path) -> None:
    (tmp_path / "mail.txt").write_text("".join(f"{'spam' if i % 2 else 'ham'}\tmail number {i}\n" for i in range(20)))
    data = load(f"{tmp_path}/mail.txt")
    assert (data.default_model, load("manual").default_model) == ("bert_tiny", "gpt_tiny")
    config = AuditConfig(rounds=1, clients=1, images=1, meter_seconds=0, tiers=("oblivious",))
    done = audit(
        dataset=f"text:length=6,path={tmp_path}/mail.txt", defenses=[], config=config, attacks=["span"],
        out=tmp_path / "run",
    )  # fmt: skip
    assert any(line.attack == "span" for line in done.lines)


def test_rare_words_are_unknown_and_the_manual_is_there() -> None:
    data = from_texts("own", ["a a a b b c d"] * 4, length=4, vocabulary=5)
    assert data.modality.row()["vocabulary"][3:] == ["a", "b"]
    assert (data.train.batch().inputs == 1).any()
    for task, classes in (("next", 2048), ("page", 8)):
        manual = load(f"manual:task={task}")
        assert (manual.num_classes, len(manual.train) > 500) == (classes, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "has no words in it"),
        (b"  \n\t ", "has no words in it"),
        (b"one", "no two words"),
        (b"just one short line", "two are needed"),
        (b"\xff\xfe\x00caf", "is not text in UTF-8"),
    ],
)
def test_bad_text_is_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(text)
    with pytest.raises(DataError, match=message) as error:
        load(str(tmp_path / "bad.txt"))
    assert "\n" not in str(error.value)


def test_no_such_file() -> None:
    with pytest.raises(DataError, match=r"There is no file nowhere\.txt"):
        load("nowhere.txt")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt_tiny:length=8,width=16,heads=2", "The sequences have 12 tokens and gpt_tiny has places for 8"),
        ("bert_tiny:vocabulary=9,width=16,heads=2", "has no embedding for that one. Give it a vocabulary of"),
        ("lenet", "cannot"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(model: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message) as error:
        fitting_model(model, from_texts("own", [STORY], length=12), "next_token", 0)
    assert "\n" not in str(error.value)


class Own(nn.Module):
    """As somebody would wrap a model of Hugging Face's: ids in, logits out."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(num_classes, 8), nn.Linear(8, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.words(ids.long()))


def test_a_users_model_of_text_is_taken_and_one_with_few_embeddings_refused() -> None:
    data = from_texts("own", [STORY], length=12)
    assert isinstance(fitting_model(Own, data, "next_token", 0), Own)
    with pytest.raises(ModelError, match="The ids of the data go up to"):
        fitting_model(Own(4), data, "next_token", 0)


def test_noise_pruning_and_veil_defend_text_and_representation_is_refused_by_name() -> None:
    data = from_texts("own", [STORY], length=6)
    model = fitting_model("gpt_tiny:width=16,heads=2", data, "next_token", 0)
    batch, local = data.train.batch(slice(0, 3)), Local(1, None, "next_token")
    plain, *defended = (
        observe(model, batch, build_defense(spec), torch.Generator().manual_seed(0), 40, lr=0.1, local=local)
        for spec in ("none", "gaussian:scale=0.01", "pruning:share=0.9", "veil:z=0.5")
    )
    for seen in defended:
        assert seen.update.gradient.keys() == plain.update.gradient.keys()
        assert not torch.equal(seen.update.gradient["fc.weight"], plain.update.gradient["fc.weight"])
    with pytest.raises(ScoreError, match="defend text with veil, gaussian or pruning"):
        observe(model, batch, build_defense("representation"), torch.Generator(), 40, lr=0.1, local=local)


def test_from_a_file_to_the_report(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(STORY)
    config = AuditConfig(rounds=1, clients=1, images=2, meter_seconds=0, tiers=("oblivious",))
    model = "gpt_tiny:width=64,heads=4,depth=2"
    done = audit(
        dataset=f"text:length=12,path={tmp_path}/notes.txt",
        model=model,
        defenses=[],
        config=config,
        out=tmp_path / "run",
    )
    lines = {line.attack: line for line in done.lines if line.round == "first"}
    assert set(lines) == {"span", "tag:steps=100", "words"}
    assert lines["span"].error.mean == 0
    page = write_report(done.folder).read_text("utf-8")
    assert '<span class="got">cat</span>' in page
    assert "Sequences recovered" in page
    assert "images" not in page.split("</head>")[1].split('id="run"')[0].replace("--images", "")  # the option


def test_a_pretrained_tokenizer_gives_its_own_ids_and_pieces(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "knee", "hurts", "##ing", "##s"]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    made.enable_truncation(3)
    made.enable_padding()
    made.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "notes.txt"
    file.write_text("\n".join(["bad\tknees hurts"] * 4 + ["good\tknee"] * 4))
    data = load(f"text:path={file},length=6,tokenizer={tmp_path}")
    rows = {tuple(row.tolist()) for split in (data.train, data.test) for row in split.batch().inputs.long()}
    assert rows == {(2, 4, 7, 5, 3, 0), (2, 4, 3, 0, 0, 0)}
    assert data.modality.vocabulary == ("", *pieces[1:])  # type: ignore[attr-defined]
    file.write_text("knees hurts knee hurts knee hurts knees knees")
    data = load(f"text:path={file},length=2,tokenizer={tmp_path / 'tokenizer.json'}")
    assert data.num_classes == len(pieces)
    assert not any(bool(((row == 2) | (row == 3)).any()) for row in data.train.batch().inputs)  # passages are parts
    with pytest.raises(DataError, match="nothing is downloaded"):
        load(f"text:path={file},tokenizer={tmp_path / 'nowhere'}")
    other = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(DataError, match="token 0 is 'a' and not padding"):
        load(f"text:path={file},tokenizer={tmp_path / 'other.json'}")


def test_ids_in_an_array_are_told_where_ids_come_from() -> None:
    with pytest.raises(DataError, match=r"are int64; give uint8, or floats in \[0, 1\]\. Token ids come from text:"):
        from_arrays("mine", (np.ones((4, 6), np.int64), np.zeros(4, np.int64)))
