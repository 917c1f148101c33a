"""Updates of small language models, for tests of attacks on text."""

import torch
from torch import Tensor, nn

from gradveil.losses import build as build_loss
from gradveil.models import build
from gradveil.types import Observation, Update

LENGTH = 7
GPT = ("gpt_tiny:width=64,heads=4", 40, "next_token")
BERT = ("bert_tiny:width=96,heads=4,vocabulary=40", 3, "cross_entropy")


def text(count: int, seed: int = 0) -> Tensor:
    """Sequences that share words and, the last one, end early."""
    ids = torch.randint(3, 40, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    ids[:, 0], ids[1:, 3] = 2, ids[0, 2]
    ids[-1, LENGTH - 2 :] = 0
    return ids


def observed(
    which: tuple[str, int, str], ids: Tensor, frozen: str = "no", warm: bool = False
) -> tuple[Observation, Tensor]:
    """Return the update of a model built here on ids, and its labels; ``frozen``: parameters that begin so are."""
    spec, classes, loss = which
    model = build(spec, (LENGTH,), classes, seed=1)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and not name.startswith(frozen))
        if warm and name.endswith("lora_b"):
            nn.init.normal_(p, std=0.1, generator=rng())
    return observed_of(model, ids, classes, loss)


def observed_of(model: nn.Module, ids: Tensor, classes: int, loss: str) -> tuple[Observation, Tensor]:
    """Return the update of a model on ids (N, L + 1), and its labels."""
    minimised, inputs = build_loss(loss), ids[:, :-1]
    labels = ids[:, 1:] * (inputs != 0) if loss == "next_token" else torch.arange(len(ids)) % 3
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradient = torch.autograd.grad(minimised(model(inputs), labels), list(named.values()), allow_unused=True)
    sent = {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), gradient, strict=True)}
    return Observation(model, Update(sent, len(ids)), tuple(inputs.shape[1:]), classes, loss=minimised), labels


def rows(ids: Tensor) -> set[tuple[int, ...]]:
    """Return sequences in no order."""
    return {tuple(one) for one in ids.long().tolist()}


def rng() -> torch.Generator:
    """Return a fresh generator."""
    return torch.Generator().manual_seed(0)
