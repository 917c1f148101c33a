"""A rehearsal on public data: what it chooses, what it predicts, and that it looks at no private record."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gradveil
from gradveil.auditing.train import TrainConfig, rehearse_run, train, without_auto
from gradveil.data.partition import deal
from gradveil.errors import CertificateError, SpecError
from gradveil.federated.simulate import public_records
from gradveil.models import build, fit_to_public
from gradveil.privacy.plan import HeadRun, rehearse
from gradveil.seeds import Seeds

DIMS, KINDS = 40, 5
SPEC = "scatter:patches=32,dims=40,init=zeros"


class World:
    """Classes in Gaussian clouds, on a sphere."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(5)
        self.means = 0.35 * torch.randn(KINDS, DIMS, generator=self.rng)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(KINDS, (count,), generator=self.rng)
        return F.normalize(self.means[y] + torch.randn(count, DIMS, generator=self.rng), dim=1), y

    def trained(self, run: HeadRun, lr: float, clip: float) -> float:
        """Return the accuracy of a real run on records of its own."""
        x, y = self.draw(run.records)
        weights, speed = torch.zeros(KINDS, DIMS), torch.zeros(KINDS, DIMS)
        for _ in range(run.rounds):
            delta = (x @ weights.T).softmax(1) - F.one_hot(y, KINDS)
            delta = delta * (clip / delta.norm(dim=1, keepdim=True)).clamp_max(1)
            noise = clip * run.noise * torch.randn(KINDS, DIMS, generator=self.rng)
            speed = run.momentum * speed + delta.T @ x / len(x) + noise
            weights = weights - lr * speed
        x, y = self.draw(5000)
        return float(((x @ weights.T).argmax(1) == y).float().mean())


@pytest.mark.parametrize("noise", [0.0005, 0.005, 0.02])
def test_its_interval_holds_what_real_runs_lose(noise: float) -> None:
    world, run = World(), HeadRun(60, 2000, noise, 2000, momentum=0.9)
    found = rehearse(*world.draw(600), KINDS, run)
    silent = replace(run, noise=0.0)
    bare = max(np.mean([world.trained(silent, lr, 1e9) for _ in range(4)]) for lr in (1.0, 3.0, 10.0, 30.0))
    lost = [100 * (bare - world.trained(run, found.lr, found.clip)) for _ in range(8)]
    assert found.low - 0.5 < np.mean(lost) < found.high + 0.5
    assert found.high - found.low < 4
    if noise == 0.02:
        assert found.low > 1  # it does cost
        assert found.lr * found.clip <= 1  # and a small step is taken


def test_classes_that_are_not_there_are_said() -> None:
    x, y = World().draw(100)
    with pytest.raises(CertificateError, match="4 of the 5 classes"):
        rehearse(x[y > 0], y[y > 0], KINDS, HeadRun(10, 100, 0.1, 100))


def test_what_is_asked_for_is_read_off_the_spec() -> None:
    assert without_auto("veil:epsilon=8,clip=auto,lr=auto") == ("veil:epsilon=8", {"clip", "lr"})
    assert without_auto("veil:clip=0.3,lr=auto,tier=local") == ("veil:clip=0.3,tier=local", {"lr"})
    assert without_auto("pruning:share=0.5+qsgd") == ("pruning:share=0.5+qsgd", frozenset())


def test_a_rehearsal_depends_on_no_record_of_a_client() -> None:
    data, seeds = gradveil.dataset("digits"), Seeds(0)
    config = TrainConfig(
        partition="iid:devices=10,per_device=100", clients=10, rounds=20, batch_size=None, defense="veil:epsilon=4"
    )
    clients = deal(data, config.partition, seeds("partition"))
    public = public_records(data, clients, seeds, 2000)
    model = build(SPEC, data.input_shape, 10)
    fit_to_public(model, data.train.batch(public).inputs)
    images = data.train.images.copy()
    images[np.concatenate(clients)] = 0
    other = replace(data, train=replace(data.train, images=images))
    both = frozenset({"clip", "lr"})
    found = [rehearse_run(config, both, model, some, clients, public, seeds) for some in (data, other)]
    assert found[0] == found[1]
    held = rehearse_run(replace(config, lr=2.5), frozenset({"clip"}), model, data, clients, public, seeds)[0]
    assert held.lr == 2.5
    with pytest.raises(SpecError, match=r"public records, .* and there are none: deal out fewer"):
        rehearse_run(config, both, model, data, clients, public[:0], seeds)


def test_a_run_takes_rate_and_clip_from_it_and_can_be_continued(tmp_path: Path) -> None:
    config = TrainConfig(
        partition="iid:devices=10,per_device=100", clients=10, rounds=15, batch_size=None, model=SPEC,
        defense="veil:epsilon=8,tier=aggregate,clip=auto,lr=auto", aggregator="fedavgm:momentum=0.9",
    )  # fmt: skip
    summary = train(config, tmp_path / "run")
    found = summary["rehearsed"]
    assert summary["defense"] == f"veil:epsilon=8,tier=aggregate,clip={found['clip']:g}"
    assert found["low"] <= found["lost"] <= found["high"]
    assert summary["accuracy"] > 0.7
    text = (tmp_path / "run" / "config.toml").read_text()
    assert f"lr = {found['lr']}" in text
    again = train(config, tmp_path / "run", resume=True)
    assert again["accuracy"] == summary["accuracy"]


def test_it_says_what_it_is_for(tmp_path: Path) -> None:
    config = TrainConfig(model="lenet", defense="veil:epsilon=8,clip=auto", batch_size=None)
    with pytest.raises(SpecError, match="one linear layer"):
        train(config, tmp_path / "run")
    with pytest.raises(SpecError, match="veil alone"):
        train(replace(config, defense="veil:epsilon=8,lr=auto+pruning:share=0.5"), tmp_path / "run")
