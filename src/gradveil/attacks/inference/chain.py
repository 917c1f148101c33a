"""The layers that representations are inferred at: found by watching the model run, not by index."""

from dataclasses import dataclass

import torch
from torch import nn

from gradveil.errors import LayerError
from gradveil.layers.modules import Visit, trace
from gradveil.tree import Params


@dataclass(frozen=True)
class LayerChain:
    """Convolutions, then fully connected layers up to the logits, each one's input shaped by the one before."""

    convolutions: tuple[Visit, ...]  # in running order; the last one feeds the first fully connected layer
    dense: tuple[Visit, ...]  # in running order; the last one gives the logits

    @property
    def layers(self) -> tuple[Visit, ...]:
        """All layers in running order."""
        return (*self.convolutions, *self.dense)


def chain_of(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> LayerChain:
    """Return the chain of layers that ends in the logits.

    A fully connected layer belongs to it when as many numbers leave it as enter the next one, so that only an
    activation can lie between; convolutions belong to it as long as channels fit, poolings or not.
    """
    visits = trace(model, input_shape).visits
    single = [v for v in visits if [w.path for w in visits].count(v.path) == 1]
    if not single or not isinstance(single[-1].layer, nn.Linear) or single[-1].output_shape != (num_classes,):
        found = ", ".join(f"{v.path} {v.output_shape}" for v in visits) or "none"
        raise LayerError(
            f"{type(model).__name__} does not end in a fully connected layer with {num_classes} outputs, so its rows "
            f"are not classes. Layers that ran: {found}."
        )
    dense, convolutions = [single.pop()], list[Visit]()
    while single and isinstance(single[-1].layer, nn.Linear) and single[-1].output_shape == dense[0].input_shape:
        dense.insert(0, single.pop())
    after = dense[0].input_shape
    while single and isinstance(single[-1].layer, nn.Conv2d) and _feeds(single[-1], after):
        convolutions.insert(0, single.pop())
        after = convolutions[0].input_shape
    return LayerChain(tuple(convolutions), tuple(dense))


def seen_part(chain: LayerChain, gradient: Params) -> LayerChain:
    """Return the end of the chain whose weight gradients are all there."""
    last = chain.dense[-1].path
    if f"{last}.weight" not in gradient:
        raise LayerError(
            f"The update has no gradient of {last}.weight, the last layer, which names the classes. "
            f"It has: {', '.join(gradient)}."
        )
    kept = [v for v in chain.layers]
    missing = [i for i, v in enumerate(kept) if f"{v.path}.weight" not in gradient]
    kept = kept[missing[-1] + 1 :] if missing else kept
    return LayerChain(
        tuple(v for v in kept if isinstance(v.layer, nn.Conv2d)),
        tuple(v for v in kept if isinstance(v.layer, nn.Linear)),
    )


def _feeds(convolution: Visit, after: tuple[int, ...]) -> bool:
    """Return whether the layer's channels are those of what comes after it, or were flattened into it."""
    channels = convolution.output_shape[0]
    plain = isinstance(convolution.layer, nn.Conv2d) and convolution.layer.groups == 1
    return plain and (after[0] == channels if len(after) > 1 else torch.Size(after).numel() % channels == 0)
