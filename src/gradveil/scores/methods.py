"""``auto``: exact while that is cheap, a sketch beyond."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.errors import ScoreError
from gradveil.layers.jacobian import Jacobian, Tape
from gradveil.layers.modules import prefix
from gradveil.layers.rules.base import wide
from gradveil.scores.estimators import deflation_rows, moment_rows, random_signs, sketch_rows
from gradveil.scores.exact import exact_rows, generic_rows
from gradveil.scores.fast.cpu_kernel import lanes_rows
from gradveil.scores.fast.dense import dense_rows
from gradveil.scores.rows import RowNorms, reduce_norms

# Multiplications a call may take before the sketch is preferred: some 50 ms of two CPU cores, or of one large GPU.
BUDGET = {"cpu": 4e9, "cuda": 4e12}


def choose(jacobian: Jacobian, probes: int, p: float) -> str:
    """Return ``exact`` or ``sketch``, from shapes alone: the same call always gets the same method.

    ``exact`` where p is not 2 (a sketch knows no other), where there are at most twice as many rows (or inputs) as
    probes, and where rows × multiplications of one backward pass × examples stay within the budget; else ``sketch``.
    """
    rows = min(_size(jacobian.r), _size(jacobian.x))
    if p != 2 or rows <= 2 * probes:
        return "exact"
    each = jacobian.cost if isinstance(jacobian, Tape) else _guess(jacobian)
    return "exact" if rows * each * jacobian.r.shape[0] <= BUDGET.get(jacobian.x.device.type, 4e9) else "sketch"


def _guess(jacobian: Jacobian) -> int:
    # What an unknown operation costs cannot be read off; a dense matrix from input to output is taken for it.
    return _size(jacobian.r) * _size(jacobian.x)


def _size(t: Tensor) -> int:
    return t[0].numel()


def loop_rows(model: nn.Module, layer: str, x: Tensor, ps: Sequence[float]) -> RowNorms:
    """Return r and the norms of ∂r_i/∂x, one i at a time (Sun et al. 2020, algorithm 1, line 3).

    One backward pass serves all examples: with batch statistics held, r of one example depends on its own input only.
    """
    with torch.enable_grad():
        inputs = x.detach().requires_grad_()
        r = prefix(model, layer)(inputs).flatten(1)  # (N, L)
        found = [reduce_norms(_row(r, i, inputs)[None], ps) for i in range(r.shape[1])]
    stacked = [torch.cat([norms[k] for norms in found]).t() if found else r.new_zeros(r.shape) for k in range(len(ps))]
    return RowNorms(r.detach(), dict(zip(ps, stacked, strict=True)))


def _row(r: Tensor, i: int, inputs: Tensor) -> Tensor:
    if not r.requires_grad:  # r does not depend on the input at all
        return torch.zeros_like(inputs)
    (gradient,) = torch.autograd.grad(r[:, i].sum(), inputs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(inputs) if gradient is None else gradient  # (N, ...)


METHODS = ("auto", "exact", "loop", "sketch", "moment", "deflation")
MEMORY = {"cpu": 2**29, "cuda": 2**31}  # bytes, where none are given
_LIGHT = 1e11  # multiplications of a call that launching kernels one by one would slow down


@dataclass(frozen=True)
class Method:
    """A method by name, with its settings."""

    name: str
    ps: tuple[float, ...] = (2.0,)  # the norms asked for; 2 is always among them
    probes: int = 64
    seed: int = 0
    memory: int = MEMORY["cpu"]

    def __call__(self, jacobian: Jacobian, *, static: bool = False) -> RowNorms:
        """Return r and the norms of its rows. ``static``: never look at values, so never wait for a device."""
        r, x = jacobian.r, jacobian.x
        if r.ndim < 2 or r.shape[0] != x.shape[0]:
            raise ScoreError(
                f"The layer's input has shape {tuple(r.shape)} for {x.shape[0]} examples; its first dimension must "
                "count them. Choose a layer before examples are merged."
            )
        name = choose(jacobian, self.probes, self.ps[-1]) if self.name == "auto" else self.name
        with _precision(jacobian.x):
            if name == "exact":
                return self._exact(jacobian, static)
            if name == "sketch":
                return sketch_rows(jacobian, self.probes, self.seed, self.memory)
            if name == "deflation":
                return deflation_rows(jacobian, self.probes, self.seed, self.memory)
            if not isinstance(jacobian, Tape):
                raise ScoreError(f"Method {name!r} needs a model of known operations. Use exact or sketch.")
            return moment_rows(jacobian)

    def _exact(self, jacobian: Jacobian, static: bool) -> RowNorms:
        if not isinstance(jacobian, Tape):
            return generic_rows(jacobian, self.ps, self.memory)
        fast = dense_rows if _takes_tf32(jacobian.x) else lanes_rows
        found = fast(jacobian, self.ps, self.memory)
        return exact_rows(jacobian, self.ps, self.memory, skip=not static) if found is None else found

    def constants(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what calls share beside the model: a recording must keep it alive."""
        if self.name not in ("auto", "sketch"):
            return ()
        return (random_signs(self.probes, tuple(x.shape[1:]), self.seed, wide(x).dtype, str(x.device)),)

    def is_static(self, tape: Tape) -> bool:
        """Return whether a call is worth recording for replay: short, and without steps that wait for the device."""
        rows = min(tape.r[0].numel(), tape.x[0].numel())
        return self.name != "deflation" and rows * tape.cost * tape.r.shape[0] <= _LIGHT


def _takes_tf32(x: Tensor) -> bool:
    """Return whether the user has let CUDA round float32 products: ``torch.set_float32_matmul_precision("high")``."""
    return x.is_cuda and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


@contextmanager
def _precision(x: Tensor) -> Iterator[None]:
    """Within, convolutions on CUDA round no more than the user lets matrix products round."""
    if not x.is_cuda or _takes_tf32(x):
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
