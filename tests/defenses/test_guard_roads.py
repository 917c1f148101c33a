"""Roads past a defence of records, in a loop of one's own: what would leave beside the noise is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from gradveil.defenses.veil import Veil
from gradveil.errors import DefenseError
from gradveil.protection.protect import protect
from gradveil.types import Batch

SPEC = "veil:z=1,clip=1"


@pytest.fixture
def data() -> Batch:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Batch(torch.rand(12, 1, 8, 8), torch.randint(0, 5, (12,)))


class Writing(nn.Module):
    """Does something of its own to its state in every training pass."""

    def __init__(self, write: Callable[["Writing", Tensor], Any], **state: Tensor) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.fc, self.head = nn.Linear(64, 6), nn.Linear(6, 5)
        self.write = write
        for name, value in state.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if torch.is_grad_enabled():
            self.write(self, x.detach())
        out: Tensor = self.head(self.fc(x).tanh())
        return out


def plain() -> Writing:
    return Writing(lambda m, x: None)


def step(model: nn.Module, data: Batch, optimizer: torch.optim.Optimizer | None = None) -> None:
    own = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    own.zero_grad()
    F.cross_entropy(model(data.inputs), data.labels).backward()
    own.step()


# What leaves with state_dict() beside the trained weights.


class Extra(Writing):
    """Sends words of its own."""

    seen = 0.0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def kept(m: Writing, x: Tensor) -> None:
    m.register_buffer("late", x.mean(0))


def replaced(m: Writing, x: Tensor) -> None:
    m.seen = x.sum(0)


def added_to(name: str) -> Callable[[Writing, Tensor], Any]:
    def write(m: Writing, x: Tensor) -> None:
        buffer = getattr(m, name)
        found = (x.sum(0) * 1000).to(buffer.dtype)
        buffer.logical_or_(x[0] > 0.5) if buffer.dtype is torch.bool else buffer.add_(found)

    return write


def frozen() -> Writing:
    model = Writing(lambda m, x: m.table.data.add_(x.mean(0)))
    model.table = nn.Parameter(torch.zeros(64), requires_grad=False)
    return model


def rearranged(m: Writing, x: Tensor) -> None:
    m.queue.copy_(m.queue[torch.argsort(x[0], stable=True)])


KINDS = [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool, torch.complex64, torch.float64, torch.bfloat16]
LEAVING: dict[str, Callable[[], Writing]] = {
    **{str(kind): lambda kind=kind: Writing(added_to("seen"), seen=torch.zeros(64, dtype=kind)) for kind in KINDS},
    "registered in forward": lambda: Writing(kept),
    "another tensor": lambda: Writing(replaced, seen=torch.zeros(64)),
    "rearranged by a record": lambda: Writing(rearranged, queue=torch.arange(64.0)),
    "a frozen weight": frozen,
    "extra state": lambda: Extra(lambda m, x: setattr(m, "seen", m.seen + float(x.sum()))),
    "a count": lambda: Writing(lambda m, x: m.calls.add_(1), calls=torch.tensor(0)),
    "a module that was not there": lambda: Writing(
        lambda m, x: setattr(m, "stats", nn.Module()) or m.stats.register_buffer("mean", x.mean(0))
    ),
}


@pytest.mark.parametrize("kind", LEAVING)
def test_state_that_a_pass_writes_is_not_sent(kind: str, data: Batch) -> None:
    model = LEAVING[kind]()
    with pytest.raises(DefenseError, match="changed in training"), protect(model, SPEC):
        step(model, data)


@pytest.mark.parametrize("kind", LEAVING)
def test_it_cannot_be_read_off_the_state_within_the_guard_either(kind: str, data: Batch) -> None:
    model = LEAVING[kind]()
    guard = protect(model, SPEC)
    model.state_dict()
    step(model, data)
    with pytest.raises(DefenseError, match="changed in training"):
        model.state_dict()
    guard.remove()


def test_state_that_is_set_back_may_be_sent(data: Batch) -> None:
    model = Writing(lambda m, x: m.calls.add_(1), calls=torch.tensor(0))
    with protect(model, SPEC):
        step(model, data)
        model.calls.zero_()
        model.state_dict()


def test_state_that_is_not_sent_may_change(data: Batch) -> None:
    model = Writing(lambda m, x: m.calls.add_(1))
    model.register_buffer("calls", torch.tensor(0), persistent=False)
    model.norm = nn.BatchNorm1d(6).eval()
    with protect(model, SPEC):
        step(model, data)
        model.load_state_dict(model.state_dict())  # a round begins
        step(model, data)


def test_a_part_that_is_loaded_begins_anew_and_the_rest_does_not(data: Batch) -> None:
    model = Writing(lambda m, x: m.head.seen.add_(x.sum()) if m.on else m.also.add_(1), also=torch.zeros(()))
    model.head.register_buffer("seen", torch.zeros(()))
    model.on = True
    guard = protect(model, SPEC)
    model.head.load_state_dict(model.head.state_dict())
    step(model, data)
    with pytest.raises(DefenseError, match=r"head\.seen"):
        model.head.load_state_dict(model.head.state_dict())
    guard.remove()


# Gradients between a backward pass and a step.


def zeroed_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.zero_()


def zeroed_view(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.view(-1)[:] = 0


def zeroed_set(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.set_(torch.zeros_like(p.data))


def zeroed_numpy(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.numpy()[...] = 0


def zeroed_foreach(model: nn.Module) -> None:
    torch._foreach_zero_([p.grad.data for p in model.parameters()])


def zeroed(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


ZEROED = [zeroed_data, zeroed_view, zeroed_set, zeroed_numpy, zeroed_foreach, zeroed]


@pytest.mark.parametrize("drop", ZEROED)
def test_a_step_whose_first_part_was_dropped_has_noise_of_its_own(drop: Any, data: Batch) -> None:
    model = plain()
    with protect(model, "veil:z=1000,clip=1", slots=12) as guard:
        F.cross_entropy(model(data.inputs[:6]), data.labels[:6]).backward()
        drop(model)
        F.cross_entropy(model(data.inputs[6:]), data.labels[6:]).backward()
        assert guard.report.steps == 2
        assert float(model.fc.weight.grad.std()) == pytest.approx(1000 / 12, rel=0.3)


def scaled(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.mul_(1e-6)


def partly(model: nn.Module) -> None:
    model.fc.weight.grad.data.zero_()


def partly_none(model: nn.Module) -> None:
    model.head.bias.grad = None


def limited(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("change", [scaled, partly, partly_none, limited])
def test_a_half_filled_step_whose_gradient_was_changed_is_refused(change: Any, data: Batch) -> None:
    model = plain()
    guard = protect(model, SPEC, slots=12)
    F.cross_entropy(model(data.inputs[:6]), data.labels[:6]).backward()
    change(model)
    loss = F.cross_entropy(model(data.inputs[6:]), data.labels[6:])
    with pytest.raises(DefenseError, match="half"):
        loss.backward()
    guard.remove()


def clean(model: nn.Module, data: Batch) -> list[Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(model(data.inputs), data.labels), list(model.parameters())))


def by_data(model: nn.Module, data: Batch) -> None:
    for p, g in zip(model.parameters(), clean(model, data), strict=True):
        p.grad.data.copy_(g)


def one_entry(model: nn.Module, data: Batch) -> None:
    g = clean(model, data)[0]
    model.fc.weight.grad.data.view(-1)[7:9] = g.view(-1)[7:9]


def one_bias(model: nn.Module, data: Batch) -> None:
    model.head.bias.grad = clean(model, data)[-1]


def by_func(model: nn.Module, data: Batch) -> None:
    model.eval()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    found = grad(lambda w: F.cross_entropy(functional_call(model, w, (data.inputs,)), data.labels))(weights)
    model.train()
    for name, p in model.named_parameters():
        p.grad = found[name]


def by_plain_backward(model: nn.Module, data: Batch) -> None:
    model.eval()
    F.cross_entropy(model(data.inputs), data.labels).backward()
    model.train()


def by_engine(model: nn.Module, data: Batch) -> None:
    loss = F.cross_entropy(model(data.inputs), data.labels)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def control(model: nn.Module, data: Batch) -> None:
    """SCAFFOLD by hand, its control variate without noise."""
    for p, g in zip(model.parameters(), clean(model, data), strict=True):
        p.grad.add_(g, alpha=-0.1)


FOREIGN = [by_data, one_entry, one_bias, by_func, by_plain_backward, by_engine, control]


@pytest.mark.parametrize("change", FOREIGN)
@pytest.mark.parametrize("steps", [True, False], ids=["to a step", "to be sent as it is"])
def test_a_gradient_without_noise_goes_nowhere(change: Any, steps: bool, data: Batch) -> None:
    model = plain()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        F.cross_entropy(model(data.inputs), data.labels).backward()
        change(model, data)
        if steps:
            optimizer.step()

    with pytest.raises(DefenseError), protect(model, SPEC):
        train()
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


def norm_limited(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def value_limited(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def layer_limited(model: nn.Module) -> None:
    for layer in model.children():
        nn.utils.clip_grad_norm_(layer.parameters(), 0.1)


def decayed(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.add_(p.data, alpha=0.01)


@pytest.mark.parametrize("change", [norm_limited, value_limited, layer_limited, decayed, zeroed_data])
def test_a_gradient_with_its_noise_may_be_limited(change: Any, data: Batch) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(model, SPEC) as guard:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs), data.labels).backward()
            change(model)
            optimizer.step()
    assert guard.report.steps == 2


def test_a_hook_after_accumulation_sees_the_noise(data: Batch) -> None:
    model, seen = plain(), []
    model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with protect(model, "veil:z=1000,clip=1"):
        F.cross_entropy(model(data.inputs), data.labels).backward()
    assert float(seen[0].abs().max()) > 10


# Gradients on their way: a hook that lets one record's gradient count in another's.


def mixing_hook(model: Writing) -> Writing:
    model.head.register_full_backward_hook(lambda m, into, out: (into[0] / into[0].norm(),))
    return model


class Mixed(torch.autograd.Function):
    """Gives what it gets, and mixes the gradients of records."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Mixed.apply(x)
        return out


def mixing_function(model: Writing) -> Writing:
    model.head = nn.Sequential(Mixing(), model.head)
    return model


class Swapped(Mixed):
    """Between neighbours alone."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + g.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


class Swapping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Swapped.apply(x)
        return out


def swapping_function(model: Writing) -> Writing:
    model.head = nn.Sequential(Swapping(), model.head)
    return model


@pytest.mark.parametrize("mix", [mixing_hook, mixing_function, swapping_function])
def test_a_backward_pass_that_mixes_records_is_refused(mix: Any, data: Batch) -> None:
    model = mix(plain())
    with pytest.raises(DefenseError, match="backward"), protect(model, SPEC):
        F.cross_entropy(model(data.inputs), data.labels).backward()


def test_a_hook_on_an_output_that_mixes_records_is_refused(data: Batch) -> None:
    model = plain()
    guard = protect(model, SPEC)
    out = model(data.inputs)
    out.register_hook(lambda g: g - g.mean(0))
    loss = F.cross_entropy(out, data.labels)
    with pytest.raises(DefenseError, match="hook on the model's output"):
        loss.backward()
    guard.remove()


def test_a_hook_that_keeps_records_apart_is_fine(data: Batch) -> None:
    model = plain()
    model.head.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))
    with protect(model, SPEC):
        step(model, data)


def test_an_optimizer_that_looks_at_the_gradient_twice_sees_noise_of_its_own_each_time(data: Batch) -> None:
    """A closure that forgets zero_grad(): what the second look adds to the first one is a release too."""
    model, seen = plain(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def closure() -> Tensor:
        loss = F.cross_entropy(model(data.inputs), data.labels)
        loss.backward()
        seen.append(model.head.weight.grad.clone())  # type: ignore[union-attr]
        return loss

    with protect(model, "veil:z=1e4,clip=1", slots=100) as guard:
        optimizer.step(closure)
        assert guard.report.spent == pytest.approx(len(seen) / 1e4**2)
    assert len(seen) > 1
    assert float((seen[1] - seen[0]).abs().mean()) > 10


# Optimizers that bring something with them.


def of_kind(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_an_optimizer_with_state_from_before_the_guard_is_refused(kind: str, data: Batch) -> None:
    model = plain()
    optimizer = of_kind(kind, model)
    step(model, data, optimizer)  # no guard
    guard = protect(model, SPEC)
    with pytest.raises(DefenseError, match=r"optimizer\.state\.clear"):
        step(model, data, optimizer)
    optimizer.state.clear()
    step(model, data, optimizer)
    step(model, data, optimizer)
    guard.close()


def test_state_of_steps_under_a_guard_goes_on_in_the_next_one_until_a_step_without(data: Batch) -> None:
    model = plain()
    optimizer = of_kind("momentum", model)
    for _ in range(2):
        with protect(model, SPEC):
            step(model, data, optimizer)
    step(model, data, optimizer)
    with pytest.raises(DefenseError, match=r"optimizer\.state\.clear"), protect(model, SPEC):
        step(model, data, optimizer)


def test_state_that_was_loaded_or_put_in_by_hand_is_refused(data: Batch) -> None:
    model = plain()
    optimizer = of_kind("momentum", model)
    with protect(model, SPEC):
        step(model, data, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        with pytest.raises(DefenseError, match=r"optimizer\.state\.clear"):
            step(model, data, optimizer)
        optimizer.state.clear()
        step(model, data, optimizer)
        optimizer.state[model.head.bias]["momentum_buffer"] = clean(model, data)[-1]
        with pytest.raises(DefenseError, match=r"optimizer\.state\.clear"):
            step(model, data, optimizer)


# Parts that were not there.


def another_layer(model: Writing) -> None:
    model.more = nn.Linear(5, 5)
    model.forward = lambda x: model.more(model.head(model.fc(x.flatten(1))))  # type: ignore[method-assign]


def another_in_its_place(model: Writing) -> None:
    model.head = nn.Linear(6, 5)


def another_weight(model: Writing) -> None:
    model.scale = nn.Parameter(torch.ones(5))


@pytest.mark.parametrize("add", [another_layer, another_in_its_place, another_weight])
def test_weights_that_come_after_the_guard_are_refused(add: Any, data: Batch) -> None:
    model = plain()
    guard = protect(model, SPEC)
    step(model, data)
    add(model)
    with pytest.raises(DefenseError, match=r"added|another way|own call"):
        step(model, data)
    guard.remove()


# What is no hole.


def test_dropout_keeps_records_apart(data: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5), nn.Dropout1d(0.2))
    with protect(model, SPEC) as guard:
        step(model, data)
    assert guard.report.steps == 1


class MixedUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.flatten(1), 0.3)
        out: Tensor = self.fc(0.7 * x + 0.3 * x[torch.randperm(len(x))])
        return out


def test_a_random_model_that_mixes_records_is_still_refused(data: Batch) -> None:
    model = MixedUp()
    with pytest.raises(DefenseError, match="depends on the others"), protect(model, SPEC):
        step(model, data)


class Restless(nn.Module):
    """Draws from elsewhere than torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.own = nn.Linear(64, 5), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out: Tensor = self.fc(x * torch.rand(x.shape, generator=self.own))
        return out


def test_randomness_that_cannot_be_repeated_is_told_as_what_it_is(data: Batch) -> None:
    model = Restless()
    with pytest.raises(DefenseError, match="random numbers"), protect(model, SPEC):
        step(model, data)


def test_an_empty_batch_is_refused_in_one_line(data: Batch) -> None:
    model = plain()
    with pytest.raises(DefenseError, match="no records"), protect(model, SPEC):
        step(model, data[:0])


def test_one_number_of_a_table_for_each_record(data: Batch) -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 5))
    with protect(model, SPEC) as guard:
        step(model, Batch(torch.arange(12) % 7, data.labels))
    assert guard.report.steps == 1


def test_a_gradient_in_low_precision_is_the_noised_sum_rounded_once(data: Batch) -> None:
    noisy: list[Tensor] = []

    class Noted(Veil):
        def _sent(self, values: Tensor, slots: Any, like: Any) -> Any:
            noisy.append(values.clone())
            return super()._sent(values, slots, like)

    model = plain().to(torch.bfloat16)
    guard = protect(model, Noted(z=1, clip=1), slots=12)
    for part in (data[:6], data[6:]):  # the second part is rounded with the first, not added to what was rounded
        F.cross_entropy(model(part.inputs.bfloat16()), part.labels).backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert noisy[-1].dtype in (torch.float32, torch.float64)
        assert torch.equal(found, (noisy[-1].float() / 12).to(torch.bfloat16))
    guard.remove()


# What comes to mix records only after somebody has looked.


class Gate(nn.Module):
    """Mixes the records of a batch as far as a number says, which is a weight, a buffer or a plain attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1)) if kind != "buffer" else None
        self.register_buffer("open", torch.zeros(1))
        self.backward_alone = kind == "backward"

    def forward(self, x: Tensor) -> Tensor:
        mixed = 30 * x.mean(0, keepdim=True)
        if self.backward_alone:
            mixed = mixed - mixed.detach()
        return x + (self.open if self.alpha is None else self.alpha) * mixed


def gated(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), Gate(kind), nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("kind", "opened"), [("weight", "2.alpha"), ("buffer", "2.open"), ("backward", "2.alpha")], ids=str
)
def test_a_gate_that_the_server_opens_after_the_first_round_is_seen(kind: str, opened: str, data: Batch) -> None:
    """With it open a record moved the release by 1.19 clips."""
    model = gated(kind)
    state = copy.deepcopy(model.state_dict())

    def rounds() -> None:
        with protect(model, SPEC):
            for alpha in (0.0, 0.0, 0.0, 0.0, 1.0):  # the fifth pass is none that is looked at for its number
                model.load_state_dict(state | {opened: torch.full((1,), alpha)})
                step(model, data)

    with pytest.raises(DefenseError, match="depends on the others"):
        rounds()


def test_a_model_that_comes_to_mix_records_while_it_trains_is_looked_at_again(data: Batch) -> None:
    model = Writing(lambda m, x: None)
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(len(x))
        hidden = model.fc(x.flatten(1))
        out: Tensor = model.head(hidden + hidden.mean(0) if len(calls) > 40 else hidden)
        return out

    model.forward = forward  # type: ignore[method-assign]

    def train() -> None:
        with protect(model, SPEC):
            for _ in range(40):
                step(model, data)

    with pytest.raises(DefenseError, match="no record can be clipped"):
        train()
    assert 40 < len(calls) < 200


class WritesAfter(nn.Module):
    """Writes to what a layer got when the layer has run: its records' gradients would be made of that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        mine = x.flatten(1).clone()
        out: Tensor = self.fc(mine)
        mine.copy_((mine.sum(0) > 5.5).float() * 2 - 1)  # of the whole batch
        return out


def test_what_a_layer_got_and_is_written_to_afterwards_is_refused(data: Batch) -> None:
    with pytest.raises(DefenseError, match="written to after it ran"), protect(WritesAfter(), SPEC) as guard:
        step(guard.model, data)


def test_complex_weights_are_refused(data: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, dtype=torch.complex64))
    with pytest.raises(DefenseError, match="complex numbers"), protect(model, SPEC):
        model(data.inputs.to(torch.complex64))


class Sums:
    """Says nothing of what it holds."""

    def __init__(self) -> None:
        self.of: list[float] = []


class ExtraObject(Writing):
    """Sends an object of its own with its state."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.sums.of.append(float(x.sum())))  # type: ignore[union-attr, arg-type]
        self.sums = Sums()  # type: ignore[assignment]

    def get_extra_state(self) -> Any:
        return self.sums

    def set_extra_state(self, state: Any) -> None:
        self.sums = state


def test_an_object_that_is_sent_with_the_state_is_seen_to_change(data: Batch) -> None:
    model = ExtraObject()
    with protect(model, SPEC) as guard:
        step(model, data)
        with pytest.raises(DefenseError, match="extra state"):
            model.state_dict()
        model.sums.of.clear()  # type: ignore[union-attr, operator]
        guard.check()


# Losses of which a record's part depends on the others.

MEAN, WEIGHED = F.cross_entropy, torch.tensor([1.0, 1.0, 1.0, 1.0, 1000.0])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out, y: MEAN(out, y) + MEAN(out, y, weight=WEIGHED), "labels of the others"),
        (lambda out, y: MEAN(out, y, weight=WEIGHED) + 0.1 * MEAN(out, y), "labels of the others"),
        (lambda out, y: MEAN(out, y, ignore_index=2) + out.square().mean(), "labels of the others"),
        (lambda out, y: MEAN(out, y, ignore_index=2) + out.square().sum() / 60, "labels of the others"),
        (lambda out, y: MEAN(out, y) + MEAN(out, y).detach() * out.square().mean(), "multiplied by a tensor"),
        (lambda out, y: MEAN(out, y) + 0.1 * out.square().mean(), ""),
        (lambda out, y: MEAN(out, y, weight=WEIGHED), ""),
        (lambda out, y: MEAN(out, y, ignore_index=2) + MEAN(2 * out, y, ignore_index=2), ""),
    ],
)
def test_a_sum_of_losses_counts_each_record_by_itself(loss: Any, said: str, data: Batch) -> None:
    """Two means, one with class weights: leaving one record out moved the release by 5.6 clips."""
    model = plain()

    def moved() -> float:
        found = []
        for count in (len(data), len(data) - 1):
            rng = torch.Generator().manual_seed(3)
            with protect(model, "veil:z=0.0001,clip=1", simulated=rng, slots=len(data)):
                model.zero_grad()
                loss(model(data.inputs[:count]), data.labels[:count]).backward()
                found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
                model.zero_grad()
        return float((found[0] - found[1]).norm()) * len(data)

    data.labels[-1] = 4
    if said:
        with pytest.raises(DefenseError, match=said):
            moved()
    else:
        assert 0 < moved() <= 1
