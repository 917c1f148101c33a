"""What an update gives away without a search: the classes on a device, and each class's mean representation.

Sun et al. 2020, algorithms 3 and 4. Which rows of the last layer's gradient belong to classes on the device is said by
one of four rules, none of which knows how many there are; the layers are found by watching the model run, not by index.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil import pace
from gradveil.errors import AttackError, LayerError
from gradveil.modules import Visit, trace
from gradveil.tree import Params, named
from gradveil.types import Update, check_update

Rule = Literal["gap", "mean", "bias_sign", "row_sum"]
Presence = tuple[Tensor, Tensor]  # present (D, K) bool, confidence (D, K) in [0, 1]


def gap(rows: Tensor, bias: Tensor | None) -> Presence:
    """Sort the row norms and cut at the largest gap (Sun et al. 2020, algorithm 3, read literally)."""
    norms = rows.norm(dim=2)  # (D, K)
    ordered = norms.sort(dim=1, descending=True).values
    at = (ordered[:, :-1] - ordered[:, 1:]).argmax(1, keepdim=True)
    threshold = (ordered.gather(1, at) + ordered.gather(1, at + 1)) / 2
    return _above(norms, threshold)


def mean(rows: Tensor, bias: Tensor | None) -> Presence:
    """Take the rows whose norm is above the mean norm."""
    norms = rows.norm(dim=2)
    return _above(norms, norms.mean(1, keepdim=True))


def row_sum(rows: Tensor, bias: Tensor | None) -> Presence:
    """Take the rows with a negative sum: only a class on the device has p - 1 in it. For representations above zero."""
    return _above(-rows.sum(2), rows.new_zeros(len(rows), 1))


def bias_sign(rows: Tensor, bias: Tensor | None) -> Presence:
    """Take the classes with a negative bias gradient, mean (p - y); without a bias, by the rows' sums."""
    return row_sum(rows, None) if bias is None else _above(-bias, bias.new_zeros(len(bias), 1))


RULES: dict[Rule, Callable[[Tensor, Tensor | None], Presence]] = {
    "gap": gap,
    "mean": mean,
    "bias_sign": bias_sign,
    "row_sum": row_sum,
}


def _above(score: Tensor, threshold: Tensor) -> Presence:
    """Return what is above the threshold, and each distance from it as a share of the largest on its side."""
    distance = score - threshold
    tiny = torch.finfo(score.dtype).tiny
    up = distance.clamp_min(0) / distance.amax(1, keepdim=True).clamp_min(tiny)
    down = (-distance).clamp_min(0) / (-distance).amax(1, keepdim=True).clamp_min(tiny)
    return distance > 0, up + down


@dataclass(frozen=True)
class LayerChain:
    """Convolutions, then fully connected layers up to the logits, each one's input shaped by the one before."""

    convolutions: tuple[Visit, ...]  # in running order; the last one feeds the first fully connected layer
    dense: tuple[Visit, ...]  # in running order; the last one gives the logits

    @property
    def layers(self) -> tuple[Visit, ...]:
        return (*self.convolutions, *self.dense)


def chain_of(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> LayerChain:
    """Return the chain of layers that ends in the logits.

    A fully connected layer belongs to it when as many numbers leave it as enter the next one, so that only an
    activation can lie between; convolutions belong to it as long as channels fit, poolings or not.
    """
    visits = trace(model, input_shape).visits
    single = [v for v in visits if [w.path for w in visits].count(v.path) == 1]
    if not single or not isinstance(single[-1].layer, nn.Linear) or single[-1].output_shape != (num_classes,):
        ran = ", ".join(f"{v.path} {v.output_shape}" for v in visits) or "none"
        raise LayerError(
            f"{type(model).__name__} does not end in a fully connected layer with {num_classes} outputs, so its rows "
            f"are not classes. Layers that ran: {ran}."
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
    if named(last, "weight") not in gradient:
        raise LayerError(
            f"The update has no gradient of {last}.weight, the last layer, which names the classes. "
            f"It has: {', '.join(gradient)}."
        )
    missing = [i for i, v in enumerate(chain.layers) if named(v.path, "weight") not in gradient]
    kept = chain.layers[missing[-1] + 1 :] if missing else chain.layers
    return LayerChain(
        tuple(v for v in kept if isinstance(v.layer, nn.Conv2d)),
        tuple(v for v in kept if isinstance(v.layer, nn.Linear)),
    )


def _feeds(convolution: Visit, after: tuple[int, ...]) -> bool:
    """Return whether the layer's channels are those of what comes after it, or were flattened into it."""
    channels = convolution.output_shape[0]
    plain = isinstance(convolution.layer, nn.Conv2d) and convolution.layer.groups == 1
    return plain and (after[0] == channels if len(after) > 1 else torch.Size(after).numel() % channels == 0)


@dataclass(frozen=True)
class Inferred:
    """What D updates give away; vectors are up to a positive scale, for every class, on the device or not."""

    present: Tensor  # (D, K) bool: the inferred class sets
    confidence: Tensor  # (D, K) in [0, 1]: how far the class is from the rule's threshold, either way
    vectors: dict[str, Tensor]  # layer -> (D, K, L), last layer first; a convolution's L is one mean input patch
    scales: dict[str, Tensor]  # layer -> (D, K), the same rows of the bias gradient: vectors / scales is the
    # representation itself, exactly for one example in one step; only layers whose bias is seen

    def classes(self, device: int) -> list[int]:
        return [int(c) for c in self.present[device].nonzero()]


@dataclass(frozen=True)
class InferenceSettings:
    """How to infer."""

    rule: Rule = "bias_sign"  # gap, mean, bias_sign or row_sum
    m: float = 0.5  # rows that are summed per class: a share of them up to 1, a count above
    align: Literal["auto", "bias", "sum", "none"] = "auto"  # auto: by the bias gradient where it is seen
    convolutions: bool = True  # go on through the convolutions

    def __post_init__(self) -> None:
        if not self.m > 0:
            raise AttackError(f"m={self.m}: give a share of the rows (up to 1) or a count (above 1).")
        if self.rule not in RULES:
            raise AttackError(f"No class rule is called {self.rule!r}. Known: {', '.join(RULES)}.")


def infer(
    model: nn.Module,
    updates: Update | Sequence[Update],
    input_shape: tuple[int, ...],
    num_classes: int,
    settings: InferenceSettings | None = None,
) -> Inferred:
    """Infer class sets and class-wise representations from one or many updates of the same model."""
    sent = [updates] if isinstance(updates, Update) else list(updates)
    if not sent:
        raise AttackError("There is no update to infer from.")
    for update in sent:
        check_update(update, model)
    chain = seen_part(chain_of(model, input_shape, num_classes), sent[0].gradient)
    return infer_stacked(chain, {n: torch.stack([u.gradient[n] for u in sent]) for n in _names(chain, sent)}, settings)


def infer_stacked(chain: LayerChain, gradients: Params, settings: InferenceSettings | None = None) -> Inferred:
    """Infer from gradients that are stacked already, name -> (D, ...); ``chain`` is found once per model."""
    chosen = settings or InferenceSettings()
    last = chain.dense[-1]
    rows = gradients[named(last.path, "weight")]  # (D, K, L)
    present, confidence = RULES[chosen.rule](rows, gradients.get(named(last.path, "bias")))
    inferred = Inferred(present, confidence, {last.path: -rows}, {})
    if named(last.path, "bias") in gradients:
        inferred.scales[last.path] = -gradients[named(last.path, "bias")]
    layers = chain.layers if chosen.convolutions else chain.dense
    for done, layer in enumerate(reversed(layers)):
        pace.step(done, len(layers))
        if layer is not last:
            size = next(reversed(inferred.vectors.values())).abs()  # (D, K, what leaves this layer)
            channels = gradients[named(layer.path, "weight")].shape[1]
            _sum_rows(inferred, layer, gradients, size.unflatten(2, (channels, -1)).sum(3), chosen)
    return inferred


def _sum_rows(inferred: Inferred, layer: Visit, gradients: Params, size: Tensor, settings: InferenceSettings) -> None:
    """Add, per device and class, the aligned sum of the M rows that ``size`` (D, K, rows) is largest at."""
    rows, bias = (
        gradients[named(layer.path, "weight")].flatten(2),
        gradients.get(named(layer.path, "bias")),
    )  # (D, rows, L)
    count = settings.m * rows.shape[1] if settings.m <= 1 else settings.m
    chosen = size.topk(min(max(round(count), 1), rows.shape[1]), dim=2).indices
    picked = torch.zeros_like(size).scatter_(2, chosen, 1.0) * _signs(rows, bias, settings.align)[:, None]
    inferred.vectors[layer.path] = picked @ rows
    if bias is not None:
        inferred.scales[layer.path] = (picked @ bias[..., None])[..., 0]


def _signs(rows: Tensor, bias: Tensor | None, align: str) -> Tensor:
    """Return the sign (D, rows) that turns each row's mean δ positive."""
    if align == "none":
        return rows.new_ones(rows.shape[:2])
    if align == "bias" and bias is None:
        raise AttackError("align=bias needs the layer's bias gradient, and the update has none. Use align=sum.")
    return (rows.sum(2) if bias is None or align == "sum" else bias).sign()


def _names(chain: LayerChain, sent: Sequence[Update]) -> list[str]:
    names = [named(v.path, "weight") for v in chain.layers]
    for name in names:
        if any(name not in update.gradient for update in sent):
            raise AttackError(f"Some of the updates have no gradient of {name}. Infer from each kind separately.")
    biases = [named(v.path, "bias") for v in chain.layers]
    return names + [name for name in biases if all(name in update.gradient for update in sent)]
