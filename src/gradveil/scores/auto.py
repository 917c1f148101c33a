"""``auto``: exact while that is cheap, a sketch beyond."""

from torch import Tensor

from gradveil.scores.jacobian import Jacobian
from gradveil.scores.tape import Tape

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
