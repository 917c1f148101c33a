"""Rounds of federated averaging: by hand, by every engine, resumed, watched, and with faults."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from federated.helpers_federated import Spoiled, StopsWhereItBegan, ragged_clients, tiny_dataset, tiny_model
from gradveil.defenses.compose import Compose
from gradveil.errors import DataError, GradveilError, SpecError
from gradveil.federated.client import evaluate, local_update
from gradveil.federated.engines import ENGINES
from gradveil.federated.server import Checkpoint, sample_clients
from gradveil.federated.settings import SCHEDULES
from gradveil.federated.simulate import Training, client_seed, simulate
from gradveil.models import build as build_model
from gradveil.protection.defense import Defense, NoDefense, PerRound, build
from gradveil.seeds import Seeds
from gradveil.tree import parameters

TRAINING = Training(rounds=3, clients=3, epochs=2, batch_size=4, lr=0.3)


def final(
    training: Training = TRAINING, defense: str | Defense = "none", model: nn.Module | None = None, **options: Any
) -> Any:
    """The last round's weights and buffers."""
    start = model or tiny_model().double()
    last = list(simulate(start, tiny_dataset(), ragged_clients(), training, defense, 7, **options))[-1]
    return {name: value.clone() for name, value in last.model.state_dict().items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def test_a_round_is_the_weighted_mean_of_clients_trained_alone() -> None:
    model, data, clients, seeds = tiny_model().double(), tiny_dataset(), ragged_clients(), Seeds(7)
    weights = parameters(copy.deepcopy(model))
    for number in (1, 2, 3):
        chosen = sample_clients(seeds, number, [len(c) for c in clients], TRAINING)
        assert len(set(chosen)) == 3
        ended, sizes = [], []
        for client in chosen:
            own = copy.deepcopy(model)
            for name, value in own.named_parameters():
                value.data.copy_(weights[name])
            batch = data.train.batch(clients[client])
            batch = type(batch)(batch.inputs.double(), batch.labels)
            rng = torch.Generator().manual_seed(client_seed(seeds, number, client))
            update = local_update(own, batch, "none", 0.3, rng, 2, 4)
            ended.append({name: w - 0.3 * update.gradient[name] for name, w in weights.items()})
            sizes.append(len(clients[client]))
        weights = {n: sum(s * e[n] for s, e in zip(sizes, ended, strict=True)) / sum(sizes) for n in weights}  # type: ignore[misc]
    assert distance(weights, final()) < 1e-12


def test_training_learns_and_leaves_the_given_model_alone() -> None:
    model, data = tiny_model(), tiny_dataset()
    before = copy.deepcopy(model.state_dict())
    rounds = list(simulate(model, data, ragged_clients(), Training(rounds=15, clients=3, lr=0.3, batch_size=4)))
    assert evaluate(rounds[-1].model, data.test).accuracy > 0.95 > evaluate(model, data.test).accuracy
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [r.number for r in rounds] == list(range(1, 16))
    assert all(r.accepted == 3 and r.rejected == {} for r in rounds)


def test_the_same_seed_repeats_and_another_differs_and_the_global_state_is_untouched() -> None:
    state = torch.get_rng_state()
    assert distance(final(), final()) == 0
    assert torch.equal(torch.get_rng_state(), state)
    other = list(simulate(tiny_model().double(), tiny_dataset(), ragged_clients(), TRAINING, "none", 8))[-1]
    assert distance(final(), dict(other.model.state_dict())) > 1e-6


VECTORISED = [
    ("none", {}),
    ("none", {"weight_decay": 0.1, "proximal": 0.5}),
    ("none", {"batch_size": None}),
    ("none", {"sampling": "with", "clients": 8, "weighting": "paper"}),
    ("none", {"aggregator": "fedadam", "schedule": "inverse:mu=2,gamma=4"}),
    ("gaussian:scale=0.1", {}),
    ("gaussian:scale=0.1,on=update", {}),
    ("pruning:share=0.5+laplace:scale=0.1", {"proximal": 0.5}),
    ("representation:share=0.3", {}),
    ("representation:count=7+gaussian:scale=0.1", {"weight_decay": 0.1}),
    ("representation:share=0.2+representation:share=0.3,method=exact", {}),
]


@pytest.mark.parametrize(("defense", "changes"), VECTORISED)
@pytest.mark.parametrize("engine", ["vectorised", "vectorised:clients=2"])
def test_stacked_clients_equal_one_at_a_time_for_ragged_sizes(
    defense: str, changes: dict[str, Any], engine: str
) -> None:
    training = Training(**{**vars(TRAINING), "clients": 5, **changes})
    assert distance(final(training, defense, engine=engine), final(training, defense)) < 1e-10


def test_a_convolution_is_defended_in_stacked_clients_as_in_one_at_a_time() -> None:
    model = build_model("lenet:strides=1/1,activation=tanh,width=3", (1, 6, 6), 3).double()
    expected = final(defense="representation:share=0.3,layer=conv2", model=model)
    found = final(defense="representation:share=0.3,layer=conv2", model=model, engine="vectorised")
    assert distance(found, expected) < 1e-10
    assert distance(found, final(model=model)) > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes:workers=2"])
@pytest.mark.parametrize("defense", [StopsWhereItBegan(), Compose((NoDefense(), StopsWhereItBegan()))])
def test_what_follows_from_the_weights_of_a_round_does_so_in_training(engine: str, defense: Defense) -> None:
    model = tiny_model().double()
    assert distance(final(defense=defense, model=model, engine=engine), dict(model.state_dict())) == 0
    assert isinstance(defense, PerRound)
    assert defense.follows_rounds
    assert not Compose((NoDefense(), NoDefense())).follows_rounds


def test_a_client_by_itself_shows_its_weights_as_well() -> None:
    batch = tiny_dataset().train.batch([0, 1, 2])
    update = local_update(tiny_model(), batch, StopsWhereItBegan(), 0.3, torch.Generator())
    assert all(not g.any() for g in update.gradient.values())


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["none", "representation:share=0.4+gaussian:scale=0.01"])
def test_worker_processes_give_the_very_same_numbers(defense: str) -> None:
    model = tiny_model(batchnorm=True)
    expected = final(defense=defense, model=model)
    assert distance(final(defense=defense, model=model, engine="processes:workers=2"), expected) == 0


def test_what_cannot_be_stacked_is_refused_with_the_reason() -> None:
    with pytest.raises(GradveilError, match="batch norm"):
        final(model=tiny_model(batchnorm=True), engine="vectorised")
    with pytest.raises(GradveilError, match="representation"):
        final(defense="representation:p=1", engine="vectorised")
    with pytest.raises(GradveilError, match="representation"):
        final(defense="random_mask", engine="vectorised")
    with pytest.raises(GradveilError, match="several layers"):
        final(defense="representation+representation:layer=0", engine="vectorised")
    with pytest.raises(GradveilError, match="plain chain"):
        final(defense="representation:layer=0", engine="vectorised")
    with pytest.raises(GradveilError, match="CUDA"):
        final(engine="vectorised:graph=true")
    with pytest.raises(SpecError, match="from 1"):
        final(engine="vectorised:clients=0")
    with pytest.raises(SpecError, match="Did you mean 'sequential'"):
        final(engine="sequentiel")
    assert ENGINES.names() == ["processes", "sequential", "vectorised"]


def test_batch_norm_statistics_are_averaged() -> None:
    model = tiny_model(batchnorm=True).double()
    state = final(Training(rounds=1, clients=5, lr=0.1), model=model)
    assert state["1.running_mean"].abs().max() > 0
    assert state["1.running_var"].sub(1).abs().max() > 0


@pytest.mark.parametrize("server", ["fedavg", "fedavgm", "fedadam"])
def test_a_resumed_run_ends_where_the_unbroken_one_does(tmp_path: Path, server: str) -> None:
    training = Training(**{**vars(TRAINING), "aggregator": server, "rounds": 5})
    path = tmp_path / "checkpoint.safetensors"
    for done in simulate(tiny_model().double(), tiny_dataset(), ragged_clients(), training, "gaussian", 7):
        if done.number == 2:
            done.checkpoint(accuracy=0.5).save(path)
            break
    read = Checkpoint.read(path)
    assert (read.round, read.notes) == (2, {"accuracy": 0.5})
    assert distance(final(training, "gaussian", resume=read), final(training, "gaussian")) == 0


def test_a_foreign_or_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(DataError, match="not a checkpoint"):
        Checkpoint.read(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a checkpoint"):
        Checkpoint.read(path)
    other = next(simulate(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), tiny_dataset(), ragged_clients(), TRAINING))
    other.checkpoint().save(path)
    with pytest.raises(DataError, match="another model"):
        final(resume=Checkpoint.read(path))


def test_a_watched_client_shows_its_examples_and_the_update_it_sent() -> None:
    model, data, clients = tiny_model().double(), tiny_dataset(), ragged_clients()
    training = Training(rounds=2, clients=3, batch_size=None, lr=0.3)
    for done in simulate(model, data, clients, training, "pruning:share=0.3", 7, watch=2):
        assert [w.client for w in done.watched] == list(done.clients[:2])
        for client, truth, update in [(w.client, w.truth, w.update) for w in done.watched]:
            assert torch.equal(truth.labels, data.train.labels[clients[client]])
            assert done.sent is not None
            batch = type(truth)(truth.inputs.double(), truth.labels)
            again = local_update(done.sent, [batch], build("pruning:share=0.3"), 0.3, torch.Generator())
            assert all(torch.allclose(again.gradient[n], update.gradient[n], atol=1e-12) for n in again.gradient)
    chosen = next(simulate(model, data, clients, training, watch=lambda number, drawn: [drawn[-1]]))
    assert [w.client for w in chosen.watched] == [chosen.clients[-1]]
    quiet = next(simulate(model, data, clients, training))
    assert quiet.watched == ()
    assert quiet.sent is None


def test_faulty_clients_are_counted_and_do_not_spoil_the_model() -> None:
    training = Training(**{**vars(TRAINING), "rounds": 12, "clients": 5})
    rounds = list(
        simulate(
            tiny_model(), tiny_dataset(), ragged_clients(), training, "none", 7, engine=Spoiled(nan=0.3, shape=0.3)
        )
    )
    assert all(done.accepted + sum(done.rejected.values()) == 5 for done in rounds)
    assert set().union(*(done.rejected for done in rounds)) == {"not finite", "malformed"}
    assert all(bool(torch.isfinite(p).all()) for p in rounds[-1].model.parameters())
    start = tiny_model()
    stuck = list(simulate(start, tiny_dataset(), ragged_clients(), TRAINING, "none", 7, engine=Spoiled(nan=1.0)))
    assert all(done.accepted == 0 for done in stuck)
    assert distance(dict(stuck[-1].model.state_dict()), dict(start.state_dict())) == 0


def test_sampling_with_replacement_follows_the_clients_sizes() -> None:
    sizes = [1, 1, 8]
    training = Training(clients=5, sampling="with")
    drawn = np.concatenate([sample_clients(Seeds(0), number, sizes, training) for number in range(400)])
    assert np.bincount(drawn) / len(drawn) == pytest.approx([0.1, 0.1, 0.8], abs=0.03)
    assert client_seed(Seeds(0), 1, 2) != client_seed(Seeds(0), 1, 2, repeat=1) != client_seed(Seeds(0), 2, 2)


def test_schedules_follow_their_formulas() -> None:
    inverse = SCHEDULES.build("inverse:mu=0.5,gamma=10,steps=7")
    assert [inverse.lr(9.0, number, 5) for number in (1, 2, 3)] == pytest.approx([2 / 5, 2 / 8.5, 2 / 12])
    assert SCHEDULES.build("exponential:factor=0.5").lr(0.8, 3, 5) == pytest.approx(0.2)
    assert SCHEDULES.build("cosine").lr(0.8, 1, 4) == pytest.approx(0.8)
    assert SCHEDULES.build("cosine").lr(0.8, 3, 4) == pytest.approx(0.4)
    training = Training(rounds=2, clients=1, schedule="exponential:factor=0.5", lr=0.4)
    assert [done.lr for done in simulate(tiny_model(), tiny_dataset(), ragged_clients(), training)] == [0.4, 0.2]
    with pytest.raises(SpecError):
        SCHEDULES.build("inverse:mu=0")


def test_fedprox_stays_closer_to_the_start() -> None:
    far = final(Training(rounds=1, clients=5, epochs=10, batch_size=4, lr=0.3))
    near = final(Training(rounds=1, clients=5, epochs=10, batch_size=4, lr=0.3, proximal=1.0))
    start = dict(tiny_model().double().state_dict())
    assert distance(near, start) < distance(far, start)


@pytest.mark.parametrize(
    ("clients", "training", "message"),
    [
        ([], TRAINING, "3 clients a round were asked for and there are 0"),
        ([np.arange(3)] * 2, TRAINING, "there are 2"),
        ([np.arange(3), np.arange(0), np.arange(3)], TRAINING, r"\[1\]"),
        ([np.arange(3), np.arange(99), np.arange(3)], TRAINING, "example 98"),
    ],
)
def test_impossible_runs_are_refused(clients: list[np.ndarray], training: Training, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        next(simulate(tiny_model(), tiny_dataset(), clients, training))


def test_evaluation_is_by_hand_and_puts_the_mode_back() -> None:
    model, data = tiny_model(batchnorm=True).train(), tiny_dataset()
    before = copy.deepcopy(model.state_dict())
    found = evaluate(model, data.test, batch_size=7)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    batch = data.test.batch()
    logits = model.eval()(batch.inputs).detach()
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == batch.labels).float().mean()))
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(logits, batch.labels)), rel=1e-5)
