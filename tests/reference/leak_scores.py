"""Leak scores as the definition reads: one example, one entry, one gradient at a time."""

import copy
from math import inf

import torch
from torch import Tensor, nn


def reference_scores(model: nn.Module, layer: str, x: Tensor, p: float = 2.0) -> Tensor:
    """Return |r_i| ||g||_p / ||g||_2² with g = ∂r_i/∂x of the same example, in plain Python, (N, L)."""
    r, rows = reference_jacobian(model, layer, x)
    found = torch.zeros(r.shape, dtype=rows.dtype)
    for n in range(r.shape[0]):
        for i in range(r.shape[1]):
            found[n, i] = _score(float(r[n, i]), rows[n, i].flatten().double(), p)
    return found


def _score(value: float, g: Tensor, p: float) -> float:
    if value == 0:
        return 0.0
    two = float(g.square().sum()) ** 0.5
    if two == 0:
        return inf
    size = {1.0: g.abs().sum(), 2.0: g.square().sum().sqrt(), inf: g.abs().max()}[float(p)]
    return abs(value) * float(size) / two**2


def reference_jacobian(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return r (N, L) and ∂r_n/∂x_n (N, L, ...), from a copy of the model whose batch norm layers are frozen."""
    frozen = freeze_batch_norm(model, x)
    caught: list[Tensor] = []
    frozen.get_submodule(layer).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    inputs = x.detach().clone().requires_grad_()
    state = torch.get_rng_state()
    frozen(inputs)
    torch.set_rng_state(state)
    r = caught[0].flatten(1)
    rows = torch.zeros(*r.shape, *x.shape[1:], dtype=x.dtype)
    for n in range(r.shape[0]):
        for i in range(r.shape[1]):
            if r.requires_grad:
                rows[n, i] = torch.autograd.grad(r[n, i], inputs, retain_graph=True, materialize_grads=True)[0][n]
    return r.detach(), rows


def freeze_batch_norm(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy in which batch norm that looks at the batch is in eval mode, with this batch's statistics."""
    model = copy.deepcopy(model)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    norms = [m for m in norms if m.training or m.running_mean is None]
    state = torch.get_rng_state()
    for norm in norms:  # in order: each sees the input that the frozen ones before it leave
        seen: list[Tensor] = []
        handle = norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            model(x)
        handle.remove()
        torch.set_rng_state(state)
        values = seen[0].transpose(0, 1).flatten(1)
        norm.running_mean, norm.running_var = values.mean(1), values.var(1, unbiased=False)
        norm.eval()
    return model
