"""How well inferred representations fit the true ones.

Plain correlation of a representation with that of its own class (``own``) mostly measures what all classes share. So
beside it: correlation with the other classes on the same device (``wrong``), whether the inferred vector is nearest to
its own class (``nearest``), and the correlation that is left once the mean over the device's classes is removed
(``centred``).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTROLS = ("own", "wrong", "nearest", "centred")


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the Pearson correlation along the last dimension; 0 where a vector is constant."""
    return (_standard(a) * _standard(b)).sum(-1)


def representation_scores(found: Tensor, truth: Tensor, present: Tensor) -> dict[str, Tensor]:
    """Return each control per device and class (D, K), NaN where it does not exist.

    ``found`` and ``truth`` are (D, K, L), ``present`` (D, K) says which classes the device truly holds. ``wrong``,
    ``nearest`` and ``centred`` need a second class on the device.
    """
    f, t = _standard(found), _standard(truth)
    every = f @ t.mT  # (D, K, K): found class against true class
    own = every.diagonal(dim1=1, dim2=2)
    others = present[:, None, :] & ~torch.eye(f.shape[1], dtype=torch.bool, device=f.device)
    count = others.sum(2)
    wrong = (every * others).sum(2) / count
    best = every.masked_fill(~others, -torch.inf).amax(2)
    centred = correlation(_centred(f, present), _centred(t, present))
    enough = present & (count > 0)
    absent = torch.full_like(own, torch.nan)
    values = {"own": (own, present), "wrong": (wrong, enough), "nearest": ((own > best).to(own), enough)}
    values["centred"] = (centred, enough)
    return {name: torch.where(where, value, absent) for name, (value, where) in values.items()}


def class_set_accuracy(inferred: Tensor, present: Tensor) -> Tensor:
    """Return 1.0 for each device (D,) whose class set (D, K) was inferred exactly, else 0.0."""
    return (inferred == present).all(1).float()


def class_means(
    model: nn.Module, layers: Sequence[str], inputs: Tensor, groups: Tensor, num_groups: int
) -> dict[str, Tensor]:
    """Return the mean input of each layer over the examples of each group, layer -> (num_groups, L).

    A group is a class, or a class on a device: one forward pass serves many devices. A convolution's input is
    averaged over its positions too: the mean patch (channels · height · width of the kernel).
    """
    caught: dict[str, Tensor] = {}

    def catch(path: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            means = _group_means(args[0], groups, num_groups)
            caught[path] = mean_patch(layer, means) if isinstance(layer, nn.Conv2d) else means.flatten(1)

        return hook

    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack, torch.no_grad():
        for path in layers:
            stack.enter_context(model.get_submodule(path).register_forward_pre_hook(catch(path)))
        for module, training in modes.items():
            stack.callback(setattr, module, "training", training)
        model.eval()(inputs)
    return {path: caught[path] for path in layers}


def mean_patch(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the mean over positions of the patches that a convolution sees, (N, channels · kernel)."""
    if isinstance(layer.padding, str) or layer.stride != (1, 1) or layer.dilation != (1, 1):
        return F.unfold(x, layer.kernel_size, layer.dilation, _padding(layer), layer.stride).mean(2)
    top, left = layer.padding
    padded = F.pad(x, (left, left, top, top))
    positions = [n - k + 1 for n, k in zip(padded.shape[2:], layer.kernel_size, strict=True)]
    # Entry (i, j) of the mean patch is the mean over a window of all positions that starts at (i, j).
    return F.avg_pool2d(padded, positions, stride=1).flatten(1)


def _padding(layer: nn.Conv2d) -> tuple[int, int]:
    """Return the padding in numbers; ``same`` as torch pads odd kernels."""
    if isinstance(layer.padding, str):
        high, wide = (d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
        return (high, wide) if layer.padding == "same" else (0, 0)
    return layer.padding[0], layer.padding[1]


def _group_means(r: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean of r (N, ...) over each group, (count, ...); 0 for an empty group."""
    sums = torch.zeros(count, *r.shape[1:], dtype=r.dtype, device=r.device).index_add_(0, groups, r)
    sizes = torch.bincount(groups, minlength=count).clamp_min(1)
    return sums / sizes.reshape(-1, *[1] * (r.ndim - 1))


def _standard(v: Tensor) -> Tensor:
    """Return the vectors with mean 0 and length 1 along the last dimension; 0 where constant."""
    away = v - v.mean(-1, keepdim=True)
    length = away.norm(dim=-1, keepdim=True)
    # Rounding leaves a constant vector with a length that is tiny beside its entries.
    flat = length <= 1e-6 * v.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    return torch.where(flat, 0.0, away / length.where(~flat, torch.ones_like(length)))


def _centred(v: Tensor, present: Tensor) -> Tensor:
    """Return the vectors (D, K, L) less their mean over the classes that are present."""
    weight = present.to(v)[..., None]
    return v - (v * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
