"""A batch as a first fully connected layer shows it: dW = D X and db = D 1, with D (m, N) and the examples X (N, n).

The rows of dW are mixtures of the examples, so its N right singular vectors V span what the examples span. There an
example is y with x = V y, a row of dW is a row of ``rows`` = dW V = D Y, and every y lies on the plane
``plane`` · y = 1, for which dW V plane = db. Who finds Y (an attack) has unmixed the batch; its targets then follow
from D, which is the slope of the loss by the layer's output.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradveil.attacks.analytic import readable_layer, undo_scaling
from gradveil.attacks.base import check_alone, refuse_adaptive
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.modules import prefix
from gradveil.tree import named
from gradveil.types import Observation

FAINT = 1e-6  # of the largest: a row, or a singular value, that is rounding


@dataclass(frozen=True)
class Mixture:
    """What an update of N examples shows of a first fully connected layer, in double precision."""

    seen: Observation  # as one step, with the model in double precision
    layer: str
    rank: int  # how many examples show: N, or fewer where some are alike or without a gradient
    basis: Tensor  # (rank, n): V
    rows: Tensor  # (m, rank): D Y
    plane: Tensor  # (rank,)
    weight: Tensor  # (m, n)
    bias: Tensor  # (m,)
    noise: float  # std of one entry of dW, from what no batch of N can explain
    dw: Tensor  # (m, n)
    db: Tensor  # (m,)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the least and the largest that the layer's inputs (n,) can be."""
        f = prefix(self.seen.model, self.layer)
        ends = [torch.full((1, *self.seen.input_shape), end).to(self.basis) for end in self.seen.bounds]
        with torch.no_grad(), quiet(self.seen.model):
            first, last = (f(x).flatten() for x in ends)
        return torch.minimum(first, last), torch.maximum(first, last)

    def inputs(self, y: Tensor) -> Tensor:
        """Return the examples (N, *shape) of unmixed rows y (rank, rank); where fewer show, some come again."""
        found = y @ self.basis
        r = found[torch.arange(self.seen.num_examples, device=found.device) % len(found)]
        shape = (len(r), *self.seen.input_shape)
        with quiet(self.seen.model):
            x = undo_scaling(prefix(self.seen.model, self.layer), r, shape)
        assert x is not None  # looked at in ``mixture_of``
        return x.reshape(shape).clamp(*self.seen.bounds)

    def targets(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the targets of examples x (N, *shape) with unmixed rows y (rank, rank); None: they do not show.

        The slope of the loss by the outputs is what the layer's slope D is made of, in least squares.
        """
        d = torch.linalg.lstsq(y.T.cpu(), self.rows.T.cpu()).solution.to(x)  # (rank, m), as rows = Dᵀ y
        _, output, jacobian = behind(self.seen.model, self.layer, x)
        d = d[torch.arange(len(x), device=x.device) % self.rank, :, None]
        slopes = torch.linalg.lstsq(jacobian.cpu(), d.cpu(), driver="gelsd").solution[..., 0]
        return self.seen.loss.read(output, slopes.to(x).reshape(output.shape))

    def residual(self, x: Tensor, targets: Tensor | None) -> float:
        """Return how far the gradient of examples and targets is from the update's, relative; infinite: no targets."""
        if targets is None:
            return math.inf
        model, gradient = self.seen.model, self.seen.update.gradient
        free = {n: p for n, p in model.named_parameters() if n in self.seen.visible}
        with torch.enable_grad(), quiet(model, transformed=False):
            loss = self.seen.loss(model(x), targets.to(x.device))
            there = torch.autograd.grad(loss, list(free.values()), allow_unused=True, materialize_grads=True)
        weights = {n: self.seen.weights.get(n, torch.ones(())).to(x) for n in free}
        far = sum((weights[n] * (g - gradient[n].to(g))).square().sum() for n, g in zip(free, there, strict=True))
        size = sum((weights[n] * gradient[n].to(x)).square().sum() for n in free)
        return float(torch.as_tensor(far / size).sqrt())

    def explained(self, y: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """Return the examples and targets of unmixed rows y (rank, rank), and how far their gradient is off."""
        x = self.inputs(y)
        targets = self.targets(x, y)
        return x, targets, self.residual(x, targets)


def mixture_of(sent: Observation, attack: str) -> Mixture:
    """Return the mixture that an update shows; raise where the model or the update has none."""
    refuse_adaptive([sent], attack)
    seen = sent.as_one_step()
    visit = readable_layer(seen)
    check_alone(seen, visit.path)
    count, weight, bias = seen.num_examples, named(visit.path, "weight"), named(visit.path, "bias")
    dw = seen.update.gradient[weight]
    if count >= min(dw.shape):
        raise AttackError(
            f"{attack} needs fewer examples than {visit.path!r} has inputs and outputs: {count} examples, and dW is "
            f"{dw.shape[0]} x {dw.shape[1]}. Use gs or analytic."
        )
    if any(not bool(seen.weights[n].all()) for n in (weight, bias) if n in seen.weights):
        raise AttackError(f"{attack} needs every entry of the gradient of {visit.path!r}, and some are not seen.")
    seen = replace(seen, model=deepcopy(seen.model).double().requires_grad_())
    _check_first(seen, visit.path, dw.shape[1], attack)
    return mixed(seen, visit.path)


def mixed(seen: Observation, layer: str) -> Mixture:
    """Return what the update of one step, seen at a model in double precision, shows of a fully connected layer."""
    weight, bias = named(layer, "weight"), named(layer, "bias")
    dw, db = (seen.update.gradient[name].double() for name in (weight, bias))
    _, sizes, vt = torch.linalg.svd(dw, full_matrices=False)
    rank = max(1, int((sizes[: seen.num_examples] > FAINT * sizes[0]).sum()))
    rest = float(sizes[rank]) / (math.sqrt(dw.shape[0]) + math.sqrt(dw.shape[1]))
    rows = dw @ vt[:rank].T
    plane = torch.linalg.lstsq(rows, db[:, None]).solution[:, 0] if bool(db.any()) else torch.ones(rank).to(rows)
    module = seen.model.get_submodule(layer)
    w, b = (getattr(module, name).detach() for name in ("weight", "bias"))
    return Mixture(seen, layer, rank, vt[:rank], rows, plane, w, b, max(rest, seen.noise.get(weight, 0.0)), dw, db)


def _check_first(seen: Observation, layer: str, size: int, attack: str) -> None:
    """Raise where more than a reshape or a scaling lies before the layer."""
    r = torch.zeros(1, size).to(next(seen.model.parameters()))
    with quiet(seen.model):
        x = undo_scaling(prefix(seen.model, layer), r, (1, *seen.input_shape))
    if x is None:
        raise AttackError(
            f"{attack} reads examples off a first layer that is fully connected, and other layers lie before "
            f"{layer!r}. Use gs, newton or analytic."
        )


@contextmanager
def _held(layer: nn.Module, caught: list[Tensor]) -> Iterator[None]:
    """Within, what the layer gives is a leaf that gradients are taken by; it is put into ``caught``."""

    def hold(_: nn.Module, __: object, output: Tensor) -> Tensor:
        caught.append(output.detach().requires_grad_())
        return caught[-1].clone()  # what comes next may write to it

    handle = layer.register_forward_hook(hold)
    try:
        yield
    finally:
        handle.remove()


def behind(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer's output z (N, m), the model's, and the slopes (N, m, K) of the one by the other."""
    caught: list[Tensor] = []
    with torch.enable_grad(), quiet(model, transformed=False), _held(model.get_submodule(layer), caught):
        output = model(x)
        z, flat = caught[0], output.reshape(len(x), -1)
        slopes = [torch.autograd.grad(o.sum(), z, retain_graph=True)[0] for o in flat.unbind(1)]
    return z.detach(), output.detach(), torch.stack(slopes, -1)
