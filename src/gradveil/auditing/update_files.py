"""Updates as files: safetensors only, since a pickle can run code. Three ways to give one.

* gradients by parameter name;
* a weight difference, after - before, with the learning rate and the number of local steps;
* the weights after training beside those before (a pair of state dicts, as Flower sends them).
"""

import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from gradveil.data.base import Dataset
from gradveil.errors import UpdateError
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.imports import is_import_path
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.ranges import Count, Decay, Positive, Weight
from gradveil.step_rule import PLAIN, StepRule
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Update, check_update

KINDS = ("gradient", "difference", "weights")
NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights of a checkpoint
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
SHOWN = 3  # tensors that an error names
_NO_PICKLES = (
    "It is not a safetensors file; pickles (.pt, .pth) are refused, since they can run code: save with "
    "safetensors.torch.save_file(state_dict, path)."
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the tensors do not say themselves. ``None``: as the file's metadata has it, else the default."""

    kind: str | None = None  # gradient, difference or weights; default: gradient
    lr: Positive | None = None  # of the local steps
    num_steps: Count | None = None  # default: 1
    num_examples: Count | None = None  # default: 1
    batch_size: Count | None = None
    optimizer: str | None = None  # this and what follows: of the local steps; default: plain SGD
    momentum: Decay | None = None
    weight_decay: Weight | None = None
    proximal: Weight | None = None
    clip: Weight | None = None

    @property
    def rule(self) -> StepRule:
        """What the client's optimiser made of a gradient."""
        stated: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(StepRule)}
        return StepRule(**{name: value for name, value in stated.items() if value is not None})


def write_update(path: str | Path, update: Update, loss: str = "cross_entropy") -> None:
    """Save an update as gradients, with what belongs to it and its loss in the file's metadata."""
    facts = {
        "kind": "gradient",
        "lr": repr(update.lr),
        "num_steps": str(update.num_steps),
        "num_examples": str(update.num_examples),
        "loss": loss,
    }
    if update.batch_size is not None:
        facts["batch_size"] = str(update.batch_size)
    facts |= {name: str(value) for name, value in asdict(update.rule).items() if value != getattr(PLAIN, name)}
    both = update.gradient | update.buffers
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in both.items()}
    write_atomically(Path(path), save(tensors, metadata=facts))


def read_update(path: str | Path, model: nn.Module, facts: Facts | None = None, before: Params | None = None) -> Update:
    """Read an update and check it against the model: names, shapes, dtypes, finite values.

    ``before`` are the weights that the server sent, where the file holds the weights after training.
    What the caller states in ``facts`` goes before the file's metadata.
    """
    tensors, metadata = read_tensors(path)
    stated = _merge(Path(path), metadata, facts or Facts())
    kind = stated.kind or ("weights" if before is not None else "gradient")
    lr = stated.lr
    steps, examples = (1 if n is None else n for n in (stated.num_steps, stated.num_examples))
    if kind != "gradient" and lr is None:
        raise UpdateError(f"{path} holds a {kind}: the learning rate is needed to read it. Give --lr (lr=...).")
    if min(steps, examples) < 1 or (lr is not None and not lr > 0):
        raise UpdateError(f"{path}: lr={lr}, steps={steps}, examples={examples}; each must be above zero.")
    buffers = dict(model.named_buffers())
    own = {n: b for n, b in model.state_dict().items() if n in buffers}
    trained = {name: value for name, value in tensors.items() if name not in own}
    gradient = _gradient(Path(path), kind, trained, lr or 1.0, before, model)
    buffers = _buffers(Path(path), kind, {n: value for n, value in tensors.items() if n in own}, own)
    update = Update(gradient, examples, steps, lr or 1.0, stated.batch_size, stated.rule, buffers)
    check_update(update, model)
    return update


def _buffers(path: Path, kind: str, sent: Params, own: Params) -> Params:
    """Return the running statistics that a client sent: as values, or what they changed by in a difference."""
    kept = {n: value.float() for n, value in sent.items() if own[n].is_floating_point()}
    for name, value in kept.items():
        if value.shape != own[name].shape:
            raise UpdateError(f"{path}: {name!r} is {tuple(value.shape)} and {tuple(own[name].shape)} in the model.")
        if not bool(torch.isfinite(value).all()):
            raise UpdateError(
                f"{path}: {name!r} holds NaN or infinite values. Leave it out, or find the client's fault."
            )
    return {n: own[n].cpu() + value for n, value in kept.items()} if kind == "difference" else kept


def read_loss(path: str | Path) -> str:
    """Return the loss that an update's metadata name; code of a user's is never run because a file names it."""
    loss = read_tensors(path)[1].get("loss", "cross_entropy")
    if is_import_path(loss):
        raise UpdateError(
            f"{path} says that its loss is {loss}. Code that a file names is not run: give --loss {loss}."
        )
    return loss


def from_state_dicts(model: nn.Module, before: Params, after: Params, lr: float) -> Update:
    """Return the update between two state dicts (Flower's ``ArrayRecord.to_torch_state_dict()``), checked.

    Buffers, such as the running statistics of batch norm, are left out: they are not trained.
    """
    names = [name for name in parameters(model) if name in after]
    missing = [name for name in names if name not in before]
    if missing or not names:
        what = missing[0] if missing else next(iter(parameters(model)), "a parameter")
        raise UpdateError(f"The two state dicts do not both hold {what!r}. Give both of the model that is audited.")
    old, new = ({name: state[name] for name in names} for state in (before, after))
    for state in (old, new):
        check_update(Update(state), model)  # the same names, shapes, dtypes and finite values are asked of weights
    old, new = ({name: value.float() for name, value in state.items()} for state in (old, new))
    update = Update.from_weights(old, new, lr, 1, 1)
    check_update(update, model)
    return update


def load_weights(model: nn.Module, path: str | Path) -> Params:
    """Put the weights of a file into the model, and return them: safetensors, or a pickle of tensors alone."""
    path = Path(path)
    tensors = _pickled(path) if path.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt") else read_tensors(path)[0]
    own = model.state_dict()
    wrong = [f"{n!r} is {tuple(v.shape)} there and {tuple(own[n].shape)} in the model" for n, v in tensors.items()
             if n in own and v.shape != own[n].shape]  # fmt: skip
    wrong += [f"{n!r} is missing" for n in own if n not in tensors and not n.endswith("num_batches_tracked")]
    wrong += [f"{n!r} is not in the model" for n in tensors if n not in own]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UpdateError(f"{path} does not fit the model: {'; '.join(wrong[:SHOWN])}{more}. Is it of another network?")
    if bad := next((n for n, v in tensors.items() if not bool(v.to(own[n].dtype).isfinite().all())), None):
        raise UpdateError(f"{path}: {bad!r} holds NaN or infinite values, or such that the model's type cannot hold.")
    model.load_state_dict(tensors, strict=False)
    return tensors


def _pickled(path: Path) -> Params:
    """Return the tensors of a pickle, by torch's reader that runs no code; training scripts nest them."""
    check_files(path)
    with wrap_parse_errors(path, UpdateError, "It is damaged, or holds more than tensors: save model.state_dict()."):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                if sum(part.file_size for part in parts.infolist()) > path.stat().st_size:
                    raise ValueError("it unpacks to more than it holds")
        found: Any = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
        nested = (found[key] for key in NESTED if isinstance(found, dict) and isinstance(found.get(key), dict))
        found = next(nested, found)
        if not isinstance(found, dict) or not found or not all(isinstance(v, torch.Tensor) for v in found.values()):
            raise ValueError("it holds no weights by name")
        plain = {n: v.layout is torch.strided and not v.is_nested and not v.is_meta for n, v in found.items()}
        if odd := next((n for n, v in found.items() if not plain[n] or v.dtype not in _REAL), None):
            raise ValueError(f"{odd!r} is no plain tensor of real numbers")
        if all(name.startswith("module.") for name in found):  # of a model that ran on several GPUs
            found = {name.removeprefix("module."): value for name, value in found.items()}
    return dict(found)


def write_examples(path: str | Path, batch: Batch) -> None:
    """Save examples and labels, e.g. the truth behind an update."""
    write_atomically(Path(path), save({"inputs": batch.inputs.contiguous(), "labels": batch.labels.contiguous()}))


def read_examples(path: str | Path, num_classes: int | None = None) -> Batch:
    """Read examples: a file with the tensors ``inputs`` (N, ...) in [0, 1] and ``labels``, (N,) or (N, K)."""
    tensors, _ = read_tensors(path)
    if not {"inputs", "labels"} <= tensors.keys():
        raise UpdateError(f"{path} holds {', '.join(tensors)}; give the tensors 'inputs' and 'labels'.")
    inputs, labels = tensors["inputs"].float(), tensors["labels"]
    labels = labels.float() if labels.is_floating_point() else labels.long()
    if len(inputs) == 0 or labels.ndim not in (1, 2) or len(labels) != len(inputs):
        raise UpdateError(f"{path}: inputs are {tuple(inputs.shape)} and labels {tuple(labels.shape)}; give N of each.")
    if not bool(torch.isfinite(inputs).all()) or float(inputs.min()) < 0 or float(inputs.max()) > 1:
        raise UpdateError(f"{path}: inputs must lie in [0, 1]; normalise inside the model.")
    by_class = labels.ndim == 1 and not labels.is_floating_point()
    if by_class and num_classes is not None and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise UpdateError(
            f"{path}: labels go from {labels.min()} to {labels.max()}; they must lie in 0..{num_classes - 1}."
        )
    return Batch(inputs, labels)


def check_files(*paths: str | Path | None) -> None:
    """Raise where one that is named is not there."""
    for path in paths:
        if path is not None and not Path(path).is_file():
            raise UpdateError(f"There is no file {path}.")


def read_tensors(path: str | Path) -> tuple[Params, dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    path = Path(path)
    check_files(path)
    with wrap_parse_errors(path, UpdateError, _NO_PICKLES):
        return read_safetensors(path)


def _gradient(path: Path, kind: str, tensors: Params, lr: float, before: Params | None, model: nn.Module) -> Params:
    if not tensors:
        raise UpdateError(f"{path} holds no tensor.")
    if kind == "weights":
        if before is None:
            raise UpdateError(f"{path} holds the weights after training; give those before it as well (--before FILE).")
        return from_state_dicts(model, before, tensors, lr).gradient
    check_update(Update(tensors), model)  # before any arithmetic hides a wrong dtype
    factor = 1.0 if kind == "gradient" else -1.0 / lr
    return {name: factor * value.float() for name, value in tensors.items()}


def _merge(path: Path, metadata: dict[str, str], facts: Facts) -> Facts:
    """Return what is stated, and where it is not what the file says."""
    stated: dict[str, Any] = {f.name: getattr(facts, f.name) for f in fields(Facts)}
    whole, words = ("num_steps", "num_examples", "batch_size"), ("kind", "optimizer")
    for key in [key for key, value in stated.items() if value is None and key in metadata]:
        read: Any = int if key in whole else str if key in words else float
        try:
            stated[key] = read(metadata[key])
        except ValueError:
            raise UpdateError(f"{path}: its metadata has {key}={metadata[key]!r}, which is no number.") from None
    if stated["kind"] not in (None, *KINDS):
        raise UpdateError(f"{path}: no kind of update is called {stated['kind']!r}. Known: {', '.join(KINDS)}.")
    return Facts(**stated)


def fitting_loss(spec: str, num_classes: int, dataset: Dataset | None, truth: Batch | None) -> tuple[Loss, int]:
    """Return the loss for targets like those that are known, and how many outputs a model needs for it."""
    loss = build_loss(spec)
    if dataset is not None:
        return loss.of(dataset.train.labels), dataset.outputs(spec)
    if truth is not None and truth.labelled:
        loss = loss.of(truth.labels)
        return loss, loss.width(truth.labels, num_classes)
    return loss, num_classes
