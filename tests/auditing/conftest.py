"""A small audit that is real and fast: logistic regression, whose input an undefended update gives away exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from gradveil.attacks.base import Attack
from gradveil.auditing.audit import Audit, audit
from gradveil.threats.setup import AuditConfig
from gradveil.types import Observation, Reconstruction

SMALL = AuditConfig(
    model="logistic", defenses=("pruning:share=0.98",), rounds=2, clients=2, epochs=1, batch_size=32, images=4
)


@dataclass(frozen=True)
class Divide(Attack):
    """Read the input of the last linear layer off its gradient: dW_c / db_c for the class with the largest db."""

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return [self._one(s) for s in seen]

    def _one(self, s: Observation) -> Reconstruction:
        weight = next(g for n, g in s.update.gradient.items() if n.endswith("weight"))
        bias = next(g for n, g in s.update.gradient.items() if n.endswith("bias"))
        c = int(bias.abs().argmax())
        x = (weight[c] / bias[c]).reshape(1, *s.input_shape).clamp(0, 1)
        return Reconstruction(x, bias.argmin()[None], 0.0, True, {"row": float(c)})


@dataclass(frozen=True)
class Guess(Attack):
    """Answer noise: an attack that never works."""

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return [
            Reconstruction(torch.rand(s.num_examples, *s.input_shape, generator=r), None, 1.0, False)
            for s, r in zip(seen, rngs, strict=True)
        ]


@pytest.fixture
def small() -> AuditConfig:
    return SMALL


@pytest.fixture
def divide() -> Attack:
    return Divide()


@pytest.fixture
def guess() -> Attack:
    return Guess()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: Any) -> Audit:
    folder: Path = tmp_path_factory.mktemp("audit") / "run"
    return audit(config=SMALL, attacks=[Divide(), Guess()], out=folder)
