"""The reference: the authors' LeNet, untrained, on CIFAR-10, one image an update (clamped MSE below 0.01 counts)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from gradveil.attacks.dlg import DLG
from gradveil.data import load
from gradveil.models import build
from gradveil.representation.scores import leak_scores
from gradveil.types import Observation, Update

IMAGES = 3


@pytest.mark.slow
def test_dlg_beats_no_defence_and_the_defence_once_it_reads_the_mask_and_not_before(data_folder: Path) -> None:
    data = load("cifar10", data=data_folder)
    chosen = torch.randperm(len(data.test.labels), generator=torch.Generator().manual_seed(5))[:IMAGES]
    batch = data.test.batch(chosen.numpy())
    model = build("lenet", (3, 32, 32), 10)
    plain, oblivious = [], []
    for x, y in zip(batch.inputs.split(1), batch.labels.split(1), strict=True):
        found = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        gradient = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
        seen = Observation(model, Update(gradient), (3, 32, 32), 10)
        zeroed = gradient["fc.weight"].clone()
        zeroed[:, leak_scores(model, "fc", x)[0].topk(round(0.4 * 768)).indices] = 0
        plain.append(seen)
        oblivious.append(replace(seen, update=Update(gradient | {"fc.weight": zeroed})))
    masked = [s.masked("fc.weight") for s in oblivious]

    views = [*plain, *oblivious, *masked]
    rngs = [torch.Generator().manual_seed(i % IMAGES) for i in range(len(views))]
    found = DLG(restarts=2).reconstruct_many(views, rngs)
    error = torch.stack([f.inputs[0] for f in found]).view(3, IMAGES, -1).sub(batch.inputs.flatten(1)).square().mean(2)
    success = (error < 0.01).float().mean(1)
    assert success[0] >= 0.9
    assert success[1] == 0
    assert success[2] >= 0.9
    assert float(error[1].mean()) > float((batch.inputs - 0.5).square().mean())  # worse than a grey guess
    assert not any(f.converged for f in found[IMAGES : 2 * IMAGES])
