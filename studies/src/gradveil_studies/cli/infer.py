"""``gradveil infer``: read the classes and their representations off saved updates."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gradveil.auditing.saved_update import UpdateAuditConfig
from gradveil.cli import shared
from gradveil.cli.options import Given, Option, Output, takes
from gradveil.errors import AttackError
from gradveil_studies.paper.inference import InferenceSettings

if TYPE_CHECKING:
    from gradveil.auditing.saved_update import SavedUpdate
    from gradveil_studies.paper.inference import Inferred


@dataclass(frozen=True, kw_only=True)
class InferOptions(Output):
    """What the command takes beside the facts of an update."""

    updates: Annotated[tuple[str, ...], Option("A safetensors file; repeat it for several clients of one model.")]
    out: Annotated[Path | None, Option("Safetensors file for the inferred vectors.")] = None


@takes(
    InferOptions,
    InferenceSettings,
    UpdateAuditConfig,
    first="update model rule m convolutions weights dataset truth out json",
    without="attacks defense minutes gallery seed align num_steps num_examples batch_size optimizer momentum "
    "weight_decay proximal clip",
    rule=Option("Which rows are classes: gap, mean, bias_sign or row_sum."),
    m=Option("Rows summed per class: a share of them up to 1, a count above."),
    convolutions=Option("Go on through the convolutions, to mean input patches."),
    truth=Option("Safetensors with inputs and labels of the (first) client: adds the controls."),
)
def command(given: Given) -> None:
    """Infer which classes clients trained on, and a representation per class and layer."""
    from gradveil.auditing.saved_update import build_case
    from gradveil.auditing.update_files import read_tensors, read_update
    from gradveil_studies.paper.inference import infer

    update, json, before = given["update"], given["json"], given["before"]
    settings = given.make(InferenceSettings)
    case = build_case(given.without("update").make(UpdateAuditConfig, update=update[0]))
    sent_before = None if before is None else read_tensors(before)[0]
    others = [read_update(path, case.model, case.config, sent_before).to(case.device) for path in update[1:]]
    if case.loss.targets != "classes":
        raise AttackError(f"The loss {case.spec} is not one of classes, so there are none to infer.")
    seen = case.observation(case.update)
    with shared.working(json or given["quiet"], "layer"):
        found = infer(case.model, [case.update, *others], case.input_shape, seen.num_classes, settings)
    said = [_said(found, device, path) for device, path in enumerate(update)]
    if case.truth is not None:
        said[0]["controls"] = _controls(found, case, seen.num_classes)
    if given["out"] is not None:
        _write(given["out"], found)
    if json:
        shared.print_json({"rule": settings.rule, "m": settings.m, "updates": said})
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
    from gradveil_studies.paper.representations import class_means, representation_scores

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
