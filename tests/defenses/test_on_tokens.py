"""Every defence on small language models: it runs, or says in one line that it cannot and what can."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from gradveil.auditing.train import TrainConfig, train
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.errors import GradveilError
from gradveil.federated.client import train_client
from gradveil.federated.settings import Local
from gradveil.losses import build as build_loss
from gradveil.models import build
from gradveil.protection.defense import DEFENSES
from gradveil.protection.defense import build as build_defense
from gradveil.protection.protect import protect
from gradveil.threats.setup import for_client
from gradveil.types import Batch

MODELS = {
    "gpt_tiny": ("manual:vocabulary=64,length=8", "gpt_tiny:width=16,depth=1,heads=2", "next_token"),
    "bert_tiny": ("manual:task=page,vocabulary=64,length=8", "bert_tiny:width=16,depth=1,heads=2", "cross_entropy"),
}
IDLE = ("none", "compose")
REFUSED = {  # and what the refusal says
    "ats": r"transforms images .* Use veil, gaussian or pruning\.$",
    "representation_certified": "token ids have no pixels: defend text with veil",
    "representation": "give embeddings in place of token ids, or defend text with veil, gaussian or pruning",
}


def made(kind: str) -> tuple[Dataset, nn.Module, str]:
    source, spec, loss = MODELS[kind]
    data = load(source)
    return data, build(spec, data.input_shape, data.outputs(loss), 0, data.modality), loss


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", DEFENSES.names())
def test_a_defence_protects_tokens_or_names_another(name: str, kind: str) -> None:
    data, model, loss = made(kind)
    held, local = data.train.batch(slice(0, 4)), Local(batch_size=2, loss=loss)

    def sent(spec: str) -> dict[str, torch.Tensor]:
        defense = for_client(build_defense(spec), model, data.test.batch(slice(0, 64)), loss)
        rng = torch.Generator().manual_seed(1)
        return train_client(copy.deepcopy(model), held, defense, 0.1, rng, local).whole.gradient

    why = REFUSED.get(name) or (REFUSED["representation"] if name.startswith("representation") else None)
    if why is not None:
        with pytest.raises(GradveilError, match=why):
            sent(name)
        return
    plain, found = sent("none"), sent(name)
    assert all(bool(g.isfinite().all()) for g in found.values())
    changed = any(not torch.equal(found[n], plain[n]) for n in plain)
    assert changed == (name not in IDLE)


@pytest.mark.parametrize("kind", MODELS)
def test_records_through_an_embedding_are_those_of_one_example_at_a_time(kind: str) -> None:
    """With a clip that cuts every record, what is sent is the mean of unit gradients taken one by one."""
    data, model, loss = made(kind)
    held, clip = data.train.batch(slice(0, 3)), 1e-3
    each = [
        train_client(
            copy.deepcopy(model), held[i : i + 1], build_defense("none"), 0.1, torch.Generator(), Local(loss=loss)
        ).whole.gradient
        for i in range(3)
    ]
    norms = [torch.stack([g.square().sum() for g in one.values()]).sum().sqrt() for one in each]
    expected = {n: sum(one[n] * clip / norm for one, norm in zip(each, norms, strict=True)) / 3 for n in each[0]}
    defense = build_defense(f"dp_sgd:noise=0.000001,clip={clip}")
    found = train_client(
        copy.deepcopy(model), held, defense, 0.1, torch.Generator(), Local(batch_size=None, loss=loss)
    ).whole.gradient
    largest = max(float(g.abs().max()) for g in expected.values())
    for n, g in expected.items():
        assert torch.allclose(found[n], g, atol=0.02 * largest)


class Sentences(nn.Module):
    """A model of one's own: the mean of embeddings, and a linear layer."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(vocabulary, 6), nn.Linear(6, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of classes."""
        logits: torch.Tensor = self.fc(self.words(ids.long()).mean(dim=1))
        return logits


@pytest.mark.parametrize("defense", ["gaussian:scale=0.1", "pruning:share=0.99", "veil:z=1", "dp_sgd"])
def test_a_loop_of_ones_own_is_protected(defense: str) -> None:
    data, *_ = made("bert_tiny")
    model, held = Sentences(64, data.num_classes), data.train.batch(slice(0, 4))
    plain = copy.deepcopy(model)
    with protect(model, defense, simulated=torch.Generator().manual_seed(0)):
        _step(model, held)
    _step(plain, held)
    assert not torch.equal(model.words.weight, plain.words.weight)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("defense", ["veil:z=1", "dp_sgd"])
def test_records_of_both_models_are_protected(defense: str, kind: str) -> None:
    data, model, loss = made(kind)
    held, measured = data.train.batch(slice(0, 4)), build_loss(loss)
    with protect(model, defense, simulated=torch.Generator().manual_seed(0)) as guard:
        measured(model(held.inputs), held.labels).backward()
    assert guard.report.steps == 1
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def _step(model: nn.Module, held: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.functional.cross_entropy(model(held.inputs), held.labels).backward()
    optimizer.step()


@pytest.mark.parametrize("defense", ["pruning:share=0.5", "veil"])
def test_a_run_of_training_is_protected(defense: str, tmp_path: Path) -> None:
    source, model, _ = MODELS["gpt_tiny"]
    config = TrainConfig(
        dataset=source, model=model, partition="iid:devices=4,per_device=4", rounds=1, clients=2, defense=defense,
        device="cpu", engine="sequential",
    )  # fmt: skip
    assert train(config, tmp_path)["rounds"] == 1
