"""Models that return more than logits: the one tensor that is meant, where that is clear."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradveil.errors import ModelError

MEANT = ("logits", "out", "output", "prediction")  # names that say it


@dataclass(frozen=True)
class TakesOne:
    """A forward hook that returns one part of what a model returns."""

    part: Any  # key or position

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return it."""
        return output[self.part]


def take_one(model: nn.Module, name: str, output: Any) -> bool:
    """Let a model return the tensor of its output (a dict or tuple) that is meant; return whether that was needed."""
    if isinstance(output, Tensor) or not isinstance(output, Mapping | tuple | list):
        return False
    pairs = list(output.items() if isinstance(output, Mapping) else enumerate(output))
    tensors = {key: value for key, value in pairs if isinstance(value, Tensor) and value.is_floating_point()}
    part = next((key for key in MEANT if key in tensors), next(iter(tensors), None) if len(tensors) == 1 else None)
    if part is None:
        held = ", ".join(f"{key!r}: {tuple(value.shape)}" for key, value in tensors.items()) or "no tensor of numbers"
        raise ModelError(
            f"The model {name} returns a {type(output).__name__} with {held}. Return the logits alone: wrap it in a "
            f"module whose forward is, say, return self.model(x)[{next(iter(tensors), 'logits')!r}]."
        )
    model.register_forward_hook(TakesOne(part))
    return True
