"""A fully connected layer of the server's own making: in front of any model, or in the place of its first layer."""

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, prod
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init

from gradveil.attacks.analytic import undo_scaling
from gradveil.attacks.base import check_seen, refuse_adaptive
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.modules import Link, prefix, sequential, trace
from gradveil.ranges import Range
from gradveil.types import Batch, Observation, Reconstruction

Architecture = Literal["changed", "kept"]
Rows = Annotated[int, Range(1, 65536)]  # that are planted
GAIN = 1e6  # how many times as large gradients are made: absolute noise is small beside them
BLOCK = "planted"  # the name of what is put in front


@dataclass(frozen=True)
class Planting:
    """A copy of a model with a place for rows: they are linear, a ReLU follows, and ``back`` takes what they give."""

    model: nn.Module
    rows: nn.Linear
    back: nn.Linear
    inputs: Tensor  # (M, L) what public examples are as inputs of the rows

    def level(self, rng: Generator) -> None:
        """Let every row move what follows in the same way: an example has one δ for all rows that it activates."""
        weight = self.back.weight.detach()
        pattern = torch.randn(len(weight), generator=rng, device=rng.device).to(weight)
        weight.copy_((pattern * weight.std() / weight.shape[1] ** 0.5)[:, None].expand_as(weight))

    def amplify(self, gain: float) -> None:
        """Make the rows' gradients so many times as large: the output stays the same, as a ReLU keeps to scale."""
        with torch.no_grad():
            self.rows.weight.div_(gain)
            self.rows.bias.div_(gain)
            self.back.weight.mul_(gain)


def prepare(model: nn.Module, architecture: Architecture, count: int, public: Batch | None, rng: Generator) -> Planting:
    """Return a place for rows: ``count`` in front of the model, or as many as its first layer has."""
    if public is None or len(public) < 2:
        raise AttackError("To plant rows a server needs public examples of the clients' kind; it has none.")
    x = public.inputs.to(next(model.parameters()))
    copied = deepcopy(model)
    if architecture == "kept":
        rows, back = _first_pair(copied)
        with torch.no_grad(), quiet(copied):
            return Planting(copied, rows, back, prefix(copied, _path_of(copied, rows))(x))
    planting = _in_front(copied, x, count)
    with torch.no_grad():
        noise = torch.randn(planting.back.weight.shape, generator=rng, device=rng.device).to(x)
        planting.back.weight.copy_(noise * x.std() / count**0.5)
        planting.back.bias.copy_(x.flatten(1).mean(0))
    return planting


def _in_front(model: nn.Module, x: Tensor, count: int) -> Planting:
    """Put a block before the model. The parts of a chain keep their names."""
    shape, size = tuple(x.shape[1:]), prod(x.shape[1:])
    rows, back = (skip_init(nn.Linear, n, m) for n, m in ((size, count), (count, size)))  # which draw nothing
    parts = OrderedDict(flatten=nn.Flatten(), rows=rows, relu=nn.ReLU(), back=back, shape=nn.Unflatten(1, shape))
    children = dict(model.named_children()) if type(model) is nn.Sequential else {"model": model}
    whole = nn.Sequential(OrderedDict({BLOCK: nn.Sequential(parts).to(x), **children}))
    whole.training = model.training
    return Planting(whole, rows, back, x.flatten(1))


def _first_pair(model: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """Return the first layer with weights and the next, where both are fully connected and a ReLU lies between."""
    links: Sequence[Link] = sequential(model) or ()
    start = next((i for i, link in enumerate(links) if link.has_parameters), len(links))
    parts = [link.module for link in links[start : start + 3]]
    if [type(part) for part in parts] == [nn.Linear, nn.ReLU, nn.Linear] and parts[0].bias is not None:
        rows, _, back = parts
        assert isinstance(rows, nn.Linear)
        assert isinstance(back, nn.Linear)
        return rows, back
    raise AttackError(
        f"{type(model).__name__} does not begin with two fully connected layers and a ReLU between them, so no rows "
        f"can be planted in it as it is. Use architecture=changed, which puts a block in front."
    )


def _path_of(model: nn.Module, layer: nn.Module) -> str:
    paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
    return paths[layer]


@dataclass(frozen=True)
class Sums:
    """What an update shows of a planted layer: for each row Σ δ x and Σ δ over the examples that activate it."""

    path: str
    layer: nn.Linear
    of_inputs: Tensor  # (O, L)
    of_slopes: Tensor  # (O,)


def sums(seen: Observation, attack: str) -> Sums:
    """Read the first fully connected layer of the model that was sent."""
    check_seen([seen])
    refuse_adaptive([seen], attack)
    dense = trace(seen.model, seen.input_shape).visits[:1]
    path = dense[0].path if dense and isinstance(dense[0].layer, nn.Linear) else ""
    if not path or not {f"{path}.weight", f"{path}.bias"} <= set(seen.visible):
        raise not_planted(attack)
    gradient = seen.as_one_step().update.gradient
    layer = seen.model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return Sums(path, layer, gradient[f"{path}.weight"].double(), gradient[f"{path}.bias"].double())


def not_planted(attack: str) -> AttackError:
    """Return the refusal where the model is not one that the attack made."""
    return AttackError(
        f"{attack} reads what it planted itself, and this model's first layer is not of its making, or is not seen. "
        f"Let the clients train at what its plant() returns."
    )


def as_images(seen: Observation, path: str, values: Tensor) -> Tensor:
    """Return the examples (N, *shape) behind the inputs (N, L) of a layer before which nothing was lost."""
    model = deepcopy(seen.model).double()
    shape = (len(values), *seen.input_shape)
    with quiet(model):
        undone = undo_scaling(prefix(model, path), values, shape)
    if undone is None:
        raise AttackError(f"What lies before {path!r} cannot be undone, so its inputs do not show the examples.")
    return undone.reshape(shape)


def nothing(seen: Observation, details: dict[str, float]) -> Reconstruction:
    """Return the answer where no example took the bait: grey."""
    grey = torch.full((seen.num_examples, *seen.input_shape), sum(seen.bounds) / 2)
    return Reconstruction(grey, seen.labels, inf, False, details)
