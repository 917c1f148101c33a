"""One client's training: the sum of step gradients, equal to plain SGD done by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, nn

from federated.helpers_federated import tiny_model
from gradveil.errors import UpdateError
from gradveil.federated.client import Local, local_update, shuffled, step_gradient, train_client
from gradveil.protection.defense import build
from gradveil.tree import parameters
from gradveil.types import Batch


def plan(num_examples: int, local: Local, rng: Generator) -> list[torch.Tensor]:
    order, sizes = shuffled(num_examples, local, rng)
    return list(order.split(sizes))


def sgd_by_hand(model: nn.Module, batches: list[Batch], lr: float, decay: float = 0.0, mu: float = 0.0) -> nn.Module:
    """The same training through autograd and torch.optim."""
    model = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    for batch in batches:
        optimizer.zero_grad()
        pull = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True))
        (F.cross_entropy(model(batch.inputs), batch.labels) + mu / 2 * pull).backward()
        optimizer.step()
    return model


@pytest.fixture
def data(rng: Generator) -> Batch:
    return Batch(torch.rand(11, 1, 6, 6, generator=rng, dtype=torch.float64), torch.arange(11) % 3)


@pytest.mark.parametrize(("decay", "mu"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.5), (0.05, 0.3)])
def test_the_update_is_what_plain_sgd_on_the_same_batches_gives(data: Batch, decay: float, mu: float) -> None:
    model = tiny_model().double()
    local = Local(epochs=2, batch_size=4, weight_decay=decay, proximal=mu)
    steps = plan(11, local, torch.Generator().manual_seed(3))
    assert [len(step) for step in steps] == [4, 4, 3, 4, 4, 3]
    after = sgd_by_hand(model, [Batch(data.inputs[s], data.labels[s]) for s in steps], 0.3, decay, mu)
    rng = torch.Generator().manual_seed(3)
    update = local_update(model, data, "none", 0.3, rng, 2, 4, decay, mu)
    assert (update.num_examples, update.num_steps, update.lr, update.batch_size) == (11, 6, 0.3, 4)
    ended = parameters(after)
    for name, value in parameters(model).items():
        assert torch.allclose(value - 0.3 * update.gradient[name], ended[name], atol=1e-12)


def test_one_step_on_one_batch_is_its_mean_gradient_exactly(data: Batch) -> None:
    model = tiny_model().double()
    update = local_update(model, [data], "none", 0.01, torch.Generator())
    expected = step_gradient(model, data, build("none"), torch.Generator())
    assert all(torch.equal(update.gradient[name], expected[name]) for name in expected)
    assert update.batch_size is None
    assert update.num_steps == 1


def test_the_model_the_data_and_the_global_state_are_left_alone(data: Batch) -> None:
    model = tiny_model(batchnorm=True).double()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    inputs = data.inputs.clone()
    first = local_update(model, data, "representation:share=0.4", 0.1, torch.Generator().manual_seed(1), 2, 4)
    again = local_update(model, data, "representation:share=0.4", 0.1, torch.Generator().manual_seed(1), 2, 4)
    other = local_update(model, data, "representation:share=0.4", 0.1, torch.Generator().manual_seed(2), 2, 4)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(data.inputs, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first.gradient[name], again.gradient[name]) for name in first.gradient)
    assert not all(torch.equal(first.gradient[name], other.gradient[name]) for name in first.gradient)


def test_every_epoch_visits_every_example_once_in_a_new_order() -> None:
    steps = plan(10, Local(epochs=3, batch_size=4), torch.Generator().manual_seed(0))
    epochs = [torch.cat(steps[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(s) for s in plan(10, Local(batch_size=None), torch.Generator())] == [10]
    assert [len(s) for s in plan(10, Local(batch_size=99), torch.Generator())] == [10]


def test_a_defence_acts_at_every_step_and_on_the_update_once(data: Batch) -> None:
    model = tiny_model().double()
    calls: list[str] = []
    plain = build("none")

    class Spy(type(plain)):  # type: ignore[misc]
        def on_gradient(self, gradient, rng):  # type: ignore[no-untyped-def]
            calls.append("step")
            return {name: 2 * g for name, g in gradient.items()}

        def on_update(self, update, rng):  # type: ignore[no-untyped-def]
            calls.append("update")
            return update

    update = local_update(model, data, Spy(), 0.1, torch.Generator().manual_seed(3), 1, 4)
    assert calls == ["step", "step", "step", "update"]
    doubled = local_update(model, data, "none", 0.2, torch.Generator().manual_seed(3), 1, 4)  # 2 g at lr = g at 2 lr
    assert all(torch.allclose(update.gradient[n], 2 * doubled.gradient[n], atol=1e-12) for n in update.gradient)


def test_batch_norm_statistics_leave_with_the_client(data: Batch) -> None:
    model = tiny_model(batchnorm=True).double().train()
    sent = train_client(model, data, build("none"), 0.1, torch.Generator(), Local(batch_size=4))
    assert set(sent.buffers) == {"1.running_mean", "1.running_var"}
    assert torch.equal(sent.buffers["1.running_mean"], model.get_buffer("1.running_mean"))
    assert sent.buffers["1.running_mean"].abs().max() > 0


def test_bad_settings_are_refused(data: Batch) -> None:
    model = tiny_model().double()
    with pytest.raises(UpdateError, match="lr=0"):
        local_update(model, data, "none", 0.0, torch.Generator())
    with pytest.raises(UpdateError, match="epochs=0: give a whole number from 1"):
        local_update(model, data, "none", 0.1, torch.Generator(), epochs=0)
    with pytest.raises(UpdateError, match="weight_decay=-1: give"):
        local_update(model, data, "none", 0.1, torch.Generator(), weight_decay=-1)
    with pytest.raises(UpdateError, match="no examples"):
        local_update(model, Batch(data.inputs[:0], data.labels[:0]), "none", 0.1, torch.Generator())


def test_under_a_callers_autocast_the_steps_follow_the_weights(data: Batch) -> None:
    model, batch = tiny_model().float(), Batch(data.inputs.float(), data.labels)
    plain = local_update(model, [batch] * 6, "none", 0.5, Generator()).gradient
    with torch.autocast("cpu", torch.bfloat16):
        rounded = local_update(model, [batch] * 6, "none", 0.5, Generator()).gradient
    first = step_gradient(model, batch, build("none"), Generator())
    for name, g in plain.items():
        assert (rounded[name] - g).norm() < 0.1 * (6 * first[name] - g).norm()  # six steps from where it started
