"""The input of a linear layer, read off its gradient: dW = Σ δ_j r_jᵀ / N beside db = Σ δ_j / N.

One example: every row of dW is δ_i r, every entry of db is δ_i, so r = dW_i / db_i exactly (Phong et al. 2018). All
rows are used at once, as least squares, r = dbᵀ dW / ||db||². Rows of a batch mix examples:

- the last layer's row of class c is (p_c - 1) r for examples of that class and p_c r for the others, so dW_c / db_c
  is a weighted sum of their r with weights that add up to 1: one mixture per class, not an example;
- a row of a hidden layer that only one example of the batch activates (ReLU) gives that example exactly. Such rows
  show: several of them agree on the same r, while mixtures agree with nothing.

``Mixture`` is what a batch shows: dW = D X and db = D 1, with D (m, N) and the examples X (N, n). The rows of dW are
mixtures of the examples, so its N right singular vectors V span what the examples span. There an example is y with
x = V y, a row of dW is a row of ``rows`` = dW V = D Y, and every y lies on the plane ``plane`` · y = 1, for which
dW V plane = db. Who finds Y (``cocktail``, ``spear``) has unmixed the batch; its targets then follow from D, which is
the slope of the loss by the layer's output.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_alone, check_seen, differentiating
from gradveil.attacks.labels import read_at, with_labels
from gradveil.attacks.rounds import at_one_model, entry_weights
from gradveil.attacks.search.equations import Prior, input_equations, refuse_recurrent
from gradveil.attacks.search.gauss_newton import DenseStep, Descent, MatrixFree, Solver
from gradveil.errors import AttackError
from gradveil.gradients.functional import quiet
from gradveil.modules import Visit, copied_state, input_of, prefix, trace
from gradveil.ranges import Count
from gradveil.tree import named, norm
from gradveil.types import Observation, Reconstruction

FAINT = 1e-6  # of the largest: a row, a bias gradient or a singular value that is rounding


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

    def on_plane(self, directions: Tensor) -> Tensor:
        """Return the examples' rows y (N, N) of directions (N, N): their length is that at which db = D 1."""
        over = (directions @ self.plane)[:, None]
        return directions / over.where(over.abs() > 1e-30, torch.ones_like(over))

    def inputs(self, y: Tensor) -> Tensor:
        """Return the examples (N, *shape) of unmixed rows y (rank, rank); where fewer show, some come again."""
        found = y @ self.basis
        r = found[torch.arange(self.seen.num_examples, device=found.device) % len(found)]
        x = examples_behind(self.seen, self.layer, r)
        assert x is not None  # looked at in ``mixture_of``
        return x.clamp(*self.seen.bounds)

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
        weights = {n: entry_weights(self.seen, n).to(x) for n in free}
        far = norm({n: weights[n] * (g - gradient[n].to(g)) for n, g in zip(free, there, strict=True)})
        return float(far / norm({n: weights[n] * gradient[n].to(x) for n in free}))

    def explained(self, y: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """Return the examples and targets of unmixed rows y (rank, rank), and how far their gradient is off."""
        x = self.inputs(y)
        targets = self.targets(x, y)
        return x, targets, self.residual(x, targets)


def mixture_of(sent: Observation, attack: str) -> Mixture:
    """Return the mixture that an update shows; raise where the model or the update has none."""
    check_seen([sent], sizes_for=attack)
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
    if examples_behind(seen, visit.path, dw[:1].double()) is None:
        raise AttackError(
            f"{attack} reads examples off a first layer that is fully connected, and other layers lie before "
            f"{visit.path!r}. Use gs, newton or analytic."
        )
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


def behind(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer's output z (N, m), the model's, and the slopes (N, m, K) of the one by the other."""
    caught: list[Tensor] = []

    def hold(_: nn.Module, __: object, output: Tensor) -> Tensor:
        caught.append(output.detach().requires_grad_())
        return caught[-1].clone()  # what comes next may write to it

    handle = model.get_submodule(layer).register_forward_hook(hold)
    with torch.enable_grad(), quiet(model, transformed=False), handle:
        output = model(x)
        z, flat = caught[0], output.reshape(len(x), -1)
        slopes = [torch.autograd.grad(o.sum(), z, retain_graph=True)[0] for o in flat.unbind(1)]
    return z.detach(), output.detach(), torch.stack(slopes, -1)


SAME = 1e-3  # relative distance of two rows that show the same example
ROWS = 1024  # of the largest bias gradients that are looked at
DENSE = 1024  # unknowns up to which the Jacobian is written out
CG_STEPS = 60  # of conjugate gradients per step, beyond that


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer as an update shows them, N examples."""

    values: Tensor  # (N, L)
    known: Tensor  # (N, L) 1 or 0: whether an entry was seen at all
    std: Tensor  # (N, L) of the known noise in it


def readable_layer(seen: Observation) -> Visit:
    """Return the first fully connected layer that an example passes once, and whose gradients are seen."""
    dense = trace(seen.model, seen.input_shape).dense()
    seen_whole = [
        visit for visit in dense
        if len(visit.input_shape) == 1 and {named(visit.path, "weight"), named(visit.path, "bias")} <= set(seen.visible)
    ]  # fmt: skip
    if not seen_whole:
        raise AttackError(
            "The quotient dW/db needs a fully connected layer that each example passes once, and whose weight and bias "
            f"gradients are both seen. The model's fully connected layers: {', '.join(v.path for v in dense) or 'none'}"
            f"; the update shows: {', '.join(seen.visible)}."
        )
    told = [visit for visit in seen_whole if seen.update.gradient[named(visit.path, "bias")].any()]
    return (told or seen_whole)[0]  # a layer that got no gradient tells nothing


def layer_inputs(seen: Observation, visit: Visit) -> LayerInputs:
    """Return what the update shows of the layer's inputs."""
    weight, bias = named(visit.path, "weight"), named(visit.path, "bias")
    dw, db = seen.update.gradient[weight].double(), seen.update.gradient[bias].double()  # (O, L), (O,)
    mask = entry_weights(seen, weight).to(dw)
    noise = (seen.noise.get(weight, 0.0), seen.noise.get(bias, 0.0))
    by_class = seen.labels is not None and seen.loss.targets == "classes"
    if seen.num_examples == 1:
        share = db[None]  # one combination of all rows
    elif by_class and trace(seen.model, seen.input_shape).output == visit.path:
        share = torch.zeros(seen.num_examples, len(db)).to(db)
        assert seen.labels is not None
        share[torch.arange(seen.num_examples), seen.labels.to(db.device)] = 1.0
    else:
        share = agreeing_rows(dw, db, seen.num_examples)
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


def agreeing_rows(dw: Tensor, db: Tensor, count: int) -> Tensor:
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


@ATTACKS.register("analytic")
@dataclass(frozen=True)
class Analytic(Attack):
    """Take r = dW/db of the first fully connected layer with a bias, and find the input x with f(x) = r.

    No search for the gradient: one example's r is exact, whatever the other layers send (Phong et al. 2018). Where only
    a reshape or a scaling lies before the layer, x is read off; else f(x) = r is solved by Levenberg-Marquardt with
    the Gaussian prior, over the entries of r that were seen. ``analytic_rows`` says what a batch gives.
    """

    kind = "closed form"
    applies_to = (
        AppliesTo(("image",), "dense with bias", examples=(1, 1), default=""),
        AppliesTo(("table",), default=""),
        AppliesTo(),
    )

    steps: Count = 60  # of Levenberg-Marquardt, at most
    restarts: Count = 2  # the first from the prior's mean, others from draws of it

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        check_seen([seen], sizes_for="analytic")
        (sent,) = with_labels(at_one_model([seen]), [rng])
        seen = sent.as_one_step()
        visit = readable_layer(seen)
        check_alone(seen, visit.path)
        r = layer_inputs(seen, visit)
        shape = (seen.num_examples, *seen.input_shape)
        undone = examples_behind(seen, visit.path, r.values) if bool(r.known.all()) else None
        details = {"known": float(r.known.mean()), "iterations": 0.0}
        if undone is not None:
            x, objective = undone, 0.0
            converged = seen.num_examples == 1 and sent.update.num_steps == 1
        else:
            model = deepcopy(seen.model).double()
            refuse_recurrent(model)
            with differentiating(seen.model):
                x, objective, steps, late = self._search(replace(seen, model=model), visit.path, r, rng)
            converged = steps < self.steps and math.isfinite(objective) and not late
            details |= {"out_of_time": 1.0} if late else {}
            details["iterations"] = float(steps)
        inputs = x.reshape(shape).to(torch.float32).clamp(*seen.bounds)
        labels = seen.labels
        if labels is None and seen.num_examples == seen.update.num_steps == 1:
            labels = read_at(seen, inputs, rng)
        return Reconstruction(inputs, labels, objective, converged, details)

    def _search(self, seen: Observation, layer: str, r: LayerInputs, rng: Generator) -> tuple[Tensor, float, int, bool]:
        """Return the inputs (N, d) that the prior and the layer's inputs speak for, every example on its own."""
        alone = replace(seen, update=replace(seen.update, num_examples=1))
        prior = Prior.of(alone, 0, r.values.device)
        level = (r.known * r.values.square()).sum(1).div(r.known.sum(1).clamp_min(1)).sqrt().clamp_min(1e-12)
        center = prior.center().reshape(1, *seen.input_shape)
        f = prefix(seen.model, layer)
        rows = input_equations(seen.model, f, center, r.values, level[:, None], r.known, r.std)
        direction = DenseStep(prior) if prior.pixels <= DENSE else MatrixFree(prior, CG_STEPS)
        solver = Solver(prior, Descent(self.steps), direction, slice(None))
        away = prior.draw(len(r.values) * self.restarts, rng).reshape(-1, self.restarts, prior.pixels)
        away[:, 0] = 0.0
        best = solver.best(rows, prior.center() + away)
        return best.point, float(best.objective.mean()), int(best.steps.max()), bool(best.late.any())


def examples_behind(seen: Observation, layer: str, values: Tensor) -> Tensor | None:
    """Return the examples (N, *shape) behind inputs (N, L) of a layer, where a model only reshapes, scales and shifts
    each entry before it; else None."""
    state = copied_state(seen.model)  # the model itself, with its statistics in float64: a large one is not copied
    state |= {n: b.double() for n, b in seen.model.named_buffers() if b.is_floating_point()}
    with quiet(seen.model), suppress(RuntimeError):  # weights before the layer, in float32, do not fit the numbers
        return _unscaled(lambda x: input_of(seen.model, layer, x.clone(), state), values, seen.input_shape)
    model = deepcopy(seen.model).double()
    with quiet(model):
        return _unscaled(prefix(model, layer), values, seen.input_shape)


def _unscaled(f: Callable[[Tensor], Tensor], values: Tensor, input_shape: tuple[int, ...]) -> Tensor | None:
    if torch.Size(input_shape).numel() != values[0].numel():
        return None
    ramp = torch.linspace(0.1, 0.9, values[0].numel()).to(values).reshape(1, *input_shape)
    with torch.no_grad():
        shift, one, probe = (f(x).flatten() for x in (torch.zeros_like(ramp), torch.ones_like(ramp), ramp))
    scale = one - shift
    if not torch.allclose(probe, shift + scale * ramp.flatten()) or not bool(scale.all()):
        return None
    return ((values - shift) / scale).reshape(-1, *input_shape)
