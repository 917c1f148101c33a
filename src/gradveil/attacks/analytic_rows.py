"""The input of a linear layer, read off its gradient: dW = Σ δ_j r_jᵀ / N beside db = Σ δ_j / N.

One example: every row of dW is δ_i r, every entry of db is δ_i, so r = dW_i / db_i exactly (Phong et al. 2018). All
rows are used at once, as least squares, r = dbᵀ dW / ||db||². Rows of a batch mix examples:

- the last layer's row of class c is (p_c - 1) r for examples of that class and p_c r for the others, so dW_c / db_c
  is a weighted sum of their r with weights that add up to 1: one mixture per class, not an example;
- a row of a hidden layer that only one example of the batch activates (ReLU) gives that example exactly. Such rows
  show: several of them agree on the same r, while mixtures agree with nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.trace import Visit, trace
from gradveil.errors import AttackError
from gradveil.types import Observation

SAME = 1e-3  # relative distance of two rows that show the same example
FAINT = 1e-6  # relative to the largest bias gradient: below it a quotient is 0/0
ROWS = 1024  # of the largest bias gradients that are looked at


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer as an update shows them, N examples."""

    values: Tensor  # (N, L)
    known: Tensor  # (N, L) 1 or 0: whether an entry was seen at all
    std: Tensor  # (N, L) of the known noise in it


def readable_layer(seen: Observation) -> Visit:
    """Return the first fully connected layer whose weight and bias gradients are both seen."""
    watched = trace(seen.model, seen.input_shape)
    for visit in watched.dense():
        weight, bias = f"{visit.path}.weight", f"{visit.path}.bias"
        if {weight, bias} <= set(seen.visible):
            return visit
    dense = ", ".join(visit.path for visit in watched.dense()) or "none"
    raise AttackError(
        "The quotient dW/db needs a fully connected layer whose weight and bias gradients are both seen. "
        f"The model's fully connected layers: {dense}; the update shows: {', '.join(seen.visible)}."
    )


def layer_inputs(seen: Observation, visit: Visit) -> LayerInputs:
    """Return what the update shows of the layer's inputs."""
    weight, bias = f"{visit.path}.weight", f"{visit.path}.bias"
    dw, db = seen.update.gradient[weight].double(), seen.update.gradient[bias].double()  # (O, L), (O,)
    mask = seen.weights[weight].to(dw).expand_as(dw) if weight in seen.weights else torch.ones_like(dw)
    noise = (seen.noise.get(weight, 0.0), seen.noise.get(bias, 0.0))
    if seen.num_examples == 1:
        share = db[None]  # one combination of all rows
    elif trace(seen.model, seen.input_shape).output == visit.path and seen.labels is not None:
        share = torch.zeros(seen.num_examples, len(db)).to(db)
        share[torch.arange(seen.num_examples), seen.labels.to(db.device)] = 1.0
    else:
        share = _agreeing_rows(dw, db, seen.num_examples)
    return _combined(dw, db, mask, share, noise)


def _combined(dw: Tensor, db: Tensor, mask: Tensor, share: Tensor, noise: tuple[float, float]) -> LayerInputs:
    """Return the quotient of the combinations ``share`` (N, O) of the rows of dW and db, entry by entry."""
    over = (share * db) @ mask  # (N, L); a row that is not seen takes no part in an entry
    known = over.abs() > FAINT * share.abs().amax(1, keepdim=True) * db.abs().amax()
    over = over.where(known, torch.ones_like(over))
    values = torch.where(known, share @ (mask * dw) / over, 0.0)
    size = (share.square() @ mask.square()).sqrt() / over.abs()
    std = size * (noise[0] ** 2 + noise[1] ** 2 * values.square()).sqrt()
    return LayerInputs(values, known.to(dw), std)


def _agreeing_rows(dw: Tensor, db: Tensor, count: int) -> Tensor:
    """Return combinations (count, O): each the rows that agree on one quotient, the largest agreements first."""
    order = db.abs().argsort(descending=True, stable=True)[:ROWS]
    order = order[db[order].abs() > FAINT * db.abs().max()]
    quotients = dw[order] / db[order, None]
    if not len(order):
        return torch.zeros(count, len(db)).to(db)
    apart = torch.cdist(quotients, quotients) / quotients.norm(dim=1).clamp_min(1e-12)
    same = apart < SAME  # (rows, rows)
    share, left = torch.zeros(count, len(db)).to(db), torch.ones(len(order), dtype=torch.bool, device=db.device)
    for n in range(count):
        votes = (same & left).sum(1).where(left, torch.full_like(order, -1))
        if not bool(left.any()):
            share[n] = share[0]
            continue
        members = same[votes.argmax()] & left
        share[n, order[members]] = db[order[members]]
        left &= ~members
    return share
