"""The learned inverter: it reads what a defence leaves, learns once for all, and decides by its own error."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil import pace
from gradveil.attacks.inverter import HELD, MADE, PUBLIC, Course, Inverter, Lesson, Sketch, entered, regress
from gradveil.data import load
from gradveil.errors import AttackError
from gradveil.federated.client import step_gradient
from gradveil.modalities.base import identification
from gradveil.models import build
from gradveil.protection.defense import NoDefense
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Reconstruction, Update

Transform = Callable[[Tensor, Generator], Tensor]
MODEL = build("lenet:strides=2/1", (1, 8, 8), 10, 0)
DIGITS = load("digits")
PUBLIC_DIGITS = DIGITS.test.batch()
VICTIMS = DIGITS.train.batch(slice(0, 16))


def observations(transform: Transform, examples: int = 1, count: int = 16) -> list[Observation]:
    def client(batch: Batch, rng: Generator) -> Params:
        plain = step_gradient(MODEL, batch, NoDefense(), rng)
        return {name: transform(g, rng) for name, g in plain.items()}

    out = []
    for i in range(0, count, examples):
        update = Update(client(VICTIMS[i : i + examples], torch.Generator().manual_seed(i)), examples)
        out.append(Observation(MODEL, update, (1, 8, 8), 10, client=client, public=PUBLIC_DIGITS))
    return out


def solved(seen: list[Observation], **settings: int) -> list[Reconstruction]:
    return Inverter(**settings).reconstruct_many(seen, [torch.Generator().manual_seed(i) for i in range(len(seen))])


def error(found: list[Reconstruction]) -> float:
    return float((torch.cat([r.inputs for r in found]) - VICTIMS.inputs).square().mean())


BLIND = float((PUBLIC_DIGITS.inputs.mean(0) - VICTIMS.inputs).square().mean())
TRANSFORMS: dict[str, tuple[Transform, float]] = {  # and the share of the blind guess's error that is left at most
    "none": (lambda g, rng: g, 0.1),
    "sign": (lambda g, rng: g.sign(), 0.2),
    "noise": (lambda g, rng: g + 0.05 * torch.randn(g.shape, generator=rng), 0.25),
}


def test_what_went_into_a_layer_is_read_off_its_gradient() -> None:
    rng = torch.Generator().manual_seed(0)
    r, logits = torch.randn(9, 30, generator=rng), torch.randn(9, 10, generator=rng)
    delta = logits.softmax(1) - torch.eye(10)[torch.arange(9)]  # its largest entry is that of the class
    found = entered(delta[:, :, None] * r[:, None])
    assert torch.allclose(found, delta.norm(dim=1, keepdim=True) * r, atol=1e-5)
    noisy = entered(delta[:, :, None] * r[:, None] + 0.01 * torch.randn(9, 10, 30, generator=rng))
    assert float((noisy - found).norm() / found.norm()) < 0.05


def test_a_layer_on_fixed_features_is_read_whatever_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of two classes have nothing in common, what went into the layer has."""
    rng = torch.Generator().manual_seed(1)
    fixed = nn.Linear(64, 32).requires_grad_(False)
    fixed.weight.copy_(torch.randn(32, 64, generator=rng) / 8)
    model = nn.Sequential(nn.Flatten(), fixed, nn.Tanh(), nn.Linear(32, 10, bias=False))
    nn.init.zeros_(model[3].weight)

    def client(batch: Batch, rng: Generator) -> Params:
        return step_gradient(model, batch, NoDefense(), rng)

    seen = [
        Observation(model, Update(client(VICTIMS[i : i + 1], rng)), (1, 8, 8), 10, client=client, public=PUBLIC_DIGITS)
        for i in range(16)
    ]
    whole = error(solved(seen, pairs=200))
    monkeypatch.setattr(Course, "_layers", lambda self: [None])
    assert whole < 0.6 * error(solved(seen, pairs=200))
    assert whole < 0.5 * BLIND


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_reads_what_a_defence_leaves(name: str) -> None:
    transform, share = TRANSFORMS[name]
    found = solved(observations(transform), pairs=400)
    assert error(found) < share * BLIND
    inputs = torch.cat([r.inputs for r in found])
    if name in ("none", "sign"):
        assert identification(inputs, VICTIMS.inputs, PUBLIC_DIGITS.inputs[:99]).mean() >= 0.9
    assert torch.cat([r.labels for r in found if r.labels is not None]).equal(VICTIMS.labels)
    assert found[0].objective < 2 * share * BLIND  # its own error, on public examples
    assert found[0].converged


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_nothing_is_learned_where_nothing_is_left(size: float) -> None:
    found = solved(observations(lambda g, rng: size * torch.randn(g.shape, generator=rng)), pairs=100)
    assert 0.8 * BLIND < error(found) < 1.3 * BLIND
    assert found[0].objective > 0.8 * BLIND


def test_several_examples_come_by_label() -> None:
    found = solved(observations(lambda g, rng: g, examples=2, count=8), pairs=300)
    truth = [VICTIMS.inputs[i : i + 2][VICTIMS.labels[i : i + 2].argsort()] for i in range(0, 8, 2)]
    apart = torch.stack([r.inputs - x for r, x in zip(found, truth, strict=True)]).square().mean()
    assert apart < 0.6 * BLIND


def test_updates_of_one_model_and_client_are_learned_from_once() -> None:
    seen, calls = observations(lambda g, rng: g, count=3), []

    def counted(batch: Batch, rng: Generator) -> Params:
        calls.append(len(batch))
        return client(batch, rng)

    client = seen[0].client
    assert client is not None
    seen = [replace(s, client=counted) for s in seen]
    together = solved(seen, pairs=30)
    once = len(calls)
    alone = solved(seen[2:], pairs=30)
    assert len(calls) == 2 * once
    torch.testing.assert_close(together[2].inputs, alone[0].inputs, rtol=0, atol=1e-4)


def test_a_large_update_is_hashed_and_still_read() -> None:
    assert error(solved(observations(lambda g, rng: g), pairs=300, features=1500)) < 0.3 * BLIND
    rng = torch.Generator().manual_seed(0)
    sketch = Sketch({"a": 10, "b": 5000, "c": 9000}, 4010, rng, torch.device("cpu"))
    assert sketch.sizes == [10, 2000, 2000]
    rows = {n: torch.randn(2, size, generator=rng) for n, size in (("a", 10), ("b", 5000), ("c", 9000))}
    whole = torch.cat(list(rows.values()), 1)
    torch.testing.assert_close(sketch(rows).square().sum(1), whole.square().sum(1), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"client": None}, "needs both"),
        ({"public": None}, "needs both"),
        ({"public": PUBLIC_DIGITS[:12]}, "16 public examples or more"),
        ({"public": Batch(torch.rand(40, 3), PUBLIC_DIGITS.labels[:40])}, "of shape"),
    ],
)
def test_what_it_needs_is_said_in_one_line(change: dict[str, object], why: str) -> None:
    seen = replace(observations(lambda g, rng: g, count=1)[0], **change)  # type: ignore[arg-type]
    with pytest.raises(AttackError, match=why) as refused:
        solved([seen])
    assert "\n" not in str(refused.value)


def test_more_than_eight_examples_are_refused() -> None:
    with pytest.raises(AttackError, match="at most 8"):
        solved(observations(lambda g, rng: g, examples=16))


def test_it_stops_where_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(pace, "clock", look)
    told: list[tuple[int, int]] = []
    with pace.Limit(1500, lambda *step: told.append(step)) as limit:
        found = solved(observations(lambda g, rng: g, count=1), pairs=5000)[0]
    assert found.details["out_of_time"] == 1
    assert not found.converged
    assert 44 < found.details["pairs"] < 1000
    assert found.inputs.isfinite().all()
    assert told[0] == (0, 5044)
    assert now[0] - limit.end < 100


def test_a_regression_finds_a_linear_rule() -> None:
    rng = torch.Generator().manual_seed(0)
    updates = torch.randn(60, 12, generator=rng)
    rule = torch.randn(12, 3, generator=rng)
    images = (updates @ rule)[:50]
    kinds = torch.tensor([HELD] * 10 + [PUBLIC] * 40)
    choice, told, late = regress([Lesson(updates, images, kinds, None, [5, 7], [0.0, 0.0], (-99.0, 99.0))])
    torch.testing.assert_close(told, (updates @ rule)[50:], rtol=0, atol=0.02)
    assert (choice.width, choice.ridge, late) == (None, 1e-6, False)


def test_made_examples_are_judged_by_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.attacks.inverter.CHOOSE_AT", 30)  # too few for a rule of sixty numbers
    rng = torch.Generator().manual_seed(0)
    updates = torch.randn(352, 60, generator=rng)
    rule = torch.randn(60, 3, generator=rng)
    kinds = torch.tensor([HELD] * 20 + [PUBLIC] * 30 + [MADE] * 300)
    choice, told, _ = regress([Lesson(updates, (updates @ rule)[:350], kinds, None, [60], [0.0], (-99.0, 99.0))])
    assert choice.made
    assert choice.error < 1e-3
    torch.testing.assert_close(told, (updates @ rule)[350:], rtol=0, atol=0.05)
