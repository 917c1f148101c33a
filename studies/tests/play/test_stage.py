"""What the playground takes as an example, and how it refuses what it cannot use."""

import io
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from gradveil.errors import GradveilError
from gradveil_studies.play.cards import all_cards, example, table
from gradveil_studies.play.figures import NOT_MEASURED, certificate, cost, leak
from gradveil_studies.play.servers import blind_guess, trials
from gradveil_studies.play.stage import DATASETS, DIALS, MODELS, STRENGTHS, spec_of, stage


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def bomb() -> bytes:
    """A small file that says it has 60,000 x 60,000 pixels."""
    head = struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    content = zlib.compress(bytes(10**5))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def test_a_picture_is_scaled_to_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(png(300, 200))
    one = stage("digits").uploaded(tmp_path / "mine.png", 4)
    assert one.inputs.shape == (1, 1, 8, 8)
    assert one.labels.tolist() == [4]
    assert 0 <= float(one.inputs.min()) < 0.1 < 0.9 < float(one.inputs.max()) <= 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"these are words, not a picture", "cannot identify"),
        (png(300, 200)[:200], "truncated"),
        (bomb(), "60000 x 60000 pixels|pixels"),
        (b"", "cannot identify"),
    ],
    ids=["text", "truncated", "bomb", "empty"],
)
@pytest.mark.filterwarnings("default")
def test_a_bad_upload_is_refused_in_words(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "mine.png").write_bytes(content)
    with pytest.raises(GradveilError, match=rf"This file cannot be used as a picture\. .*({says})"):
        stage("digits").uploaded(tmp_path / "mine.png", 0)


def test_examples_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(png(8, 8))
    with pytest.raises(GradveilError, match="Pictures cannot be uploaded for breast_cancer"):
        stage("breast_cancer").uploaded(tmp_path / "mine.png", 0)
    with pytest.raises(GradveilError, match="Sentences cannot be typed for digits: its examples are images"):
        stage("digits").typed("a list")
    with pytest.raises(GradveilError, match=r"There is no example 99999. Choose 0 to 1437"):
        stage("digits").chosen(99999)


def test_a_sentence_becomes_ids_whose_targets_are_the_next_ones() -> None:
    at = stage("manual")
    one = at.typed("The value of a List, xyzzyx")
    kind = at.dataset.modality
    words = [cell.text for cell in kind.cells(one.inputs[0]) or []]
    assert words == ["the", "value", "of", "a", "list", ",", "<unknown>"]
    assert torch.equal(one.inputs[0, 1:7].long(), one.labels[0, :6])
    assert int(one.labels[0, 5]) == 1
    assert not one.labels[0, 6:].any()
    for text, says in [("", "0 words"), ("a " * 40, "40 words"), ("xyzzyx qqqq", "has none of these words")]:
        with pytest.raises(GradveilError, match=says):
            at.typed(text)


def test_every_stop_of_every_dial_is_a_defence_with_a_measured_cost() -> None:
    model = next(iter(MODELS["image"]))
    at = stage("digits")
    for name in DIALS:
        for strength in range(1, STRENGTHS + 1):
            at.defense(spec := spec_of(name, strength))
            assert "against" in cost("digits", model, spec)
    assert cost("digits", "mlp", spec_of("veil", 1)) == cost("wine", model, "none") == NOT_MEASURED
    with pytest.raises(GradveilError, match=r"A strength of 7 is not on the dial. Choose 1 to 6"):
        spec_of("veil", 7)


def test_every_network_that_is_offered_fits_its_data() -> None:
    for name in DATASETS:
        kind = stage(name).dataset.modality.spec_name
        assert [stage(name, model).classes for model in MODELS[kind]]


def test_the_certificate_moves_with_strength_and_rounds() -> None:
    at = stage("digits")
    one = at.chosen(7)
    weak, strong = (certificate(at, one, spec_of("veil", n)) for n in (3, 6))
    assert "ε = 91.8" in weak[1]
    assert "ε = 1.2" in strong[1]
    later = certificate(at, one, spec_of("veil", 6), rounds=16)
    assert len(later) == 4
    assert "After 16 updates: z_run = 0.75" in later[2]
    assert "proves nothing" in certificate(at, one, spec_of("gaussian", 6))[0]
    assert "does not bind a server that leaves this layer out" in certificate(at, one, spec_of("representation", 3))[-1]
    assert "everything is sent" in certificate(at, one, "none")[0]
    text = stage("manual")
    assert all("picked rightly" in said for said in certificate(text, text.chosen(0), spec_of("veil", 6)))


def test_the_leak_meter_moves_with_strength_and_rounds() -> None:
    at = stage("digits")
    one = at.chosen(7)

    def reading(strength: int, rounds: int) -> float:
        return float(leak(at, trials(at, one, spec_of("gaussian", strength), rounds)).split()[1])

    assert reading(3, 1) < reading(5, 1)
    assert reading(5, 16) < reading(5, 1)
    assert "no noise limits" in leak(at, trials(at, one, "none"))
    text = stage("manual")
    assert "ids of words" in leak(text, trials(text, text.chosen(0), "none"))


def test_cards_show_cells_with_what_is_right_and_write_nothing_unescaped() -> None:
    at = stage("made_up_patients")
    one, kind = at.chosen(0), at.dataset.modality
    truth = kind.unit(one.inputs, (0.0, 1.0))[0]
    shown = example(kind, truth, "a <row>", truth)
    assert shown.count("class=right") == len(kind.heads)
    assert "a &lt;row&gt;" in shown
    page = all_cards(kind, truth, blind_guess(at, one), [], 1)
    assert page.count('<li class="gv-card">') == 2
    assert "<td>&lt;b&gt;</td>" in table(("a", "b"), [("x", "<b>")], "c")
