"""What the right answer is, worked out in plain autograd, for each method on each model of the zoo.

A check returns where the answer is right, raises ``GradveilError`` where the method refuses, ``NotApplicable`` where
the question makes no sense, and ``AssertionError`` where an answer is wrong without a word.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from compatibility.zoo import CLASSES, Model
from gradveil import leak_scores, protect, step_gradient
from gradveil.attacks.analytic import layer_inputs, readable_layer
from gradveil.attacks.base import ATTACKS, Malicious
from gradveil.attacks.inverter import Course
from gradveil.attacks.patches import clear_spans, span_rows
from gradveil.attacks.search.matching import Matching, MatchingObjective, Unknowns, squared_distance
from gradveil.errors import GradveilError
from gradveil.modules import find_layer
from gradveil.protection.defense import DEFENSES, Defense, accounted, build
from gradveil.protection.records import Held
from gradveil.representation import certify as reach
from gradveil.representation.certify import KINDS, certify
from gradveil.representation.problem import Problem
from gradveil.representation.scores import METHODS
from gradveil.types import Batch, GaussianPrior, Observation, Update
from reference.leak_scores import freeze_batch_norm

COUNT = 3  # examples; a batch as long as the sequences of the zoo are
SEED = 5
Check = Callable[[Model], None]


class NotApplicable(Exception):
    """The method has nothing to do with such a model."""


def rng() -> Generator:
    return Generator().manual_seed(SEED)


def close(found: Tensor, right: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


def rounding(model: Model) -> float:
    """Return how far two ways to compute the same number may be apart."""
    return {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1}[model.dtype] if not model.autocast else 0.1


# --- the model as it is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """A model's last linear layer on its examples."""

    r: Tensor  # (N, L)
    jacobian: Tensor  # (N, L, d), ∂r_n/∂x_n
    mixes: bool  # whether an example's representation moves with another example

    @property
    def norms(self) -> Tensor:
        return self.jacobian.norm(dim=2)

    @property
    def scores(self) -> Tensor:
        found = self.r.abs() / self.norms
        return torch.where(self.r == 0, 0.0, found)


@contextmanager
def watching(net: nn.Module, layer: str) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Within, collect the inputs and outputs of a layer."""
    caught: list[tuple[Tensor, Tensor]] = []
    handle = net.get_submodule(layer).register_forward_hook(
        lambda _, args, out: caught.append((args[0], out)), prepend=True
    )
    try:
        yield caught
    finally:
        handle.remove()


@cache
def truth(model: Model) -> Truth:
    """Return what autograd says, entry by entry. Batch statistics of batch norm are held, as the definition has it."""
    x, _ = model.examples(COUNT)
    net = freeze_batch_norm(bare(model.build()), x) if model.plain else bare(model.build())
    layer = find_layer(net)
    leaves, tree = tree_flatten(model.arguments(x))
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in leaves]
    free = [t for t in leaves if t.requires_grad]  # every one of several inputs counts
    torch.manual_seed(SEED)
    with watching(net, layer) as caught:
        model.call_with(net, *tree_unflatten(leaves, tree))
    r = caught[0][0].flatten(1)
    jacobian = torch.zeros(COUNT, r.shape[1], sum(t[0].numel() for t in free), dtype=torch.float64)
    mixes = len(r) != COUNT
    for n in range(COUNT if r.requires_grad and not mixes else 0):
        for i in range(r.shape[1]):
            each = torch.autograd.grad(r[n, i], free, retain_graph=True, materialize_grads=True)
            rows = torch.cat([g.double().flatten(1) for g in each], 1)
            jacobian[n, i] = rows[n]
            mixes |= bool(rows[[m for m in range(COUNT) if m != n]].any())
    return Truth(r.detach().double(), jacobian, mixes)


def bare(net: nn.Module) -> nn.Module:
    found: nn.Module = getattr(net, "_orig_mod", net)
    return found


def must_not_answer(model: Model) -> None:
    assert not truth(model).mixes, "examples see each other, and a representation per example was worked out"


# --- scores ----------------------------------------------------------------------------------------------------------


def check_scores(method: str, model: Model) -> None:
    """Compare with |r_i| / ||∂r_i/∂x||."""
    if not model.plain:
        raise NotApplicable
    net, (x, _) = model.build(), model.examples(COUNT)
    torch.manual_seed(SEED)
    found = leak_scores(net, None, x, method, probes=2000).double()
    must_not_answer(model)
    right = truth(model).scores
    assert torch.equal(found == 0, right == 0)
    assert torch.equal(found.isinf(), right.isinf())
    if method != "moment":  # an estimate without a guarantee: which entries are dead is all that can be checked
        live = right.isfinite() & (right > 0)
        tolerance = 0.1 if method == "sketch" else 0.0  # 2,000 random signs: six standard errors of a norm
        close(found[live].log(), right[live].log(), max(tolerance, rounding(model)))


# --- defences --------------------------------------------------------------------------------------------------------

SPECS = {"compose": "representation:share=0.4+gaussian:scale=0.01", "decoy": "decoy:floor=0.01"}


@dataclass
class Step:
    """One training step under a defence."""

    gradient: dict[str, Tensor]  # as the optimizer took it
    changes: list[tuple[str, Tensor, Tensor]]  # layer, r, r'


@contextmanager
def recorded(defense: Defense) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Within, note what the defence makes of each representation."""
    changes: list[tuple[str, Tensor, Tensor]] = []
    perturb = type(defense).perturb

    def noted(self: Defense, net: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        changed = perturb(self, net, layer, x, r, rng)
        changes.append((layer, r.detach().clone(), changed.detach().clone()))
        return changed

    with patch.object(type(defense), "perturb", noted):
        yield changes


def loss(model: Model, net: nn.Module, x: Tensor, y: Tensor, change: Any = None) -> Tensor:
    """Return the loss on x, or on what ``change`` makes of the one tensor that the model is called with."""
    torch.manual_seed(SEED)
    args, kwargs = model.arguments(x)
    if change is not None:
        leaves, tree = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([change(leaves[0])], tree)
    logits = model.call_with(net, args, kwargs)
    return F.cross_entropy(logits.float() if model.autocast else logits, y)


def protected_step(model: Model, defense: Defense) -> Step:
    """Take one step of SGD under ``protect`` and read the gradient off the weights."""
    net, (x, y) = model.build(), model.examples(COUNT)
    weights = {n: p for n, p in net.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in weights.items()}
    optimizer = torch.optim.SGD(list(weights.values()), lr=1.0)
    with recorded(defense) as changes, protect(net, defense, simulated=rng()):
        loss(model, net, x, y).backward()
        optimizer.step()
    return Step({n: before[n] - p.detach() for n, p in weights.items()}, changes)


def expected_step(model: Model, defense: Defense, changes: list[tuple[str, Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the gradient before the defence's own turn on it, from plain autograd and r' alone; None: not used."""
    net, (x, y) = model.build(), model.examples(COUNT)
    change = (lambda t: defense.on_batch(Batch(t, y), rng()).inputs) if "batch" in defense.acts_on else None
    weights = {n: p for n, p in net.named_parameters() if p.requires_grad}
    layer = bare(net).get_submodule(find_layer(bare(net)))
    with watching(bare(net), find_layer(bare(net))) as caught:
        value = loss(model, net, x, y, change)
    outs = [out for _, out in caught] if changes else []
    found = torch.autograd.grad(value, [*weights.values(), *outs], allow_unused=True)
    gradient = {n: g for n, g in zip(weights, found, strict=False) if g is not None}
    if changes:
        assert len(caught) == len(changes) == 1, "the layer ran more than once"
        delta, changed = found[-1], changes[0][2]
        assert delta is not None
        rows = [r.reshape(-1, r.shape[-1]).to(delta) for r in (caught[0][0], changed)]
        plain, defended = ((delta.reshape(-1, CLASSES).T @ r).to(layer.weight.dtype) for r in rows)
        parts = torch.autograd.grad(layer.weight, list(weights.values()), plain, allow_unused=True, retain_graph=True)
        for n, part in zip(weights, parts, strict=True):
            if part is not None:  # all of this gradient comes from the layer's own call, or some of it stays as it was
                close(gradient[n], part, rounding(model))
        parts = torch.autograd.grad(layer.weight, list(weights.values()), defended, allow_unused=True)
        gradient |= {n: part for n, part in zip(weights, parts, strict=True) if part is not None}
    return gradient


def check_defence(name: str, model: Model) -> None:
    """Compare a protected step with the gradient worked out by hand, and r' with the defence's own rule."""
    defense = build(SPECS.get(name, name))
    step = protected_step(model, defense)
    if "records" in defense.acts_on:
        check_records(model, defense, step)
        return
    if "batch" in defense.acts_on:
        assert len(tree_flatten(model.arguments(model.examples(1)[0]))[0]) == 1, "some inputs went as they were"
    if "representation" in defense.acts_on:
        assert step.changes, "a step went out undefended"
        check_change(name, model, *step.changes[0][1:])
    plain = expected_step(model, defense, step.changes)
    for weight, g in defense.on_gradient(plain, rng()).items():
        close(step.gradient[weight], g, rounding(model))
    if model.plain and not model.autocast:
        net, (x, y) = model.build(), model.examples(COUNT)
        torch.manual_seed(SEED)
        found = step_gradient(net, Batch(x, y), defense, rng())
        whole = {n: plain.get(n, torch.zeros_like(g)) for n, g in found.items()}
        for weight, g in defense.on_gradient(whole, rng()).items():
            close(found[weight], g, rounding(model))


def check_records(model: Model, defense: Defense, step: Step) -> None:
    """Compare a protected step with what the defence makes of each record's gradient, taken from a batch of one."""
    net, (x, y) = model.build(), model.examples(COUNT)
    weights = {n: p for n, p in net.named_parameters() if p.requires_grad}
    torch.manual_seed(SEED + 1)
    with torch.no_grad():
        if not torch.equal(model.call(net, x), model.call(net, x)):
            raise NotApplicable  # it draws random numbers, others for a batch of one
    alone = [
        torch.autograd.grad(
            loss(model, net, x[n : n + 1], y[n : n + 1]), list(weights.values()), materialize_grads=True
        )
        for n in range(COUNT)
    ]
    each = Held({n: torch.stack([g[i] for g in alone]).detach() for i, n in enumerate(weights)})
    for weight, g in accounted(defense).on_records(each, COUNT, rng()).items():
        close(step.gradient[weight], g, rounding(model))
    if model.plain and not model.autocast:
        found = step_gradient(model.build(), Batch(x, y), defense, rng())
        for weight, g in accounted(defense).on_records(each, COUNT, rng()).items():
            close(found[weight], g, rounding(model))


def check_change(name: str, model: Model, r: Tensor, changed: Tensor) -> None:
    """Check r' (N, L) against the rule of the defence of that name."""
    exact = truth(model)
    r, changed = r.flatten(1).double(), changed.flatten(1).double()
    close(r, exact.r, rounding(model))
    if name == "representation_direction":
        must_not_answer(model)
        moved = changed - r
        close(moved.norm(dim=1), 0.4 * r.norm(dim=1), max(1e-3, rounding(model)))
        reached = torch.stack([(_inverse(j) @ m).norm() for j, m in zip(exact.jacobian, moved, strict=True)])
        best = torch.stack([torch.linalg.matrix_norm(_inverse(j), 2) for j in exact.jacobian]) * moved.norm(dim=1)
        assert (reached >= best * (1 - max(1e-3, rounding(model)))).all(), "another direction moves the input more"
        return
    zeroed = changed != r
    assert not changed[zeroed].any(), "entries were changed, not removed"
    if name == "representation_authors":
        assert (zeroed[0] == zeroed).all()
        return
    if name == "representation_certified":
        return
    live = r != 0
    assert torch.equal(zeroed.sum(1), live.sum(1).clamp_max(round(0.4 * r.shape[1])))
    if name in ("representation", "compose"):
        must_not_answer(model)
        _check_ranking(exact.scores, zeroed, live, model)


def _inverse(jacobian: Tensor) -> Tensor:
    return torch.linalg.pinv(jacobian, rtol=0.01)  # type: ignore[no-any-return]


def _check_ranking(keys: Tensor, zeroed: Tensor, live: Tensor, model: Model) -> None:
    """Check that no entry was kept that ranks clearly above one that was removed."""
    lowest = keys.masked_fill(~zeroed, torch.inf).amin(1)
    highest = keys.masked_fill(zeroed | ~live, 0.0).amax(1)
    assert (lowest >= highest * (1 - max(rounding(model), 1e-6))).all(), "the wrong entries were removed"


# --- attacks ---------------------------------------------------------------------------------------------------------


def plain_gradient(model: Model, net: nn.Module, x: Tensor, y: Tensor, create: bool = False) -> dict[str, Tensor]:
    """Return the client's gradient on x with dropout off: the server does not know the client's masks."""
    weights = {n: p for n, p in net.named_parameters() if p.requires_grad}
    with still(net), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value = loss(model, net, x, y)
    found = torch.autograd.grad(value, list(weights.values()), create_graph=create, materialize_grads=True)
    return dict(zip(weights, found, strict=True))


@contextmanager
def still(net: nn.Module) -> Iterator[None]:
    """Within, no layer draws a random number."""
    random = [m for m in net.modules() if isinstance(m, nn.Dropout | nn.MultiheadAttention | nn.RReLU)]
    modes = [m.training for m in random]
    for m in random:
        m.training = False
    yield
    for m, mode in zip(random, modes, strict=True):
        m.training = mode


def squares(tree: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in tree.values()]).sum()


def less(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: a[n] - b[n] for n in a}


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    inner = torch.stack([(a[n].double() * b[n].double()).sum() for n in a]).sum()
    return 1 - inner / (squares(a) * squares(b)).sqrt()


def observed(model: Model, count: int, **more: Any) -> tuple[Observation, Tensor, Tensor]:
    """Return what a server sees of a client with so many examples, and the examples."""
    net, (x, y) = model.build(), model.examples(count)
    update = Update({n: g.detach() for n, g in plain_gradient(model, net, x, y).items()}, count)
    return Observation(net, update, model.shape, CLASSES, y, **more), x, y


SETTINGS: dict[str, dict[str, Any]] = {
    "dlg": {"inner": 2},
    "idlg": {"inner": 2},
    "gs": {"tv": 0.0},
    "fedavg": {"tv": 0.0},
    "surrogate": {"tv": 0.0},
    "newton": {"steps": 12, "floor": 0.01},
    "trap": {"share": 0.2},
    "fishing": {"target": 1, "attack": "newton:steps=2"},
    "inverter": {"pairs": 8},
}


def check_attack(name: str, model: Model) -> None:
    """Run the attack for a few steps and work out, in plain autograd, what it says that it reached."""
    if not model.plain:
        raise NotApplicable
    cls = ATTACKS.get(name)
    settings = {"steps": 2, "restarts": 1, **SETTINGS.get(name, {})}
    attack = cls(**{f.name: settings[f.name] for f in fields(cls) if f.name in settings})  # type: ignore[arg-type]
    if isinstance(attack, Malicious):
        _check_planted(model, attack)
        return
    count = 1 if name in ("idlg", "analytic", "newton") else 2
    seen, x, y = observed(model, count)
    if name == "newton":
        _check_newton(model, attack, x, y)
        return
    own = {"inverter": _check_inverter, "candidates": _check_candidates, "patches": _check_patches}
    own |= dict.fromkeys(("spear", "cocktail"), _check_unmixed)
    if name in own:
        own[name](model, attack)
        return
    if name in ("fedavg", "surrogate"):
        seen = _two_steps(model, seen, x, y)
    answer = attack.reconstruct(seen, rng())
    end = (answer.inputs if answer.raw is None else answer.raw).to(model.dtype)
    assert end.isfinite().all()
    tolerance = max(1e-5, rounding(model))
    target = seen.update.gradient
    if name in ("dlg", "idlg", "gs"):
        there = plain_gradient(model, seen.model, end, y)
        far = squares(less(there, target))
        right = cosine(there, target) if name == "gs" else far
        close(torch.tensor(answer.objective), right, tolerance)
        _check_slopes(model, seen, x, y)
    if name in ("fedavg", "surrogate"):
        place = answer.details.get("place")
        there = _unrolled(model, seen, end, y) if place is None else _between(model, seen, end, y, place)
        close(torch.tensor(answer.objective), cosine(there, target), tolerance)
    if name == "analytic":
        visit = readable_layer(seen)
        with still(seen.model), watching(seen.model, visit.path) as caught:
            model.call(seen.model, x)
        close(layer_inputs(seen, visit).values, caught[0][0].flatten(1), max(1e-4, rounding(model)))


def _check_planted(model: Model, attack: Malicious) -> None:
    """Where an attack is content, it read exactly what it planted for: the examples, or that one was fished."""
    (x, y), public = model.examples(2), Batch(*model.examples(40, seed=4))
    net = attack.plant(model.build(), model.shape, CLASSES, public, rng())
    update = Update({n: g.detach() for n, g in plain_gradient(model, net, x, y).items()}, 2)
    answer = attack.reconstruct(Observation(net, update, model.shape, CLASSES, y), rng())
    if attack.spec_name == "fishing":
        close(torch.tensor(answer.details["fished"]), torch.tensor(1.0), max(1e-3, rounding(model)))
    elif answer.converged:
        apart = torch.cdist(answer.inputs.flatten(1).double(), x.flatten(1).double()).amin(1)
        close(apart, torch.zeros(2), max(1e-3, rounding(model)))


def _check_slopes(model: Model, seen: Observation, x: Tensor, y: Tensor) -> None:
    """Compare the derivative that steers a search with that of plain autograd, at another point."""
    point = (0.5 * x + 0.2).detach()
    objective = MatchingObjective(
        Matching.of([seen]), Unknowns.of(seen), F.one_hot(y, CLASSES)[None].to(x), squared_distance
    )
    _, slope = objective(point.flatten()[None])
    free = point.clone().requires_grad_()
    far = squares(less(plain_gradient(model, seen.model, free, y, create=True), seen.update.gradient))
    (right,) = torch.autograd.grad(far, free, materialize_grads=True)
    close(slope, right.flatten()[None], max(1e-5, rounding(model)))


def _two_steps(model: Model, seen: Observation, x: Tensor, y: Tensor) -> Observation:
    update = Update(_unrolled(model, seen, x, y), len(x), num_steps=2, lr=0.1)
    return Observation(seen.model, update, model.shape, CLASSES, y)


def _unrolled(model: Model, seen: Observation, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the sum of the gradients of two steps of SGD."""
    net = model.build()
    total: dict[str, Tensor] = {}
    for _ in range(2):
        gradient = plain_gradient(model, net, x, y)
        with torch.no_grad():
            for n, p in net.named_parameters():
                if n in gradient:
                    p -= 0.1 * gradient[n]
        total = {n: g + total.get(n, 0.0) for n, g in gradient.items()}
    return total


def _between(model: Model, seen: Observation, x: Tensor, y: Tensor, place: float) -> dict[str, Tensor]:
    """Return the gradient at weights on the way from those sent to those received."""
    net = model.build()
    with torch.no_grad():
        for n, p in net.named_parameters():
            if n in seen.update.gradient:
                p -= place * seen.update.lr * seen.update.gradient[n]
    return plain_gradient(model, net, x, y)


def _check_inverter(model: Model, attack: Any) -> None:
    """What it learns from without a defence must be the client's gradients."""
    public = Batch(*model.examples(16, seed=4))

    def client(batch: Batch, _: Generator) -> dict[str, Tensor]:
        return plain_gradient(model, seen.model, batch.inputs, batch.labels)

    seen, _, _ = observed(model, 1, client=client, public=public)
    assert attack.reconstruct(seen, rng()).inputs.isfinite().all()
    course = Course(seen, features=10**9)
    course.collect(8)
    rows = torch.stack(course.rows)
    close(course.undefended(rows, torch.tensor(course.kinds)), rows, max(1e-5, rounding(model)))


def _check_unmixed(model: Model, attack: Any) -> None:
    """Its objective is how far the gradient of what it found is; where it is exact and content, it found them."""
    seen, x, _ = observed(model, 2)
    answer, target, tolerance = attack.reconstruct(seen, rng()), seen.update.gradient, max(1e-3, rounding(model))
    assert answer.labels is not None
    there = plain_gradient(model, seen.model, answer.inputs.to(x), answer.labels)
    close(torch.tensor(answer.objective), (squares(less(there, target)) / squares(target)).sqrt(), tolerance)
    if answer.converged and attack.spec_name == "spear":
        apart = torch.cdist(x.double().flatten(1), answer.inputs.double().flatten(1)).amin(1)
        close(apart, torch.zeros_like(apart), tolerance)


def _check_patches(model: Model, attack: Any) -> None:
    """The true example fulfils the equations that others do not."""
    seen, x, _ = observed(model, 1)
    net = copy.deepcopy(seen.model).double().requires_grad_(False)
    spans, _ = clear_spans(seen, net)
    at = torch.cat([x, model.examples(2, seed=4)[0]]).double().flatten(1)
    there, *others = span_rows(seen, net, spans, at).rms[:, 0].tolist()
    assert there < 1e-2 * min(others)
    assert attack.reconstruct(seen, rng()).inputs.isfinite().all()


def _check_candidates(model: Model, attack: Any) -> None:
    """One of two examples is among four: it is found, and the likelihood is that of plain gradients."""
    seen, _, _ = observed(model, 2)
    x, y = model.examples(5)
    plain = plain_gradient(model, seen.model, x[:2], y[:2])
    noise = {n: 0.1 * float(g.float().square().mean().sqrt()) + 1e-6 for n, g in plain.items()}
    sent = {n: g + noise[n] * torch.randn(g.shape, generator=rng()).to(g) for n, g in plain.items()}
    update = replace(seen.update, gradient=sent)
    known = {"candidates": Batch(x[1:], y[1:]), "others": Batch(x[:1], y[:1])}
    answer = attack.reconstruct(replace(seen, update=update, noise=noise, **known), rng())
    assert torch.equal(answer.inputs.to(x), x[1:2])
    total = sum(
        (g.double() / noise[n]).square().sum() + g.numel() * math.log(2 * math.pi * noise[n] ** 2)
        for n, g in less(plain, sent).items()
    )
    close(torch.tensor(answer.objective), torch.as_tensor(total) / 2, max(1e-3, rounding(model)))


def _check_newton(model: Model, attack: Any, x: Tensor, y: Tensor) -> None:
    """From a start near the truth the distance of gradients must fall."""
    start = (x + 0.05 * (torch.rand(x.shape, generator=rng(), dtype=torch.float64).to(x) - 0.5)).clamp(0, 1)
    public = Batch(*model.examples(16, seed=4))
    seen, _, _ = observed(model, 1, prior=GaussianPrior.white(start.flatten().double(), 0.1), public=public)
    answer = attack.reconstruct(seen, rng())
    target = seen.update.gradient
    ended, began = (
        squares(less(plain_gradient(model, seen.model, at.to(x), y), target)) for at in (answer.inputs, start)
    )
    assert ended <= 0.95 * began, f"went from {began} to {ended}"


# --- certificates ----------------------------------------------------------------------------------------------------

TRIALS = 6


def check_certificate(kind: str, model: Model) -> None:
    """Look for an image that has the representation r' and lies nearer than the bound allows."""
    if not model.plain:
        raise NotApplicable
    net, (x, _) = model.build(), model.examples(1)
    layer = find_layer(bare(net))
    torch.manual_seed(SEED)
    with torch.no_grad(), still(net), watching(bare(net), layer) as caught:
        model.call(net, x)
        r = caught[0][0].flatten(1)
        others = _nearby(x)
        targets = []
        for other in others:  # each alone, so that a batch does not change what an image is mapped to
            model.call(net, other)
            targets.append(caught[-1][0].flatten(1))
    changed = r.clone()
    changed.view(-1)[r.abs().argmax()] = 0
    settings: dict[str, Any] = {"residual": 0.01} if kind == "residual" else {}
    if kind == "empirical":
        _check_empirical(net, layer, x, changed, model)
        return
    sets = (x.expand(TRIALS, *x.shape[1:]), torch.cat(targets))
    found = certify(net, None, *sets, kind=kind, **settings)  # type: ignore[arg-type]
    if kind == "local":
        _check_local(found.bound, model, net, layer, x, torch.cat(targets))
        return
    far = torch.stack([(o - x).double().norm() for o in others])
    assert (found.bound <= far * (1 + 1e-9) + 1e-12).all(), "an image that has r' lies within the bound"
    assert not certify(net, None, x, r, kind=kind, **settings).bound.any(), "a bound where nothing was changed"  # type: ignore[arg-type]


def _nearby(x: Tensor) -> list[Tensor]:
    """Return other images of the data range: anywhere, near, and on its corners."""
    gen = Generator().manual_seed(11)
    found = []
    for i in range(TRIALS):
        away = torch.rand(x.shape, generator=gen, dtype=torch.float64).to(x)
        size = (1.0, 0.3, 0.05)[i % 3]
        other = x + size * (away - x)
        found.append(other.round() if i % 6 == 5 else other)
    return found


def _check_local(bound: Tensor, model: Model, net: nn.Module, layer: str, x: Tensor, targets: Tensor) -> None:
    """The first-order figure is ||r - r'|| over the largest singular value of the Jacobian."""
    net, x = freeze_batch_norm(bare(net), x).double(), x.double()
    free = x.detach().clone().requires_grad_()
    torch.manual_seed(SEED)
    with still(net), watching(net, layer) as caught:
        net(free)
    r = caught[0][0].flatten()
    rows = [
        torch.autograd.grad(e, free, retain_graph=True, materialize_grads=True)[0].flatten() if r.requires_grad
        else torch.zeros(x.numel())
        for e in r
    ]  # fmt: skip
    size = torch.linalg.matrix_norm(torch.stack(rows).double(), 2)
    far = (r.detach() - targets).double().norm(dim=1)
    close(torch.where(bound.isfinite(), bound, 0.0), torch.where(size > 0, far / size, 0.0), max(0.01, rounding(model)))


def _check_empirical(net: nn.Module, layer: str, x: Tensor, changed: Tensor, model: Model) -> None:
    """What a short inversion reached: the distance and the residual are those of one image."""
    problem = Problem.make(net, layer, x, changed, 2.0)
    images: list[Tensor] = []
    invert = reach.invert

    def kept(*args: Any) -> tuple[Tensor, Tensor]:
        found = invert(*args, steps=3, restarts=1)
        images.append(found[0])
        return found

    with patch.object(reach, "invert", kept):
        found = reach.empirical_certificate(problem)
    torch.manual_seed(SEED)
    with torch.no_grad(), still(net), watching(bare(net), layer) as caught:
        net(images[0])
    close(found.bound, (images[0] - x).double().flatten(1).norm(dim=1), rounding(model))
    far = (caught[0][0].flatten(1) - changed).double().norm(dim=1)
    close(found.details["residual"], far, max(1e-6, rounding(model)))


# --- the whole table -------------------------------------------------------------------------------------------------


def _each(check: Callable[[str, Model], None], names: Any) -> dict[str, Check]:
    return {name: (lambda model, name=name: check(name, model)) for name in names}


COLUMNS: dict[str, dict[str, Check]] = {
    "scores": _each(check_scores, [name for name in METHODS if name != "auto"]),
    "defences": _each(check_defence, DEFENSES.names()),
    "attacks": _each(
        check_attack, [name for name in ATTACKS.names() if ATTACKS.get(name).__module__.startswith("gradveil.")]
    ),
    "certificates": _each(check_certificate, KINDS),
}


@dataclass(frozen=True)
class Cell:
    """What a method does with a model."""

    outcome: str  # right, refused, not applicable, or wrong
    words: str = ""  # of the refusal, or what was wrong


def cell(check: Check, model: Model) -> Cell:
    """Run one check."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check(model)
        except GradveilError as error:
            return Cell("refused", str(error))
        except NotApplicable:
            return Cell("not applicable")
        except Exception as error:  # an assertion, or an error that tells the user nothing
            return Cell("wrong", f"{type(error).__name__}: {error}")
    return Cell("right")
