"""A defence of records in a user's own loop: the same gradients as ``step_gradient``, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.errors import BudgetError, DefenseError
from gradveil.federated.client import step_gradient
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import PlannedRun
from gradveil.protection import attachment
from gradveil.protection.counted import board, counted
from gradveil.protection.defense import build
from gradveil.protection.protect import guard_of, protect
from gradveil.protection.records import SLACK
from gradveil.tree import Params
from gradveil.types import Batch

SPEC = "veil:z=0.5,clip=0.7"
Made = Callable[[], nn.Module]


def made(build: Made) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def small() -> nn.Module:
    """Not one of gradveil's models; it writes to its activations."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 5))


@pytest.fixture(autouse=True)
def _nothing_drawn() -> None:
    board.__init__()  # type: ignore[misc]


@pytest.fixture
def data() -> Batch:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Batch(torch.rand(12, 1, 8, 8), torch.randint(0, 5, (12,)))


def gradients(model: nn.Module) -> Params:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(a: Params, b: Params) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def noise(seed: int = 3) -> Generator:
    return Generator().manual_seed(seed)


class Words(nn.Module):
    """Token ids in, attention of torch's own kind, layers of several kinds, a weight of its own, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.scale = nn.LayerNorm(8), Scale()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        h = self.table((images[:, 0, :4].flatten(1) * 6.99).long())
        h = h + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = self.head(self.scale(self.frozen(self.norm(h))).mean(1))
        return out


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.logs.exp()


def normed() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4).eval(),
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 5)),
    )  # fmt: skip
    return model


def normed_by_a_hook() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 5)))


@pytest.mark.parametrize("model", [small, Words, normed], ids=["plain", "words", "norms"])
def test_a_users_loop_takes_the_steps_of_step_gradient(model: Made, data: Batch) -> None:
    plain, guarded = made(model), made(model)
    optimizer = torch.optim.SGD(guarded.parameters(), lr=0.1)
    expected = noise()
    with protect(guarded, SPEC, simulated=noise(), slots=12) as guard:
        for part in (data, data[:7]):  # the second batch is shorter, and is divided by as many slots
            optimizer.zero_grad()
            F.cross_entropy(guarded(part.inputs), part.labels).backward()
            want = step_gradient(plain, part, build(SPEC), expected, slots=12)
            close(gradients(guarded), want)
            torch.nn.utils.clip_grad_norm_(guarded.parameters(), 0.5)  # after the noise: nothing to fear
            optimizer.step()
            plain.load_state_dict(guarded.state_dict())
    assert guard.report.steps == 2
    assert guard.report.examples == 19
    assert guard._attachment not in attachment._watching
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in guarded.modules())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_a_hook_of_its_layer_makes(data: Batch) -> None:
    model = made(normed_by_a_hook)
    with protect(model, SPEC, simulated=noise()):
        F.cross_entropy(model(data.inputs), data.labels).backward()
    close(gradients(model), step_gradient(made(normed_by_a_hook), data, build(SPEC), noise()))


def test_the_same_as_opacus_on_the_same_noise(data: Batch) -> None:
    opacus = pytest.importorskip("opacus")
    from opacus.optimizers import DPOptimizer

    def linear() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))

    theirs, ours = made(linear), made(linear)
    hooked = opacus.GradSampleModule(theirs)
    private = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.1), noise_multiplier=0.5 * (1 + SLACK),
        max_grad_norm=0.7 / (1 + SLACK), expected_batch_size=12,
        generator=noise(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with protect(ours, SPEC, simulated=noise()):
        for _ in range(3):
            for model, stepper in ((hooked, private), (ours, optimizer)):
                stepper.zero_grad()
                F.cross_entropy(model(data.inputs.clone().requires_grad_(model is hooked)), data.labels).backward()
                stepper.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divided", [1, 3])
def test_batches_accumulated_for_one_step_are_one_release(divided: int, data: Batch) -> None:
    whole, parts = made(small), made(small)
    with protect(whole, SPEC, simulated=noise()):
        F.cross_entropy(whole(data.inputs), data.labels).backward()
    with protect(parts, SPEC, simulated=noise(), slots=12, records=12) as guard:
        for part in (data[:4], data[4:8], data[8:]):
            (F.cross_entropy(parts(part.inputs), part.labels) / divided).backward()
        assert guard.account.spent == 4.0
        assert guard.report.steps == 1
        with pytest.raises(DefenseError, match="slots=13"):
            F.cross_entropy(parts(data.inputs[:1]), data.labels[:1]).backward()
    close(gradients(parts), gradients(whole))


def test_a_release_that_was_thrown_away_takes_its_noise_with_it(data: Batch) -> None:
    model = made(small)
    with protect(model, SPEC, simulated=noise(), slots=24) as guard:
        for _ in range(2):
            F.cross_entropy(model(data.inputs), data.labels).backward()
            model.zero_grad()
        assert guard.report.steps == 2
        assert guard.account.spent == 8.0
        F.cross_entropy(model(data.inputs), data.labels).backward()
        last = gradients(model)
    rng = noise()
    for _ in range(3):
        want = step_gradient(made(small), data, build(SPEC), rng, slots=24)
    close(last, want)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
        lambda out, y: F.cross_entropy(out, y, reduction="none").mean(),
        lambda out, y: -out.log_softmax(-1).gather(1, y[:, None]).squeeze(1).mean(),
        lambda out, y: F.cross_entropy(out[:, None].expand(-1, 2, -1).reshape(-1, 5), y.repeat_interleave(2)),
    ],
    ids=["a sum over the number", "each", "by hand", "two tokens each"],
)
def test_a_loss_that_is_a_mean_in_other_words(loss: Callable[[Tensor, Tensor], Tensor], data: Batch) -> None:
    model, want = made(small), step_gradient(made(small), data, build(SPEC), noise())
    with protect(model, SPEC, simulated=noise()):
        loss(model(data.inputs), data.labels).backward()
    close(gradients(model), want)


def test_entries_that_are_left_out_or_weighted_do_not_change_what_other_records_count(data: Batch) -> None:
    """A mean over entries that count divides by their number, which is another record's affair."""
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    found = []
    for labels in (data.labels, torch.cat([data.labels[:1], torch.full_like(data.labels[1:], -100)])):
        model = made(small)
        with protect(model, "veil:z=0.5,clip=1e6", simulated=noise()):
            out = model(data.inputs[:1].expand(12, -1, -1, -1))
            F.cross_entropy(out, labels, weight=weights).backward()
            found.append(gradients(model))
    with protect(model := made(small), "veil:z=0.5,clip=1e6", simulated=noise()):
        first = F.cross_entropy(model(data.inputs[:1].expand(12, -1, -1, -1)), data.labels, reduction="none")
        kept = torch.zeros(12)
        kept[0] = weights[data.labels[0]]
        (first * kept).mean().backward()
    close(found[1], gradients(model))


def contrast(out: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (contrast, "goes through Mm"),
        (lambda out, y: F.cross_entropy(out.T, torch.zeros(5).long()), "goes through"),
        (lambda out, y: F.mse_loss(out[:, 0], y[:, None].float()), "goes through"),  # torch makes a square of it
        (lambda out, y: F.mse_loss(out[:, :1], y.float()), "targets the shape of the output"),  # the same
        (lambda out, y: (out[:, :1] - y).abs().mean(), "targets the shape of the output"),
        (lambda out, y: F.huber_loss(out[:, :1].sigmoid(), y.float()), "targets the shape of the output"),
        (lambda out, y: F.cross_entropy(out, y) ** 2, "goes through Pow"),
        (lambda out, y: F.cross_entropy(out, y, reduction="none")[y > 1].mean(), "goes through Index"),
        (lambda out, y: F.cross_entropy(out, y, reduction="sum"), "12 times the mean"),
        (lambda out, y: 1024 * F.cross_entropy(out, y), "bfloat16"),
        (lambda out, y: F.cross_entropy(out, y, reduction="none"), "plain loss.backward"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_is_no_mean_over_records_is_refused(loss: Any, says: str, data: Batch) -> None:
    model = made(small)
    with protect(model, SPEC) as guard:
        out = loss(model(data.inputs), data.labels)
        with pytest.raises(DefenseError, match=says):
            out.backward() if out.ndim == 0 else torch.autograd.backward([out], [torch.ones(12)])
        assert not gradients(model)
        assert guard.report.steps == 0


def test_a_loss_that_cannot_be_read_can_be_vouched_for(data: Batch) -> None:
    picked = made(small)
    with protect(picked, SPEC, simulated=noise(), mean_loss=True):
        (-picked(data.inputs).log_softmax(1)[torch.arange(12), data.labels]).mean().backward()
    close(gradients(picked), step_gradient(made(small), data, build(SPEC), noise()))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out: Tensor = self.fc(x - x.mean(0))
        return out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.fc(self.fc(x.flatten(1))))
        return out


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(12, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.fc(x.flatten(1).T[:5]).T[:, :5])
        return out


class Across(nn.Module):
    """Mixes what the first layer gives."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.mix = nn.Linear(64, 8), nn.Linear(8, 5), mix

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.mix(self.first(x.flatten(1))))
        return out


def running_sum() -> nn.Module:
    return Across(lambda y: y.cumsum(0))


def by_the_largest() -> nn.Module:
    return Across(lambda y: y / y.abs().max())


def couples(x: Tensor) -> Tensor:
    """Neighbours without what they have in common."""
    pairs = x.unflatten(0, (-1, 2))
    return (pairs - pairs.mean(1, keepdim=True)).flatten(0, 1)


def between_neighbours() -> nn.Module:
    return Across(couples)


class OfTraining(nn.Module):
    """Takes the statistics of the batch where gradients are on, as batch norms written by hand do."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if torch.is_grad_enabled() else x


def with_statistics_of_training() -> nn.Module:
    return nn.Sequential(nn.Flatten(), OfTraining(), nn.Linear(64, 5))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


def with_dropout_in_attention() -> nn.Module:
    model = Words()
    model.attention.dropout = 0.1
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 5))
    model[2].weight = model[1].weight
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (with_batch_norm, "batch norm in train mode"),
        (Mixing, "depends on the others"),
        (running_sum, "depends on the others"),
        (by_the_largest, "depends on the others"),
        (between_neighbours, "depends on the others"),
        (with_statistics_of_training, "depends on the others"),
        (Twice, "runs twice"),
        (Turned, "one record each|depends on the others"),
        (with_dropout_in_attention, "dropout"),
        (tied, "one weight"),
    ],
)
def test_a_model_that_does_not_keep_records_apart_is_refused(model: Made, says: str, data: Batch) -> None:
    guarded = made(model)
    with pytest.raises(DefenseError, match=says), protect(guarded, SPEC):
        F.cross_entropy(guarded(data.inputs), data.labels).backward()
    assert not gradients(guarded)


def two_views(model: nn.Module, data: Batch) -> None:
    F.cross_entropy(model(data.inputs) + model(data.inputs.flip(3)), data.labels).backward()


def penalty(model: nn.Module, data: Batch) -> None:
    weights = sum(p.square().sum() for p in model.parameters())
    (F.cross_entropy(model(data.inputs), data.labels) + weights).backward()


def another_weight(model: nn.Module, data: Batch) -> None:
    scale = torch.ones(12, 5, requires_grad=True)
    F.cross_entropy(model(data.inputs) * scale, data.labels).backward()


def second_derivatives(model: nn.Module, data: Batch) -> None:
    F.cross_entropy(model(data.inputs), data.labels).backward(create_graph=True)


def larger(model: nn.Module, data: Batch) -> None:
    F.cross_entropy(model(data.inputs[:5]), data.labels[:5]).backward()
    model.zero_grad()
    F.cross_entropy(model(data.inputs), data.labels).backward()


def of_a_part(model: nn.Module, data: Batch) -> None:
    assert isinstance(model, nn.Sequential)
    F.cross_entropy(model[3](model[:3](data.inputs)), data.labels).backward()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (two_views, "second pass"),
        (penalty, "penalty"),
        (another_weight, "no weights of the guarded model"),
        (second_derivatives, "plain loss.backward"),
        (larger, "slots=12"),
        (of_a_part, "own call"),
    ],
)
def test_a_step_that_would_count_a_record_otherwise_is_refused(step: Any, says: str, data: Batch) -> None:
    model = made(small)
    with pytest.raises(DefenseError, match=says), protect(model, SPEC):
        step(model, data)


def plain_gradient(model: nn.Module, data: Batch) -> None:
    loss = F.cross_entropy(model(data.inputs), data.labels)
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = g


def again(model: nn.Module, data: Batch) -> None:
    loss = F.cross_entropy(model(data.inputs), data.labels)
    loss.backward(retain_graph=True)
    loss.backward()


def in_eval_mode(model: nn.Module, data: Batch) -> None:
    F.cross_entropy(model.eval()(data.inputs), data.labels).backward()
    model.train()


def added_to(model: nn.Module, data: Batch) -> None:
    plain_gradient(model, data)
    F.cross_entropy(model(data.inputs), data.labels).backward()


@pytest.mark.parametrize("gradient", [plain_gradient, again, in_eval_mode, added_to])
def test_a_gradient_that_is_no_release_takes_no_step(gradient: Any, data: Batch) -> None:
    model = made(small)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        gradient(model, data)
        optimizer.step()

    with pytest.raises(DefenseError), protect(model, SPEC):
        step()
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


def test_a_penalty_may_have_a_backward_pass_of_its_own(data: Batch) -> None:
    model = made(small)
    with protect(model, SPEC, simulated=noise()):
        F.cross_entropy(model(data.inputs), data.labels).backward()
        (0.5 * torch.cat([p.flatten() for p in model.parameters()]).square().sum()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    want = step_gradient(made(small), data, build(SPEC), noise())
    close(gradients(model), {n: want[n] + p for n, p in made(small).state_dict().items()})


def test_a_record_pays_once_in_an_epoch_and_not_beyond_its_budget(data: Batch) -> None:
    model = made(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = protect(model, SPEC, slots=5, records=12, account=Account("me", spent=1.0, limit=9.0))
    for epoch in range(3):
        for chosen in counted(torch.arange(12).split(5)):
            part = data[chosen]
            optimizer.zero_grad()
            if epoch == 2:
                with pytest.raises(BudgetError, match="nothing is sent"):
                    F.cross_entropy(model(part.inputs), part.labels).backward()
                break
            F.cross_entropy(model(part.inputs), part.labels).backward()
            optimizer.step()
            assert guard.account == Account("me", 1.0 + 4 * (epoch + 1), 9.0)
            assert guard.report.spent == 5 + 4 * epoch
    guard.remove()


def test_a_loader_that_drops_the_last_batch_pays_for_every_epoch(data: Batch) -> None:
    model = made(small)
    with protect(model, SPEC, slots=5, records=12) as guard:
        for _ in range(3):
            for part in (data[some] for some in counted([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])):
                model.zero_grad()
                F.cross_entropy(model(part.inputs), part.labels).backward()
    assert guard.account.spent == 12.0


def test_a_round_that_ends_within_an_epoch_has_paid_for_it(data: Batch) -> None:
    model = made(small)
    with protect(model, "veil:z=0.5,tier=aggregate,cohort=5", slots=6, records=12) as guard:
        for _ in range(2):
            model.load_state_dict(made(small).state_dict())
            model.zero_grad()
            F.cross_entropy(model(data.inputs[:6]), data.labels[:6]).backward()
    assert guard.account.spent == 8.0


def test_a_promise_over_a_planned_run(data: Batch) -> None:
    model = made(small)
    run = PlannedRun(records=12, batch_size=4, epochs=1, rounds=10, participations=4, cohort=3)
    with protect(model, "veil:promise=reconstruction,clip=1", run=run) as guard:
        F.cross_entropy(model(data.inputs[:4]), data.labels[:4]).backward()
        assert guard.account.spent == pytest.approx(1.0)
        assert guard.account.limit == pytest.approx(4.0)
    with pytest.raises(DefenseError, match="whole run"), protect(model, "veil:promise=reconstruction,clip=1"):
        F.cross_entropy(model(data.inputs[:4]), data.labels[:4]).backward()


def test_an_aggregate_tier_takes_one_step(data: Batch) -> None:
    model = made(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(model, "veil:z=1,tier=aggregate,cohort=5"):
        F.cross_entropy(model(data.inputs), data.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.inputs), data.labels)
        with pytest.raises(DefenseError, match="2 local steps"):
            loss.backward()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 5)
        self.mean = nn.Buffer(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if torch.is_grad_enabled():
            self.mean.add_(x.detach().mean(0))
        out: Tensor = self.fc(x)
        return out


def test_a_buffer_that_training_wrote_to_is_not_sent(data: Batch) -> None:
    model = Counting()
    with pytest.raises(DefenseError, match="changed in training"), protect(model, SPEC):
        F.cross_entropy(model(data.inputs), data.labels).backward()
    fresh = Counting()
    guard = protect(fresh, SPEC)
    F.cross_entropy(fresh(data.inputs), data.labels).backward()
    with pytest.raises(DefenseError, match="changed in training"):
        fresh.load_state_dict(model.state_dict())
    guard.remove()
    guard = protect(fresh, SPEC)
    fresh.load_state_dict(model.state_dict())  # a round begins
    guard.verify()
    guard.remove()


def test_settings_of_records_are_for_defences_of_records() -> None:
    with pytest.raises(DefenseError, match="slots: pruning"):
        protect(made(small), "pruning", slots=4)
    with pytest.raises(DefenseError, match="strict=False"):
        protect(made(small), SPEC, strict=False)


def test_a_copy_of_a_guarded_model_pays_from_the_same_account(data: Batch) -> None:
    model = made(small)
    guard = protect(model, SPEC, slots=12, records=24)
    clone = copy.deepcopy(model)
    for each in (model, clone):
        F.cross_entropy(each(data.inputs), data.labels).backward()
    assert guard.account.spent == 8.0
    assert any(not torch.equal(a, b) for a, b in zip(gradients(model).values(), gradients(clone).values(), strict=True))
    for each in (model, clone):
        guard_of(each).remove()  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile's own, on any graph break
def test_compiled_and_in_mixed_precision(data: Batch) -> None:
    plain, compiled = made(small), made(small)
    with protect(plain, SPEC, simulated=noise()):
        F.cross_entropy(plain(data.inputs), data.labels).backward()
    fast = torch.compile(compiled, backend="eager")
    with protect(fast, SPEC, simulated=noise()):  # type: ignore[arg-type]
        F.cross_entropy(fast(data.inputs), data.labels).backward()
    close(gradients(compiled), gradients(plain))

    half = made(small)
    with protect(half, SPEC, simulated=noise()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(half(data.inputs), data.labels)
        loss.backward()
    for name, g in gradients(half).items():
        torch.testing.assert_close(g, plain.get_parameter(name).grad, rtol=0.05, atol=0.02)
