"""How many problems fit into memory at once."""

import torch
from torch import Tensor, nn

from gradveil.attacks.engine import Optimiser
from gradveil.attacks.gradients import quiet
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.matching import Matching
from gradveil.attacks.objective import Unknowns

ON_CPU = 2 * 2**30  # bytes that a run may take
MOST_ON_CPU = 128  # more problems at once gain nothing there
GRADIENTS, ACTIVATIONS = 8, 16  # copies of each that a double backward pass holds, roughly


def problems_at_once(stack: Matching, unknowns: Unknowns, optimiser: Optimiser) -> int:
    """Return how many problems to run together: as many as fit into half of what is free."""
    entry = stack.floor.element_size()
    gradients = GRADIENTS * sum(g[0].numel() for g in stack.target.values())
    state = unknowns.size * (2 * optimiser.history + 20 if isinstance(optimiser, LBFGS) else 10)
    each = entry * (gradients + state + ACTIVATIONS * _activations(stack.model, unknowns, stack.floor))
    if stack.floor.is_cuda:
        free, _ = torch.cuda.mem_get_info(stack.floor.device)
        return max(1, int(free / 2 / each))
    return max(1, min(MOST_ON_CPU, int(ON_CPU / each)))


def _activations(model: nn.Module, unknowns: Unknowns, like: Tensor) -> int:
    """Return how many numbers one problem's forward pass holds; a convolution's patches count in full."""
    count = 0

    def add(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        nonlocal count
        if isinstance(output, Tensor):
            patches = output[0, 0].numel() * module.weight[0].numel() if isinstance(module, nn.Conv2d) else 0
            count += output.numel() + len(output) * patches // 4

    leaves = [m for m in model.modules() if next(m.children(), None) is None]
    handles = [m.register_forward_hook(add) for m in leaves]
    try:
        with torch.no_grad(), quiet(model):
            model(like.new_zeros(unknowns.images))
    finally:
        for handle in handles:
            handle.remove()
    return count
