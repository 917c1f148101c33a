"""verify through Flower's messages and NVFlare's filter: what leaves a node is what is measured."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradveil
from gradveil.verification.verify import verify
from integrations.test_nvflare_records import FLContext, nvflare, result  # noqa: F401 - a stand-in for NVFlare
from verification import kinds

SPEC, ROUNDS, LR = "veil:z=1,clip=1", 2, 0.1


@pytest.mark.parametrize("kind", ["LeNet", "MLP on a table"])
def test_nodes_of_flower_are_measured(kind: str) -> None:
    pytest.importorskip("flwr")
    from verification.on_flower import OnFlower

    model, like = kinds.build(kind)
    found = verify(OnFlower(gradveil.defense(SPEC), rounds=ROUNDS), model, like.inputs, like.labels, trials=32, seed=0)
    assert found.promised == pytest.approx(2**0.5)
    assert found.reasons == []
    assert found.estimate.low > 0.7 * found.promised


def test_a_node_of_flower_whose_noise_is_halved_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from gradveil.defenses.veil import Veil
    from verification.on_flower import OnFlower

    monkeypatch.setattr(Veil, "client_multiplier", property(lambda self: self.multiplier / 2))
    model, like = kinds.build("MLP")
    found = verify(OnFlower(gradveil.defense(SPEC), rounds=1), model, like.inputs, like.labels, trials=32, seed=0)
    assert found.promised == pytest.approx(1)
    assert found.estimate.low > 1.3


def test_what_passes_nvflares_filter_is_measured(
    nvflare: ModuleType,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    paid: list[float] = []

    def site(model: nn.Module, inputs: Tensor, labels: Tensor, present: Tensor) -> Sequence[Any]:
        """A client script in two rounds, and the filter of its site; the weights are the server's each time."""
        start = {name: value.clone() for name, value in model.state_dict().items()}
        account, gone = tmp_path / f"{len(paid)}.json", []
        own = nvflare.RecordsFilter(SPEC, str(account))
        for _ in range(ROUNDS):
            model.load_state_dict(start)
            model.zero_grad()
            with gradveil.protect(model.train(), SPEC, slots=len(inputs)) as guard:
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                nn.functional.cross_entropy(guard(inputs[present]), labels[present]).backward()
                optimizer.step()
            difference = {n: (v - start[n]).numpy() for n, v in model.state_dict().items()}
            given = result(data=difference, defended_steps=guard.report.steps, spent=guard.report.spent)
            sent = own.process(given, FLContext(task="train"))["DXO"].data
            gone.append(torch.cat([torch.from_numpy(sent[n]).flatten() for n, _ in model.named_parameters()]))
        paid.append(gradveil.Account.read(account, "site-1").mu)
        return gone

    model, like = kinds.build("MLP")
    found = verify(site, model, like.inputs, like.labels, mu=2**0.5, trials=32, seed=0)
    assert max(paid) == pytest.approx(2**0.5)
    assert found.reasons == []
    assert found.estimate.low > 0.7 * found.promised
