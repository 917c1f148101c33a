"""Plain readings of the paper's algorithms: one example, one entry, one weight at a time, in loops."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.tree import Params
from gradveil.types import Batch


def split(model: nn.Sequential, at: int) -> tuple[nn.Sequential, nn.Module, nn.Sequential]:
    """Return f, g, h of F = h ∘ g ∘ f."""
    layers = list(model)
    return nn.Sequential(*layers[:at]), layers[at], nn.Sequential(*layers[at + 1 :])


def row_norms(f: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return r (L,) of one example x (1, ...) and the norm of each entry's gradient, by one backward each."""
    x = x.detach().requires_grad_()
    r = f(x).flatten()
    norms = []
    for i in range(len(r)):
        (g,) = torch.autograd.grad(r[i], x, retain_graph=True, allow_unused=True)
        norms.append(float(g.norm()) if g is not None else 0.0)
    return r.detach(), torch.tensor(norms)


def zeroed(r: Tensor, norms: Tensor, count: int) -> list[int]:
    """Return the entries that algorithm 1 zeroes: highest |r_i| / ||∇r_i||, live ones only, first index first."""
    live = [i for i in range(len(r)) if r[i] != 0]
    score = {i: float("inf") if norms[i] == 0 else float(r[i].abs() / norms[i]) for i in live}
    return sorted(live, key=lambda i: (-score[i], i))[:count]


def plain_gradient(model: nn.Module, batch: Batch) -> Params:
    """Return the undefended gradient of the mean loss."""
    loss = F.cross_entropy(model(batch.inputs), batch.labels)
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def algorithm_2(model: nn.Sequential, at: int, batch: Batch, share: float) -> Tensor:
    """Return the defended weight gradient of layer ``at``: the mean over examples of the gradient built from r'."""
    f, g, h = split(model, at)
    total = torch.zeros_like(g.weight)
    for n in range(len(batch)):
        x, y = batch.inputs[n : n + 1], batch.labels[n : n + 1]
        r, norms = row_norms(f, x)
        r_perturbed = r.clone()
        for i in zeroed(r, norms, round(share * len(r))):
            r_perturbed[i] = 0.0
        b = g(f(x)).detach().requires_grad_()
        (dl_db,) = torch.autograd.grad(F.cross_entropy(h(b), y), b)
        total += weight_gradient(g, r_perturbed.view_as(f(x)), dl_db)
    return total / len(batch)


def weight_gradient(layer: nn.Module, r: Tensor, dl_db: Tensor) -> Tensor:
    """Return Σ δ rᵀ for one example, written out."""
    if isinstance(layer, nn.Linear):
        return torch.outer(dl_db[0], r[0])
    (top, left), (down, right) = layer.padding, layer.stride
    padded = F.pad(r, (left, left, top, top))
    out = torch.zeros_like(layer.weight)
    for i in range(layer.kernel_size[0]):
        for j in range(layer.kernel_size[1]):
            rows, columns = dl_db.shape[2:]
            window = padded[:, :, i : i + down * rows : down, j : j + right * columns : right]
            out[:, :, i, j] = torch.einsum("nohw,nchw->oc", dl_db, window)
    return out
