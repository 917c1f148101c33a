"""Named random generators from one seed, so that adding a random act never shifts another."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Seeds:
    """Generators by name: ``Seeds(0)("partition")``, ``Seeds(0)("client", 3, 17)``."""

    seed: int = 0

    def number(self, *names: str | int) -> int:
        """Return the 63-bit seed that belongs to these names."""
        text = "/".join([str(self.seed), *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def __call__(self, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh torch generator for these names."""
        return torch.Generator(device).manual_seed(self.number(*names))

    def numpy(self, *names: str | int) -> np.random.Generator:
        """Return a fresh NumPy generator for these names."""
        return np.random.default_rng(self.number(*names))
