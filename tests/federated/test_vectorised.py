"""Stacked clients by themselves: what is prepared ahead, padded steps, and data that stays small on the device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federated.helpers_federated import ragged_clients, tiny_dataset, tiny_model
from gradveil.federated import vectorised
from gradveil.federated.client import shuffled
from gradveil.federated.engines import ENGINES, Job, World
from gradveil.federated.settings import Local
from gradveil.federated.vectorised import pad_steps
from gradveil.protection.defense import build


@given(
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=5),
    batch_size=st.one_of(st.none(), st.integers(1, 9)),
    epochs=st.integers(1, 3),
    least=st.integers(1, 12),
)
def test_padded_steps_hold_every_clients_own_steps_and_nothing_else(
    sizes: list[int], batch_size: int | None, epochs: int, least: int
) -> None:
    local = Local(epochs, batch_size)
    jobs = [Job(k, np.arange(n) + 100 * k, seed=k) for k, n in enumerate(sizes)]
    steps = pad_steps(jobs, [torch.Generator().manual_seed(k) for k in range(len(sizes))], local, torch.float64, least)
    assert steps.indices.shape[2] >= least
    for k, n in enumerate(sizes):
        order, lengths = shuffled(n, local, torch.Generator().manual_seed(k))
        assert steps.counts[k] == len(lengths)
        for s, chosen in enumerate(order.split(lengths)):
            assert steps.indices[s, k, : len(chosen)].tolist() == (chosen + 100 * k).tolist()
            assert steps.weights[s, k, : len(chosen)].tolist() == [1 / len(chosen)] * len(chosen)
            assert steps.weights[s, k, len(chosen) :].sum() == 0
        assert steps.weights[len(lengths) :, k].sum() == 0


def test_jobs_that_were_announced_give_what_they_give_unannounced_and_again() -> None:
    data, model = tiny_dataset().train, tiny_model().double()
    jobs = [Job(k, part, seed=k) for k, part in enumerate(ragged_clients())]
    with ENGINES.build("vectorised").start(World(model, data, build("gaussian:scale=0.1"), Local())) as pool:
        plain = pool.train(model, jobs, 0.1)
        pool.expect(jobs)
        announced = pool.train(model, jobs, 0.1)
        again = pool.train(model, jobs, 0.1)
    for a, b, c in zip(plain, announced, again, strict=True):
        for name, value in a.update.gradient.items():
            assert torch.equal(value, b.update.gradient[name])
            assert torch.equal(value, c.update.gradient[name])


def test_data_kept_as_integers_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = tiny_dataset().train, tiny_model()
    bytes_ = type(data)((data.images * 255).astype(np.uint8), data.labels)
    jobs = [Job(k, part, seed=k) for k, part in enumerate(ragged_clients())]
    found = []
    for limit in (2**31, 0):
        monkeypatch.setattr(vectorised, "_AS_FLOATS", limit)
        with ENGINES.build("vectorised").start(World(model, bytes_, build("none"), Local())) as pool:
            found.append(pool.train(model, jobs, 0.1))
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(value, b.update.gradient[name]) for name, value in a.update.gradient.items())


def test_data_too_large_for_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradveil.errors import GradveilError

    monkeypatch.setattr(vectorised, "_RESIDENT", 10)
    with pytest.raises(GradveilError, match="GiB"):
        ENGINES.build("vectorised").start(World(tiny_model(), tiny_dataset().train, build("none"), Local()))
