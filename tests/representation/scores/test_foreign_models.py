"""Models that stop gradients, mix examples or hide their input: the derivative that torch takes, or a refusal."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from gradveil.errors import ScoreError
from gradveil.representation.jacobian import Jacobian
from gradveil.representation.scores import leak_scores
from reference.leak_scores import reference_scores

WAYS = ["exact", "loop", "sketch"]


class Foreign(nn.Module):
    """A representation made by any function of a model and x."""

    def __init__(self, represent: Callable[["Foreign", Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b, self.fc = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.words, self.lstm = nn.Embedding(10, 6), nn.LSTM(4, 6)
            self.attention = nn.MultiheadAttention(6, 2)
        self.represent = represent
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.represent(self, x))


class Trebled(torch.autograd.Function):
    """Has a derivative of its own: not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return g[0]


def without_gradients(m: Foreign, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        gate = torch.sigmoid(m.b(h))
    return h * gate


def in_inference_mode(m: Foreign, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.inference_mode():
        gate = torch.sigmoid(m.b(h))
    return h * gate.clone()


def writing_without_gradients(m: Foreign, x: Tensor) -> Tensor:
    h = m.a(x).tanh() * 1.0
    with torch.no_grad():
        h[:, :2] *= 3
    return h


def writing_to_its_input(m: Foreign, x: Tensor) -> Tensor:
    return m.a(x.mul_(2).add_(1)).tanh()


def checkpointed(m: Foreign, x: Tensor) -> Tensor:
    return F.layer_norm(checkpoint(m.a, x, use_reentrant=False), (6,))


def keeping_its_gradient(m: Foreign, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    h.retain_grad()
    return h


def with_distances(m: Foreign, x: Tensor) -> Tensor:  # torch vectorises the derivative of cdist wrongly
    return torch.cdist(m.a(x)[:, None], m.b.weight[None])[:, 0]


STOPPED = [
    without_gradients,
    in_inference_mode,
    writing_without_gradients,
    checkpointed,
    lambda m, x: m.b(Trebled.apply(m.a(x))),
    lambda m, x: m.a(x) - m.a(x).mean(0).detach(),
    lambda m, x: torch.cat([m.words(x[:, 0].long().abs())[:, :3], m.a(x)[:, :3]], 1),
]


def inputs(n: int = 5) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("represent", [keeping_its_gradient, with_distances])
def test_what_the_recorder_or_vmap_cannot_do_is_done_by_plain_differentiation(
    represent: Callable[[Foreign, Tensor], Tensor],
) -> None:
    model, x = Foreign(represent), inputs()
    expected = reference_scores(model, "fc", x)
    for method in ("exact", "loop"):
        assert_close(leak_scores(model, "fc", x, method), expected)


@pytest.mark.parametrize("chain", [True, False], ids=["a chain", "another model"])
def test_a_backward_hook_has_its_say(chain: bool) -> None:
    x, foreign = inputs(), Foreign(lambda m, x: m.a(x).tanh())
    model = nn.Sequential(foreign.a, nn.Tanh(), foreign.fc) if chain else foreign
    layer = "2" if chain else "fc"
    plain = leak_scores(model, layer, x, "exact")
    foreign.a.register_full_backward_hook(lambda _, inside, outside: (2 * inside[0],))
    for method in ("exact", "loop"):
        assert_close(leak_scores(model, layer, x, method), plain / 2)


@pytest.mark.parametrize("represent", STOPPED)
def test_what_a_model_stops_is_a_constant_to_every_method(represent: Callable[[Foreign, Tensor], Tensor]) -> None:
    model, x = Foreign(represent), inputs()
    expected = reference_scores(model, "fc", x)
    for method in ("exact", "loop"):
        assert_close(leak_scores(model, "fc", x, method), expected)
    assert_close(leak_scores(model, "fc", x, "sketch", probes=2048), expected, rtol=0.15, atol=0)


def test_a_checkpoint_that_runs_without_gradients_is_passed_all_the_same() -> None:
    x = inputs()
    plain = leak_scores(Foreign(lambda m, x: F.layer_norm(m.a(x), (6,))), "fc", x, "exact")
    model = Foreign(lambda m, x: F.layer_norm(checkpoint(m.a, x, use_reentrant=True), (6,)))
    for method in ("exact", "loop"):
        assert_close(leak_scores(model, "fc", x, method), plain)


@pytest.mark.parametrize("method", WAYS)
def test_a_model_that_writes_to_its_input_does_not_write_to_ours(method: str) -> None:
    x = inputs()
    found = leak_scores(Foreign(writing_to_its_input), "fc", x, method)
    assert_close(found, leak_scores(Foreign(lambda m, x: m.a(x * 2 + 1).tanh()), "fc", x, method))
    assert torch.equal(x, inputs())


def halved_for_all(m: Foreign, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m.a(x) / 2


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize(
    "represent", [halved_for_all, lambda m, x: m.a(x).detach(), lambda m, x: m.words(x[:, 0].long().abs())]
)
def test_a_representation_without_a_derivative_is_refused(
    represent: Callable[[Foreign, Tensor], Tensor], method: str
) -> None:
    with pytest.raises(ScoreError, match="does not depend on x in a way that torch differentiates"):
        leak_scores(Foreign(represent), "fc", inputs(), method)


def turned(m: Foreign, x: Tensor) -> Tensor:
    return (m.a(x).t() @ torch.arange(25.0, dtype=x.dtype).view(5, 5)).t()


def attending(m: Foreign, x: Tensor) -> Tensor:
    h = m.a(x)[:, None]
    return m.attention(h, h, h)[0][:, 0]  # the first dimension is time


MIXING = {
    "centred": lambda m, x: m.a(x - x.mean(0)),
    "softmax": lambda m, x: m.a(x).softmax(0),
    "sums so far": lambda m, x: m.a(x).cumsum(0),
    "flipped": lambda m, x: m.a(x).flip(0),
    "rolled by two": lambda m, x: m.a(x).roll(2, 0),
    "shuffled": lambda m, x: m.a(x)[torch.tensor([2, 0, 1, 4, 3])],
    "a matrix from the left": lambda m, x: torch.ones(5, 5, dtype=x.dtype) @ m.a(x),
    "a matrix on the transpose": turned,
    "batch norm as a function": lambda m, x: F.batch_norm(m.a(x), None, None, training=True),
    "time first": lambda m, x: m.lstm(x[:, None])[0][:, 0],
    "attention": attending,
}


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("name", MIXING)
def test_a_forward_pass_that_mixes_examples_is_refused(name: str, method: str) -> None:
    with pytest.raises(ScoreError, match="mixes the examples"):
        leak_scores(Foreign(MIXING[name]), "fc", inputs(), method)


def test_one_example_has_nothing_to_mix_with() -> None:
    model, x = Foreign(MIXING["sums so far"]), inputs(1)
    assert_close(leak_scores(model, "fc", x, "exact"), reference_scores(model, "fc", x))


def test_examples_are_looked_at_once_for_a_structure_and_again_when_it_changes() -> None:
    over = 1

    def represent(m: Foreign, x: Tensor) -> Tensor:
        return m.a(x).cumsum(over)

    model, x = Foreign(represent), inputs()
    with patch.object(Jacobian, "check_examples", autospec=True, side_effect=Jacobian.check_examples) as looked:
        for _ in range(3):
            leak_scores(model, "fc", x, "exact")
        assert looked.call_count == 1
    over = 0
    with pytest.raises(ScoreError, match="mixes the examples"):
        leak_scores(model, "fc", x, "exact")


@pytest.mark.parametrize("method", WAYS)
def test_inference_mode_around_it_changes_nothing(method: str) -> None:
    model, x = Foreign(lambda m, x: F.layer_norm(m.a(x), (6,))), inputs()
    expected = leak_scores(model, "fc", x, method)
    with torch.inference_mode():
        made = x * 1
        assert_close(leak_scores(model, "fc", x, method), expected)
    assert_close(leak_scores(model, "fc", made, method), expected)


def test_what_is_no_plain_tensor_is_refused() -> None:
    model, x = Foreign(lambda m, x: m.a(x).tanh()), inputs()
    with pytest.raises(ScoreError, match="x is a tuple"):
        leak_scores(model, "fc", (x, x))  # type: ignore[arg-type]
    with pytest.raises(ScoreError, match=r"torch\.func"):
        torch.func.vmap(lambda row: leak_scores(model, "fc", row[None], "exact"))(x)
