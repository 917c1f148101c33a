"""Which function does what a method's name promises."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import ScoreError
from gradveil.scores.auto import choose
from gradveil.scores.deflation import deflation_rows
from gradveil.scores.dense import dense_rows
from gradveil.scores.exact import exact_rows
from gradveil.scores.generic import generic_rows
from gradveil.scores.jacobian import Jacobian
from gradveil.scores.lanes import lanes_rows
from gradveil.scores.moment import moment_rows
from gradveil.scores.rows import Rows, wide
from gradveil.scores.sketch import random_signs, sketch_rows
from gradveil.scores.tape import Tape

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

    def __call__(self, jacobian: Jacobian, *, static: bool = False) -> Rows:
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

    def _exact(self, jacobian: Jacobian, static: bool) -> Rows:
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
