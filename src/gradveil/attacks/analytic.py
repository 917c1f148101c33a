"""Read the input of a dense layer off its gradients, then invert what lies before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.labels import with_labels
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.matching import Matching, group, squared_distance
from gradveil.attacks.search import Search
from gradveil.attacks.trace import Visit, trace
from gradveil.errors import AttackError
from gradveil.layers import prefix
from gradveil.tree import Params
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("analytic")
@dataclass(frozen=True)
class Analytic(Attack):
    """Divide dW by db in the first dense layer with a bias: its input, exactly, for one example and one step.

    A row of a dense layer's gradient is δ_c r, and that of its bias δ_c, so r = dW_c / db_c (Aono et al. 2017); the
    row with the largest |db| is taken. Columns whose weight is zero in the matching are left out. Where nothing but
    a reshaping lies before the layer, r is the input; else ||f(x) - r||² is minimised from several starts.

    For more examples a row mixes them: example i gets the row of its class where the layer gives the logits, and
    the row of rank i by |db| elsewhere. That is an estimate, exact only where no two examples share a row.
    """

    steps: int = 300  # evaluations / 20 per start, where the layer's prefix must be inverted
    restarts: int = 4
    history: int = 50
    tol: float = 1e-6  # of ||r||²

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates at once."""
        known = with_labels(seen, rngs)
        found: dict[int, Reconstruction] = {}
        for members in group(known):
            views = [known[i] for i in members]
            layer = _first_dense(views[0])
            r = torch.stack([_representation(s, layer) for s in views])  # (P, N, L)
            if _is_reshaping(views[0], layer):
                solved = [_directly(s, row) for s, row in zip(views, r, strict=True)]
            else:
                solved = self._invert(views, [rngs[i] for i in members], layer.path, r)
            found |= dict(zip(members, solved, strict=True))
        return [found[i] for i in range(len(seen))]

    def _invert(
        self, views: Sequence[Observation], rngs: Sequence[Generator], layer: str, r: Tensor
    ) -> list[Reconstruction]:
        place = {id(view): i for i, view in enumerate(views)}

        def stack(part: Sequence[Observation]) -> Matching:
            mine = [place[id(view)] for view in part]
            return _matching(part, layer, r[mine])

        search = Search(
            squared_distance, lambda _: LBFGS(self.history, True), 20 * self.steps, self.restarts,
            tol=self.tol, cuts=(0.05, 0.15), stack=stack,
        )  # fmt: skip
        return search.run(views, rngs)


def _first_dense(seen: Observation) -> Visit:
    """Return the first dense layer in running order whose weight and bias are both seen."""
    for visit in trace(seen.model, seen.input_shape).dense():
        if {f"{visit.path}.weight", f"{visit.path}.bias"} <= set(seen.visible):
            return visit
    raise AttackError("analytic needs a dense layer whose weight and bias gradients are both seen; there is none.")


def _representation(seen: Observation, layer: Visit) -> Tensor:
    """Return dW_c / db_c for each example: (N, L)."""
    dw, db = (seen.update.gradient[f"{layer.path}.{part}"].detach() for part in ("weight", "bias"))
    n = seen.num_examples
    ranked = db.abs().argsort(descending=True, stable=True)
    rows = ranked[torch.arange(n) % len(ranked)]
    if n > 1 and seen.labels is not None and len(db) == seen.num_classes:
        rows = seen.labels
    divisor = db[rows]
    divisor = torch.where(divisor.abs() > torch.finfo(db.dtype).tiny, divisor, torch.ones_like(divisor))
    return dw[rows] / divisor[:, None]


def _is_reshaping(seen: Observation, layer: Visit) -> bool:
    """Return whether the layer's input is the model's input, only of another shape."""
    size = torch.Size(seen.input_shape).numel()
    if torch.Size(layer.input_shape).numel() != size:
        return False
    like = next(seen.model.parameters())
    probe = torch.linspace(0.1, 0.9, size, dtype=like.dtype, device=like.device).reshape(1, *seen.input_shape)
    with torch.no_grad():
        return torch.equal(prefix(seen.model, layer.path)(probe).flatten(), probe.flatten())


def _directly(seen: Observation, r: Tensor) -> Reconstruction:
    low, high = seen.bounds
    inputs = r.reshape(-1, *seen.input_shape).nan_to_num(nan=(low + high) / 2).clamp(low, high)
    exact = seen.num_examples == 1 and seen.update.num_steps == 1
    return Reconstruction(inputs, seen.labels, 0.0, exact, {"iterations": 0.0, "starts": 1.0})


def _matching(views: Sequence[Observation], layer: str, r: Tensor) -> Matching:
    """Return the inversion of f as a matching problem with one tensor: the representation."""
    weight = f"{layer}.weight"
    kept = [(s.weights[weight] > 0).any(0).to(r) if weight in s.weights else r.new_ones(r.shape[2]) for s in views]
    weights = {"r": torch.stack(kept)[:, None, :].expand_as(r)}  # (P, N, L)
    return Matching(views[0].model, ("r",), {"r": r}, weights, r.new_zeros(len(r)), _forward(views[0], layer))


def _forward(seen: Observation, layer: str) -> Callable[[Tensor, Tensor], Params]:
    f = prefix(seen.model, layer)

    def trial(x: Tensor, _: Tensor) -> Params:
        return {"r": f(x.flatten(0, 1)).reshape(*x.shape[:2], -1)}

    return trial
