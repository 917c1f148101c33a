"""The Jacobian of a representation as two products: with cotangents (pull) and with tangents (push)."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradveil.errors import ScoreError
from gradveil.layers.modules import prefix


class Jacobian(ABC):
    """∂r_n/∂x_n for every example n, never written out.

    Many vectors are multiplied at once: K comes first, then the examples. Where all examples share a tangent,
    the second dimension may be 1.
    """

    r: Tensor  # (N, ...)
    x: Tensor  # (N, ...)

    @property
    def widest(self) -> int:
        """Entries of the largest tensor on the way, of all examples together."""
        return max(self.x.numel(), self.r.numel())

    def at_once(self, memory: int, in_cache: int = 2**21) -> int:
        """Return how many vectors to carry at once: within the memory (bytes), and (entries) a CPU's cache."""
        entries = memory // (8 * self.x.element_size())  # about eight tensors live at a time
        if not self.x.is_cuda:
            entries = min(entries, in_cache)
        return max(1, entries // max(1, self.widest))

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """Return Jᵀg (K, N, *x) for cotangents g (K, N, *r)."""

    @abstractmethod
    def push(self, t: Tensor) -> Tensor:
        """Return Jt (K, N, *r) for tangents t (K, N or 1, *x)."""


class FunctionJacobian(Jacobian):
    """Of any model: one forward pass, and vectorised products by automatic differentiation.

    The forward pass is a plain one, not one under a transform: dropout would draw other masks there.
    """

    def __init__(self, model: nn.Module, layer: str, x: Tensor) -> None:
        with torch.enable_grad(), _plain_attention():
            self.x = x.detach().requires_grad_()
            self.r = prefix(model, layer)(self.x)

    def pull(self, g: Tensor) -> Tensor:
        """Return Jᵀg (K, N, *x) for cotangents g (K, N, *r)."""
        return _each(lambda row: _gradient(self.r, self.x, row), g.to(self.r.dtype))

    def push(self, t: Tensor) -> Tensor:
        """Return Jt (K, N, *r) for tangents t (K, N or 1, *x)."""
        # Jᵀg is linear in g, and the transpose of that is J: no second forward pass, so dropout masks are the same.
        tangents = t.to(self.x.dtype).expand(-1, *self.x.shape)
        try:
            g, pulled = self._pulled
            return _each(lambda row: _gradient(pulled, g, row), tangents)
        except RuntimeError as error:
            raise ScoreError(
                f"Estimators differentiate this model twice, which torch cannot ({error}). Use method='exact'."
            ) from error

    @cached_property
    def _pulled(self) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), _plain_attention():
            g = torch.zeros_like(self.r, requires_grad=True)
            if not self.r.requires_grad:
                return g, torch.zeros_like(self.x)
            (pulled,) = torch.autograd.grad(self.r, self.x, g, create_graph=True, materialize_grads=True)
            return g, pulled


def _gradient(output: Tensor, of: Tensor, weights: Tensor) -> Tensor:
    if not output.requires_grad:
        return torch.zeros_like(of)
    return torch.autograd.grad(output, of, weights, retain_graph=True, materialize_grads=True)[0]


def _each(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function to every row at once, or one by one where some operation cannot be vectorised."""
    with _plain_attention(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        try:
            return vmap(function)(rows)
        except RuntimeError:
            return torch.stack([function(row) for row in rows])


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Within, attention is made of matrix products, which can be differentiated twice and vectorised."""
    with ExitStack() as stack:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
