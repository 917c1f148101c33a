"""A client's check of the weights that a server sent: were they planted to give the client's examples away?

Three kinds of evidence, each only where there is something to compare: the weights by themselves, beside those of the
round before or the model that the client expects, and what they do to the client's own examples. Thresholds are far
from what honest training makes of weights; a server that knows them can hide from them.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.auditing.update_files import read_tensors
from gradveil.errors import LayerError, SpecError
from gradveil.gradients.functional import quiet
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.models import build_working
from gradveil.modules import find_layer
from gradveil.tree import Params
from gradveil.types import Batch

PARALLEL = 0.999  # cosine of two rows that measure the same
MANY = 4  # rows of a kind that are no accident
FAN_IN = 8  # numbers of a row, below which rows are alike by accident
ROWS = 2048  # of a layer that are compared
MIRRORED = 0.01  # relative spread of the quotients of a row's positive and negative weights, by size
SMALL = 0.01  # of the largest row: all others of a last layer that fishes
BIAS = 15.0  # logits by which a class is held for impossible, or certain
LEFT = 0.2  # of a layer's weights before, in those after: training adds to weights, and hardly takes what was there
GROWN = 30.0  # times the norm


@dataclass(frozen=True)
class Finding:
    """One thing that honest training does not make."""

    kind: str  # architecture, values, parallel rows, trap weights, last layer, jump, silent errors
    where: str  # the tensor or layer
    text: str  # one plain sentence


def bad_values(weights: Params) -> Iterator[Finding]:
    """Numbers that are none."""
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            yield Finding("values", name, f"{name} holds NaN or infinite values.")


def other_names(weights: Params, expected: Params, what: str) -> Iterator[Finding]:
    """Compare names and shapes."""
    for name in sorted(weights.keys() - expected.keys()):
        yield Finding("architecture", name, f"{name} is new: there is no such tensor in {what}.")
    for name in sorted(expected.keys() - weights.keys()):
        yield Finding("architecture", name, f"{name} is missing: it is there in {what}.")
    for name in weights.keys() & expected.keys():
        if weights[name].shape != expected[name].shape:
            shapes = f"{tuple(weights[name].shape)} and {tuple(expected[name].shape)} in {what}"
            yield Finding("architecture", name, f"{name} is {shapes}.")


def _matrices(weights: Params) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield every weight as rows (O, fan-in), with its bias where that has a number for each row."""
    for name, value in weights.items():
        if name.endswith("weight") and value.ndim >= 2 and value.is_floating_point():
            bias = weights.get(name.removesuffix("weight") + "bias")
            fits = bias is not None and bias.shape == value.shape[:1] and bias.is_floating_point()
            yield (
                name,
                value.detach().double().flatten(1),
                bias.detach().double() if bias is not None and fits else None,
            )


def patterned_rows(weights: Params) -> Iterator[Finding]:
    """Layers whose rows are made after a pattern: an imprint's, or trap weights."""
    for name, rows, bias in _matrices(weights):
        if rows.shape[1] < FAN_IN or len(rows) < MANY or not bool(torch.isfinite(rows).all()):
            continue
        if bias is not None and (count := _ladder_rows(rows, bias)) >= MANY:
            what = f"{count} of the {len(rows)} rows of {name} measure the same with different thresholds"
            yield Finding("parallel rows", name, f"{what}, as an imprint layer does that sorts examples into bins.")
        if (count := int(_mirrored(rows).sum())) >= max(MANY, len(rows) // 4):
            what = f"{count} of the {len(rows)} rows of {name} have the same weights with both signs"
            yield Finding("trap weights", name, f"{what}, as trap weights do that few examples activate.")


def _ladder_rows(rows: Tensor, bias: Tensor) -> int:
    """Return how many rows point the same way, each with a threshold of its own."""
    step = -(-len(rows) // ROWS)
    sizes = rows[::step].norm(dim=1)
    kept = sizes > 1e-6 * sizes.max().clamp_min(1e-30)
    unit, level = rows[::step][kept] / sizes[kept, None], bias[::step][kept] / sizes[kept]
    alike = unit @ unit.T > PARALLEL
    if not len(alike):
        return 0
    group = alike[alike.sum(1).argmax()]
    levels = level[group].sort().values
    spread = levels[-1] - levels[0]
    return int((levels.diff() > 1e-6 * spread.clamp_min(1e-12)).sum()) + 1 if float(spread) > 1e-4 else 1


def _mirrored(rows: Tensor) -> Tensor:
    """Return for each row (O,) whether its positive weights are its negative ones, up to one factor."""
    half = rows.shape[1] // 2
    ordered = rows.sort(1).values
    negative, positive = -ordered[:, :half], ordered[:, -half:].flip(1)
    upper = max(half // 2, 1)  # the larger ones, which rounding and one step of training change least
    quotient = positive[:, :upper] / negative[:, :upper].clamp_min(1e-30)
    whole = (negative[:, :upper] > 0).all(1) & (positive[:, :upper] > 0).all(1)
    balanced = ((rows > 0).sum(1) - (rows < 0).sum(1)).abs() <= 1
    return whole & balanced & (quotient.std(1) < MIRRORED * quotient.mean(1).abs())


def one_class(weights: Params) -> Iterator[Finding]:
    """The last fully connected layer: does one class alone send anything back, or is one impossible?"""
    dense = [(n, rows, bias) for n, rows, bias in _matrices(weights) if weights[n].ndim == 2]
    if not dense or len(dense[-1][1]) < 3:
        return
    name, rows, bias = dense[-1]
    sizes = rows.norm(dim=1)
    if float(sizes.max()) > 0 and float(sizes.median()) < SMALL * float(sizes.max()):
        what = f"Row {int(sizes.argmax())} of {name} is more than {1 / SMALL:.0f} times as large as most others"
        yield Finding("last layer", name, f"{what}: the gradient of a batch would be that of one class alone.")
    if bias is not None and bool(torch.isfinite(bias).all()):
        off = (bias - bias.median()).abs()
        if float(off.max()) > BIAS:
            what = f"Class {int(off.argmax())} has a bias {float(off.max()):.0f} logits from the others in {name}"
            yield Finding("last layer", name, f"{what}: it is held for impossible, or certain, whatever the example.")


def replaced(before: Params, after: Params) -> Iterator[Finding]:
    """Weights that were replaced, not trained."""
    was = {name: rows for name, rows, _ in _matrices(before)}
    for name, rows, _ in _matrices(after):
        old = was.get(name)
        if old is None or old.shape != rows.shape or rows.numel() < FAN_IN**2 or not float(old.norm()):
            continue
        left, growth = float((old * rows).sum() / old.square().sum()), float(rows.norm() / old.norm())
        if left < LEFT or growth > GROWN:
            what = (
                f"Of the weights before, {max(left, 0):.0%} are left in {name}, whose norm is {growth:.2g} times theirs"
            )
            yield Finding("jump", name, f"{what}: it was replaced, not trained.")


SILENT = 1e-4  # of what an error could send back through the last layer
EXAMPLES = 32  # of the client's own that are looked at


@dataclass(frozen=True)
class IncomingCheck:
    """What a client's check of weights found."""

    findings: tuple[Finding, ...]
    compared: tuple[str, ...]  # what the weights were held against

    @property
    def suspicious(self) -> bool:
        """Whether anything was found."""
        return bool(self.findings)


def check_model(
    before: str | Path | Params,
    after: str | Path | Params | None = None,
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int = 10,
    batch: Batch | None = None,
    loss: Loss = CROSS_ENTROPY,
) -> IncomingCheck:
    """Check weights that a server sent: ``before``, or ``after`` beside those that came before.

    Args:
        before: a safetensors file or a state dict; without ``after`` it is what is checked.
        after: the weights of the next round, which are then checked.
        model: the architecture that the client expects: a spec, a module or a function that makes one.
        input_shape: of one example, where the model is made here.
        num_classes: likewise.
        batch: examples of the client's own, for what the weights do to them; needs ``model``.
        loss: that the client minimises.
    """
    first = _read(before)
    weights, previous = (first, None) if after is None else (_read(after), first)
    findings = list(bad_values(weights))
    compared = ["themselves"]
    if previous is not None:
        compared.append("the weights before")
        findings += other_names(weights, previous, "the weights before")
        findings += replaced(previous, weights)
    honest = _expected(model, input_shape, num_classes, batch)
    if honest is not None:
        compared.append("the model that is expected")
        findings += other_names(weights, dict(honest.state_dict()), "the model that is expected")
    findings += patterned_rows(weights)
    findings += one_class(weights)
    if honest is not None and batch is not None and not any(f.kind in ("architecture", "values") for f in findings):
        compared.append("what they do to own examples")
        honest.load_state_dict(weights)
        few = batch[:EXAMPLES].to(next(honest.parameters()).device)
        findings += _silent(honest, few, loss)
    return IncomingCheck(tuple(findings), tuple(compared))


def _read(weights: str | Path | Params) -> Params:
    return weights if isinstance(weights, dict) else read_tensors(weights)[0]


def _expected(
    model: str | nn.Module | Callable[..., nn.Module] | None,
    input_shape: tuple[int, ...] | None,
    num_classes: int,
    batch: Batch | None,
) -> nn.Module | None:
    if model is None:
        if batch is not None:
            raise SpecError("To see what weights do to examples, their model is needed. Give the model as well.")
        return None
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    shape = input_shape or (None if batch is None else tuple(batch.inputs.shape[1:]))
    if shape is None:
        raise SpecError("A model is made for inputs of a shape. Give the input shape, e.g. 1x28x28, or examples.")
    return build_working(model, shape, num_classes)


def _silent(model: nn.Module, batch: Batch, loss: Loss) -> Iterator[Finding]:
    """Errors of the prediction that send nothing back through the last layer, as where an example is fished."""
    try:
        path = find_layer(model)
    except LayerError:
        return
    layer = model.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        return
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if args and args[0].ndim == 2:
            kept.append((args[0], output))

    handle = layer.register_forward_hook(keep)
    try:
        with quiet(model), torch.enable_grad():
            output = model(batch.inputs.to(next(model.parameters())))
            value = loss.of(batch.labels)(output, batch.labels)
    finally:
        handle.remove()
    if not kept or not kept[-1][0].requires_grad:
        return
    r, logits = kept[-1]
    to_r, to_logits = torch.autograd.grad(value, (r, logits), allow_unused=True)
    if to_r is None or to_logits is None:
        return
    error = to_logits.norm(dim=1)
    wrong = error > 0.1 * error.max().clamp_min(1e-30)
    could = error * layer.weight.detach().norm()
    silent = wrong & (to_r.norm(dim=1) < SILENT * could) & (could > 0)
    if float(error.max()) * len(r) > 0.1 and int(silent.sum()) * 2 >= int(wrong.sum()) and bool(silent.any()):
        what = f"{int(silent.sum())} of {len(r)} examples are predicted wrongly and send nothing back through {path}"
        yield Finding("silent errors", path, f"{what}: what is sent is of the others alone.")
