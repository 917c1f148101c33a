"""ReLU kinks, rounded: how widely the inputs of such calls spread, and passes in which they have no corner."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_RELU = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_LEAKY = {F.leaky_relu, F.leaky_relu_}
_CLIPPED = {F.hardtanh, F.hardtanh_}
_KINKED = _RELU | _LEAKY | _CLIPPED | {F.relu6}


class Smoothing(TorchFunctionMode):
    """Within, ReLU-like calls are rounded, the i-th call over the i-th width."""

    def __init__(self, widths: Sequence[Tensor]) -> None:
        super().__init__()
        self._widths = iter(widths)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call, or its rounded form."""
        if func not in _KINKED:
            return func(*args, **(kwargs or {}))
        return _rounded(func, args[0], next(self._widths), args[1:], kwargs or {})


class _Listening(TorchFunctionMode):
    """Within, notes how widely the inputs of ReLU-like calls spread."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KINKED:
            self.scales.append(float(args[0].std(correction=0)) or 1.0)
        return func(*args, **(kwargs or {}))


def kink_scales(forward: Callable[[], object]) -> list[float]:
    """Return the spread of the input of each ReLU-like call of a forward pass, in the order of the calls."""
    listening = _Listening()
    with torch.no_grad(), listening:
        forward()
    return listening.scales


def _rounded(func: Callable[..., Any], z: Tensor, t: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if func in _LEAKY:
        slope: float = args[0] if args else kwargs.get("negative_slope", 0.01)
        return slope * z + (1 - slope) * _ramp(z, t)
    if func is F.relu6:
        return _ramp(z, t) - _ramp(z - 6, t)
    if func in _CLIPPED:
        low: float = args[0] if args else kwargs.get("min_val", -1.0)
        high: float = args[1] if len(args) > 1 else kwargs.get("max_val", 1.0)
        return low + _ramp(z - low, t) - _ramp(z - high, t)
    return _ramp(z, t)


def _ramp(z: Tensor, t: Tensor) -> Tensor:
    return t * F.softplus(z / t)
