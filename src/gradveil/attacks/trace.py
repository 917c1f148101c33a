"""Watch one forward pass: which linear and convolutional layers run, in which order, and which gives the logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.layers import linear_layers


@dataclass(frozen=True)
class Visit:
    """One layer that ran, and the shapes it saw for one example."""

    path: str
    layer: nn.Module
    input_shape: tuple[int, ...]  # of one example
    output_shape: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """The layers in the order they ran; a layer that ran twice is named twice."""

    visits: tuple[Visit, ...]
    output: str | None  # path of the layer whose output is the model's output, untouched

    def paths(self) -> tuple[str, ...]:
        """Return the paths in running order."""
        return tuple(visit.path for visit in self.visits)

    def dense(self) -> tuple[Visit, ...]:
        """Return the fully connected layers that ran once, in running order."""
        return tuple(v for v in self.visits if isinstance(v.layer, nn.Linear) and self.paths().count(v.path) == 1)


def trace(model: nn.Module, input_shape: tuple[int, ...]) -> Trace:
    """Run the model on one blank input, leaving it and the random state as they were, and say what ran."""
    visits: list[Visit] = []
    outputs: list[Tensor] = []

    def note(path: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        visits.append(Visit(path, layer, tuple(args[0].shape[1:]), tuple(output.shape[1:])))
        outputs.append(output)

    def hook(path: str) -> Any:
        return lambda layer, args, output: note(path, layer, args, output)

    layers = linear_layers(model)
    handles = [layer.register_forward_hook(hook(path)) for path, layer in layers.items()]
    modes = {module: module.training for module in model.modules()}
    first = next(model.parameters())
    try:
        model.eval()
        with torch.no_grad():
            result = model(torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    same = outputs and isinstance(result, Tensor) and result is outputs[-1]
    return Trace(tuple(visits), visits[-1].path if same else None)
