"""What an optimizer brings with it: moments of gradients that had no noise would go out with its next step."""

from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gradveil.errors import DefenseError
from gradveil.tree import Params

_noted: "WeakKeyDictionary[Optimizer, list[tuple[Tensor, int]]]" = WeakKeyDictionary()  # and how often written to


def _state(optimizer: Optimizer, weights: Params) -> list[tuple[str, Tensor]]:
    """Return what an optimizer keeps of the gradients of some weights, by the weights' names."""
    own = ((name, optimizer.state[p]) for name, p in weights.items() if p in optimizer.state)
    return [(name, t) for name, kept in own for t in tree_leaves(kept) if isinstance(t, Tensor)]


def note_state(optimizer: Optimizer, weights: Params) -> None:
    """A step on defended gradients was taken, from nothing or from the state of such steps."""
    _noted[optimizer] = [(t, t._version) for _, t in _state(optimizer, weights)]


def check_state(optimizer: Optimizer, weights: Params) -> None:
    """Raise where an optimizer holds anything that steps under a guard of records did not leave there."""
    known = {id(t): version for t, version in _noted.get(optimizer, [])}
    if odd := [name for name, t in _state(optimizer, weights) if known.get(id(t)) != t._version]:
        raise DefenseError(
            f"The optimizer's state for {odd[0]!r} was not left by steps under this defence (it is from before the "
            f"guard, or was loaded or changed), and may hold gradients without noise. Make a new optimizer, or call "
            f"optimizer.state.clear()."
        )
