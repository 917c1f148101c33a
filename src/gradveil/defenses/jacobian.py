"""The whole Jacobian of a representation, for the objectives that need more than its row norms."""

import torch
from torch import Tensor, nn

from gradveil.scores.jacobian import FunctionJacobian

_ROWS = 128  # in one vectorised backward pass


def jacobian(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """Return ∂r_n/∂x_n for each example, (N, L, d): dense, so for small inputs.

    With batch norm in train mode the batch statistics are held, so that examples do not mix.
    """
    products = FunctionJacobian(model, layer, x)
    n, length = len(products.r), products.r[0].numel()
    units = torch.eye(length, dtype=x.dtype, device=x.device).split(_ROWS)
    rows = [products.pull(some[:, None].expand(-1, n, -1).reshape(-1, *products.r.shape)) for some in units]
    return torch.cat(rows).flatten(2).transpose(0, 1).detach()
