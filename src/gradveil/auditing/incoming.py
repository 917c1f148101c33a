"""A client's check of the weights that a server sent: were they planted to give the client's examples away?

Three kinds of evidence, each only where there is something to compare: the weights by themselves, beside those of the
round before or the model that the client expects, and what they do to the client's own examples. Thresholds are far
from what honest training makes of weights; a server that knows them can hide from them.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil import pace
from gradveil.auditing.planted_weights import (
    Finding,
    bad_values,
    one_class,
    other_names,
    patterned_rows,
    replaced,
)
from gradveil.auditing.update_files import read_tensors
from gradveil.errors import LayerError, SpecError
from gradveil.gradients.functional import quiet
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.models import build_working
from gradveil.modules import find_layer
from gradveil.tree import Params
from gradveil.types import Batch

SILENT = 1e-4  # of what an error could send back through the last layer
EXAMPLES = 32  # of the client's own that are looked at


@dataclass(frozen=True)
class IncomingCheck:
    """What a client's check of weights found."""

    findings: tuple[Finding, ...]
    compared: tuple[str, ...]  # what the weights were held against
    figures: dict[str, float] = field(default_factory=dict)  # of the client's own examples; they alarm nobody

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
    figures: dict[str, float] = {}
    if honest is not None and batch is not None and not any(f.kind in ("architecture", "values") for f in findings):
        compared.append("what they do to own examples")
        honest.load_state_dict(weights)
        few = batch[:EXAMPLES].to(next(honest.parameters()).device)
        more, figures = _behaviour(honest, few, loss)
        findings += more
    return IncomingCheck(tuple(findings), tuple(compared), figures)


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


@contextmanager
def _caught(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Within, keep what each fully connected layer of one vector an example gets and gives."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(path: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if args and args[0].ndim == 2:
                kept[path] = (args[0], output)

        return keep

    handles = [m.register_forward_hook(hook(p)) for p, m in model.named_modules() if isinstance(m, nn.Linear)]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _behaviour(model: nn.Module, batch: Batch, loss: Loss) -> tuple[list[Finding], dict[str, float]]:
    """Return what the weights do to examples: findings, and figures that are no alarm."""
    with quiet(model), _caught(model) as kept, torch.enable_grad():
        output = model(batch.inputs.to(next(model.parameters())))
        value = loss.of(batch.labels)(output, batch.labels)
    findings = list(_silent(model, kept, value))
    figures: dict[str, float] = {}
    for path, (_, given) in kept.items():
        if given is not output:
            fires = given.detach() > 0  # (N, O)
            alone = fires[:, fires.sum(0) == 1].any(1)
            figures[f"examples that some unit of {path} sees alone"] = float(alone.float().mean())
    figures |= _dominance(model, batch, loss)
    return findings, figures


def _silent(model: nn.Module, kept: dict[str, tuple[Tensor, Tensor]], value: Tensor) -> Iterator[Finding]:
    """Errors of the prediction that send nothing back through the last layer, as where an example is fished."""
    try:
        path = find_layer(model)
    except LayerError:
        return
    if path not in kept or not kept[path][0].requires_grad:
        return
    r, logits = kept[path]
    to_r, to_logits = torch.autograd.grad(value, (r, logits), retain_graph=True, allow_unused=True)
    layer = model.get_submodule(path)
    if to_r is None or to_logits is None or not isinstance(layer, nn.Linear):
        return
    error = to_logits.norm(dim=1)
    wrong = error > 0.1 * error.max().clamp_min(1e-30)
    could = error * layer.weight.detach().norm()
    silent = wrong & (to_r.norm(dim=1) < SILENT * could) & (could > 0)
    if float(error.max()) * len(r) > 0.1 and int(silent.sum()) * 2 >= int(wrong.sum()) and bool(silent.any()):
        what = f"{int(silent.sum())} of {len(r)} examples are predicted wrongly and send nothing back through {path}"
        yield Finding("silent errors", path, f"{what}: what is sent is of the others alone.")


def _dominance(model: nn.Module, batch: Batch, loss: Loss) -> dict[str, float]:
    """Return the largest example's share in the sum of the examples' gradient norms, of all but the last layer."""
    try:
        last = set(model.get_submodule(find_layer(model)).parameters())
    except LayerError:
        last = set()
    weights = [p for p in model.parameters() if p.requires_grad and p not in last]
    if not weights:
        return {}
    measured = loss.of(batch.labels)
    sizes = torch.zeros(len(batch))
    with quiet(model), torch.enable_grad():
        output = model(batch.inputs.to(weights[0]))
        for i in range(len(batch)):
            pace.step(i, len(batch))
            own = measured(output[i : i + 1], batch.labels[i : i + 1])
            parts = torch.autograd.grad(own, weights, retain_graph=True, allow_unused=True)
            sizes[i] = sum(float(g.square().sum()) for g in parts if g is not None) ** 0.5
    return {"largest share of one example in the gradient": float(sizes.max() / sizes.sum().clamp_min(1e-30))}
