"""Settings that train in step end where each does alone."""

from typing import Any

import pytest
import torch
from torch import nn

from federated.helpers_federated import ragged_clients, tiny_dataset, tiny_model
from gradveil.errors import GradveilError
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.models import build as build_model
from gradveil.representation import scores as api
from gradveil.representation.recorder import walk, walkable
from gradveil_studies.together import Variant, simulate_together

TRAINING = Training(rounds=3, clients=3, epochs=2, batch_size=4, lr=0.3)


def final(defense: str, model: nn.Module) -> Any:
    """The last round's weights and buffers."""
    return list(simulate(model, tiny_dataset(), ragged_clients(), TRAINING, defense, 7))[-1].model.state_dict()


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.parametrize("examples", [0, 3, 4])
@pytest.mark.parametrize("methods", [("auto",), ("exact",), ("auto", "exact")])
def test_scores_of_stacked_clients_are_those_that_each_would_choose(
    examples: int, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact for no batch, for those of three examples at most, or for all; and wherever it is asked for."""
    model = build_model("lenet:strides=1/1,activation=tanh,width=3", (1, 6, 6), 3).double()
    layers = walkable(model, "fc", torch.zeros(1, 1, 6, 6)) or []
    monkeypatch.setattr(api, "BUDGET", examples * api.effort(walk(layers, torch.zeros(1, 1, 6, 6).double())))
    specs = [f"representation:share=0.3,method={method}" for method in methods]
    settings = [Variant(model, ragged_clients(), spec, 7) for spec in specs]
    last = list(simulate_together(settings, tiny_dataset(), TRAINING, engine="vectorised"))[-1]
    alone = [final(spec, model) for spec in specs]
    for found, expected in zip(last, alone, strict=True):
        assert distance(dict(found.model.state_dict()), expected) < 1e-10
    if len(methods) == 2 and not examples:
        assert distance(*alone) > 1e-4


@pytest.mark.parametrize("engine", ["vectorised", "vectorised:clients=4", "sequential"])
def test_settings_that_train_together_end_where_they_do_alone(engine: str) -> None:
    data = tiny_dataset()
    settings = [
        Variant(tiny_model(1).double(), ragged_clients(), "none", 1),
        Variant(tiny_model(2).double(), ragged_clients()[::-1], "gaussian:scale=0.1", 2),
        Variant(tiny_model(2).double(), ragged_clients(), "pruning:share=0.5", 2),
        Variant(tiny_model(2).double(), ragged_clients(), "laplace:scale=0.1,on=update", 3),
        Variant(tiny_model(3).double(), ragged_clients(), "representation:share=0.4", 3),
        Variant(tiny_model(3).double(), ragged_clients(), "representation:share=0.9", 3),
    ]
    training = Training(**{**vars(TRAINING), "aggregator": "fedavgm", "proximal": 0.1})
    last = list(simulate_together(settings, data, training, engine=engine))[-1]
    for setting, together in zip(settings, last, strict=True):
        rounds = simulate(setting.model, data, setting.clients, training, setting.defense, setting.seeds)
        alone = list(rounds)[-1]
        assert distance(dict(together.model.state_dict()), dict(alone.model.state_dict())) < 1e-10
        assert together.clients == alone.clients


def test_settings_that_cannot_train_together_are_refused() -> None:
    data = tiny_dataset()
    one = Variant(tiny_model(), ragged_clients())
    other = Variant(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), ragged_clients())
    for settings, engine, message in [
        ([], "vectorised", "nothing to train"),
        ([one, other], "vectorised", "one architecture"),
        ([one], "processes", "vectorised and sequential"),
        ([one, Variant(tiny_model(), ragged_clients(), "random_mask")], "vectorised", "representation"),
    ]:
        with pytest.raises(GradveilError, match=message):
            next(simulate_together(settings, data, TRAINING, engine=engine))


def test_runs_in_step_have_accounts_as_well() -> None:
    data, clients = tiny_dataset(), ragged_clients()
    variant = Variant(tiny_model(), clients, "veil:z=2", 7)
    together = list(simulate_together([variant], data, TRAINING, engine="sequential"))[-1][0]
    alone = list(simulate(tiny_model(), data, clients, TRAINING, "veil:z=2", 7))[-1]
    assert together.accounts == alone.accounts
    assert max(account.spent for account in together.accounts) > 0
