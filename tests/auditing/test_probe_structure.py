"""What the structure of noise is probed for, on draws made by hand."""

from types import SimpleNamespace

import torch

from gradveil.threats.probing.function import Tried
from gradveil.threats.probing.structure import _still_sums


def test_a_tensor_whose_gradient_is_zero_has_no_direction_without_noise() -> None:
    """The first step of low-rank factors: those next to the input have none, and noise like the others."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 16, generator=rng)
    gradient = torch.cat([torch.zeros(8), torch.randn(8, generator=rng)])
    parts = {"lora_a": slice(0, 8), "lora_b": slice(8, 16)}
    function = SimpleNamespace(parts=parts, tree=lambda x: {name: x[part].view(2, 4) for name, part in parts.items()})
    tried = Tried(function, (), [gradient])  # type: ignore[arg-type]
    assert _still_sums(tried, noise, noise) is None
    noise[:, 8:] -= torch.outer(noise[:, 8:] @ gradient[8:], gradient[8:]) / gradient[8:].square().sum()
    flaw = _still_sums(tried, noise, noise)
    assert flaw is not None
    assert "lora_b along the gradient" in str(flaw)
