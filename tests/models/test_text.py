"""Language models: what they see, what they refuse; and the loss of the next token."""

import pytest
import torch
import torch.nn.functional as F

from gradveil.errors import LossError, SpecError
from gradveil.losses import build as build_loss
from gradveil.models import build

BERT = "bert_tiny:width=16,heads=2,vocabulary=30"
GPT = "gpt_tiny:width=16,heads=2"
IDS = torch.tensor([[2, 5, 9, 7, 4], [2, 8, 3, 0, 0]])


def test_an_encoder_tells_classes_and_does_not_see_padding() -> None:
    model = build(BERT, (5,), 3)
    logits = model(IDS)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[1:], model(IDS[1:, :3]))
    assert not torch.allclose(logits[:1], model(IDS[:1, :4]))
    torch.testing.assert_close(logits, model(IDS.float()))  # ids may travel as floats


def test_a_decoder_sees_no_later_token() -> None:
    model = build(GPT, (5,), 30)
    logits = model(IDS)
    assert logits.shape == (2, 5, 30)
    torch.testing.assert_close(logits[:, :3], model(IDS[:, :3]))
    other = IDS.clone()
    other[:, 1] = 11
    assert not torch.allclose(logits[:, 2], model(other)[:, 2])


def test_weights_come_from_the_seed_alone() -> None:
    for spec in (BERT, GPT):
        first, same, other = (build(spec, (5,), 30, seed=s).state_dict() for s in (3, 3, 4))
        assert all(torch.equal(first[key], same[key]) for key in first)
        assert not torch.equal(first["tokens.words.weight"], other["tokens.words.weight"])
        assert first["tokens.words.weight"].std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("gpt_tiny:length=8", (9,), "The sequences have 9 tokens and gpt_tiny has places for 8. Shorten them"),
        ("bert_tiny", (1, 28, 28), "takes sequences of ids"),
        ("bert_tiny:heads=7", (9,), "cannot be dealt out"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(spec: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        build(spec, shape, 30)
    assert "\n" not in str(error.value)


def test_next_token_is_the_mean_over_tokens_then_over_sequences() -> None:
    loss = build_loss("next_token").of(IDS)
    output = torch.randn(2, 5, 30, dtype=torch.double, requires_grad=True)
    expected = (F.cross_entropy(output[0], IDS[0]) + F.cross_entropy(output[1, :3], IDS[1, :3])) / 2
    rows = loss.rows(IDS, 30).double()
    (slope,) = torch.autograd.grad(expected, output, retain_graph=True)
    for value in (loss(output, IDS), loss.soft(output, rows), loss.each(output, IDS).mean()):
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, output)[0], slope)
    assert torch.equal(loss.read(output.detach(), slope), IDS)
    assert torch.equal(loss.found(rows), IDS)
    assert loss.score(rows, IDS) == 1.0
    assert loss.score(rows.roll(1, -1), IDS) == 0.0
    assert loss.fits(output, 30)
    assert not loss.fits(output, 31)
    torch.testing.assert_close(loss.squash(100 * rows).sum(-1), torch.ones(2, 5, dtype=torch.double))
    assert loss.width(IDS, 30) == 30


def test_next_token_refuses_what_it_is_no_loss_of() -> None:
    with pytest.raises(LossError, match="next_token takes ids of tokens"):
        build_loss("next_token").of(torch.tensor([1, 2]))
    with pytest.raises(LossError, match="one logit for each token"):
        build_loss("next_token")(torch.zeros(2, 30), IDS)
