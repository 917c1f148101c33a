"""``gradveil infer``: read the classes and their representations off saved updates."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradveil.cli import shared
from gradveil.errors import AttackError

if TYPE_CHECKING:
    from gradveil.attacks.inference import Inferred
    from gradveil.auditing.saved_update import SavedUpdate


def command(
    update: list[str] = typer.Option(..., help="A safetensors file; repeat it for several clients of one model."),
    model: shared.Model = "lenet",
    rule: str = typer.Option("bias_sign", help="Which rows are classes: gap, mean, bias_sign or row_sum."),
    m: float = typer.Option(0.5, help="Rows summed per class: a share of them up to 1, a count above."),
    convolutions: bool = typer.Option(True, help="Go on through the convolutions, to mean input patches."),
    weights: shared.Weights = None,
    before: shared.Before = None,
    kind: shared.Kind = None,
    lr: shared.LearningRate = None,
    dataset: str = typer.Option(None, help="Data of the same kind: gives the shape and the number of classes."),
    data: shared.Data = None,
    input_shape: shared.InputShape = None,
    classes: shared.Classes = 10,
    loss: shared.LossOfFile = None,
    truth: str = typer.Option(
        None, help="Safetensors with inputs and labels of the (first) client: adds the controls."
    ),
    device: shared.Device = "cpu",
    out: Path = typer.Option(None, help="Safetensors file for the inferred vectors."),
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Infer which classes clients trained on, and a representation per class and layer."""
    from gradveil.attacks.inference import InferenceSettings, infer
    from gradveil.auditing.saved_update import UpdateAuditConfig, build_case
    from gradveil.auditing.update_files import read_tensors, read_update

    settings = InferenceSettings(rule=rule, m=m, convolutions=convolutions)  # type: ignore[arg-type]
    case = build_case(
        UpdateAuditConfig(
            update=update[0], model=model, weights=weights, before=before, kind=kind, lr=lr, dataset=dataset,
            data=data, truth=truth, input_shape=shared.read_shape(input_shape), num_classes=classes,
            loss=loss, device=device,
        )
    )  # fmt: skip
    sent_before = None if before is None else read_tensors(before)[0]
    others = [read_update(path, case.model, case.config.facts, sent_before).to(case.device) for path in update[1:]]
    if case.loss.targets != "classes":
        raise AttackError(f"The loss {case.spec} is not one of classes, so there are none to infer.")
    seen = case.observation(case.update)
    with shared.working(json or quiet, "layer"):
        found = infer(case.model, [case.update, *others], case.input_shape, seen.num_classes, settings)
    said = [_said(found, device, path) for device, path in enumerate(update)]
    if case.truth is not None:
        said[0]["controls"] = _controls(found, case, seen.num_classes)
    if out is not None:
        _write(out, found)
    if json:
        shared.print_json({"rule": rule, "m": m, "updates": said})
    else:
        _show(said)


def _said(found: "Inferred", device: int, path: str) -> dict[str, Any]:
    return {
        "update": path,
        "classes": found.classes(device),
        "confidence": {str(c): round(float(found.confidence[device, c]), 4) for c in found.classes(device)},
        "layers": {layer: vectors.shape[2] for layer, vectors in found.vectors.items()},
    }


def _controls(found: "Inferred", case: "SavedUpdate", num_classes: int) -> dict[str, Any]:
    """Return what the truth says of the first update: the class set, and per layer the correlations."""
    from gradveil.metrics.representations import class_means, representation_scores

    assert case.truth is not None
    truth = case.truth.to(case.device)
    labels = truth.labels
    means = class_means(case.model, list(found.vectors), truth.inputs, labels, num_classes)
    present = (labels.bincount(minlength=num_classes) > 0)[None]
    controls: dict[str, Any] = {"true classes": present[0].nonzero().flatten().tolist()}
    for layer, vectors in found.vectors.items():
        scores = representation_scores(vectors[:1], means[layer][None], present)
        known = {name: float(value.nanmean()) for name, value in scores.items() if not bool(value.isnan().all())}
        controls[layer] = {name: round(value, 4) for name, value in known.items()}
    return controls


def _write(path: Path, found: "Inferred") -> None:
    """Save ``present``, ``confidence`` and each layer's vectors (devices, classes, length)."""
    from safetensors.torch import save

    from gradveil.files import write_atomically

    tensors = {"present": found.present.to(found.confidence), "confidence": found.confidence, **found.vectors}
    write_atomically(path, save({name: value.cpu().contiguous() for name, value in tensors.items()}))


def _show(said: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("update", "classes (confidence)", title="Classes that each update shows")
    for one in said:
        table.add_row(one["update"], ", ".join(f"{c} ({one['confidence'][str(c)]:.2f})" for c in one["classes"]))
    console = Console()
    console.print(table)
    console.print("vectors: " + ", ".join(f"{layer} ({length})" for layer, length in said[0]["layers"].items()))
    if "controls" in said[0]:
        controls = dict(said[0]["controls"])
        console.print(f"true classes: {controls.pop('true classes')}")
        names = list(next(iter(controls.values())))
        fit = Table("layer", *names, title="Fit to the truth: own class, and the controls")
        for layer, scores in controls.items():
            fit.add_row(layer, *(f"{scores[name]:.3f}" for name in names))
        console.print(fit)
