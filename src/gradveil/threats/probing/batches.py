"""What a defence does before there is a gradient, to examples and representations, and what undoes that."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad

from gradveil.attacks.labels import recover_labels
from gradveil.countermeasures import Countermeasure
from gradveil.losses import Loss
from gradveil.protection.passes import Change, Changed, Rewired, apply, weight_name
from gradveil.threats.probing.findings import Found
from gradveil.threats.probing.function import Secret, close, has_slopes, own_numbers
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Batch, Observation

WIDEST = 4096  # numbers of an example up to which a linear change is written out


def _same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)


def find_on_batch(batch: Batch, secrets: Sequence[Secret]) -> Found:
    """Return what a defence does to the examples of a client, and the view that undoes it."""
    outs = [_on_batch(batch, secret) for secret in secrets[:3]]
    drawn = any(not _same(out, outs[0]) for out in outs[1:])
    if any(out.inputs.shape != batch.inputs.shape for out in outs):
        return Found("It trains on other examples as well, or on fewer.", explained=False, drawn=drawn)
    if all(torch.equal(out.inputs, batch.inputs) for out in outs):
        same = all(torch.equal(out.labels, batch.labels) for out in outs)
        what = "" if same else "It changes labels, which are read off the update as they were trained on."
        return Found(what, drawn=drawn)
    if any(not torch.equal(out.inputs, outs[0].inputs) for out in outs[1:]):
        return Found("It changes the examples at random.", explained=False, drawn=True)
    change = _change(batch, secrets[0])
    if change is None:
        return Found("It changes each example by a rule that has no slopes to follow.", explained=False)
    kept: dict[tuple[int, ...], Changed] = {}
    by_label = any(not torch.equal(_on_batch(other, secrets[0]).inputs, outs[0].inputs) for other in _relabelled(batch))

    def view(seen: Observation) -> Observation:
        label, key = batch.labels[:1], (id(seen.model),)
        if by_label:
            read = seen.labels if seen.labels is not None else recover_labels(seen, Generator().manual_seed(0))
            label = label if read is None else read[:1]
            key = (*key, *label.long().flatten().tolist())
        if key not in kept:
            known = change if not by_label else _change(Batch(batch.inputs, label.expand(len(batch))), secrets[0])
            kept[key] = Changed(seen.model, known or change)
        return replace(seen, model=kept[key])

    return Found("It changes the examples, and draws nothing secret: a server looks for what they were before.", view)


def _relabelled(batch: Batch) -> list[Batch]:
    """Return the batch with labels moved on by a few classes."""
    if batch.labels.is_floating_point():
        return []
    return [Batch(batch.inputs, (batch.labels - i).abs()) for i in (1, 2)]


def _change(batch: Batch, secret: Secret) -> Change | None:
    return _linear(batch, secret) or _differentiable(batch, secret)


def _on_batch(batch: Batch, secret: Secret) -> Batch:
    with own_numbers(secret.seed):
        return copy.deepcopy(secret.state).on_batch(batch, secret.rng())


def _runner(batch: Batch, secret: Secret) -> Change:
    def run(x: Tensor) -> Tensor:
        labels = batch.labels[:1].expand(len(x), *batch.labels.shape[1:])
        return _on_batch(Batch(x, labels), secret).inputs

    return run


def _linear(batch: Batch, secret: Secret) -> Change | None:
    """Return the change of an example as a matrix and a constant, where it is no more than that."""
    shape, d = batch.inputs.shape[1:], batch.inputs[0].numel()
    if d > WIDEST:
        return None
    run, draws = _runner(batch, secret), torch.rand(2, *shape, generator=Generator().manual_seed(0)).to(batch.inputs)
    units = torch.eye(d).reshape(d, *shape).to(batch.inputs)
    try:
        constant = run(torch.zeros_like(units[:1]))
        matrix = (run(units) - constant).reshape(d, -1)
        alone = torch.cat([run(one[None]) for one in draws])
    except Exception:  # of examples that no client has: whatever the defence's code makes of them
        return None

    def change(x: Tensor) -> Tensor:
        moved = x.reshape(len(x), -1) @ matrix.to(x) + constant.reshape(-1).to(x)
        return moved.reshape(len(x), *shape)

    return change if matrix.shape[1] == d and close(change(draws), alone) else None


def _differentiable(batch: Batch, secret: Secret) -> Change | None:
    """Return the change itself, where torch can follow it."""
    run, x = _runner(batch, secret), batch.inputs.double()
    step = 1e-3 * (x.flip(0).flip(-1) - x + 0.1)
    return run if has_slopes(run, x, step) else None


class Perturbed(Rewired):
    """The model with a defence in it that draws nothing secret: weight gradients come from r', as a client's do."""

    def __init__(self, model: nn.Module, secret: Secret, added: Params) -> None:
        super().__init__(model)
        self.held = (copy.deepcopy(model), secret, added)  # the weights that the server sent, whatever is tried

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output; a term that is zero carries what the defence adds to weight gradients."""
        sent, secret, added = self.held
        state, rng, handles = copy.deepcopy(secret.state), secret.rng(), []

        def hook(layer: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            r = args[0]
            moved = added[layer].to(r).expand_as(r) if layer in added else state.perturb(sent, layer, x, r, rng) - r
            before = sent.get_parameter(weight_name(layer)).detach().to(r)
            now: Tensor = module.weight  # type: ignore[assignment]
            return output + apply(module, moved, now, None) - apply(module, moved, before, None)

        try:
            for layer in state.layers(sent):
                handles.append(self.get_submodule(layer).register_forward_hook(partial(hook, layer)))
            output: Tensor = self.inner[0](x)
        finally:
            for handle in handles:
                handle.remove()
        return output


def simulate_perturb(
    model: nn.Module, clients: Sequence[Batch], secret: Secret, sent: Params, loss: Loss
) -> Countermeasure | None:
    """Return the server that has the defence in its own model; None where that does not give what a client sends."""
    added = _added(model, clients, secret)
    x, labels = clients[0].inputs.double(), clients[0].labels
    try:
        wrapped = Perturbed(model, secret, added)
        weights = {name: p.double() for name, p in parameters(model).items()}
        found = grad(lambda w: loss(functional_call(wrapped, w, (x,)), labels))(weights)
    except Exception:  # its code cannot be run on trials
        return None
    if not close(flatten(found), flatten({name: sent[name] for name in found}).double()):
        return None
    kept: dict[int, Perturbed] = {}

    def view(seen: Observation) -> Observation:
        if seen.update.num_steps > 1:
            return seen  # the weights move, and with them what it does
        if id(seen.model) not in kept:
            kept[id(seen.model)] = Perturbed(seen.model, secret, _added(seen.model, clients, secret))
        return replace(seen, model=kept[id(seen.model)])

    why = "Has the defence in its own model, whose weight gradients then come from the same changed representation."
    return Countermeasure("simulate", why, view)


def _added(model: nn.Module, clients: Sequence[Batch], secret: Secret) -> Params:
    """Return what a defence adds to the input of each layer, where that is the same for all examples."""
    moved: dict[str, list[Tensor]] = {}
    state, rng, sent = copy.deepcopy(secret.state), secret.rng(), copy.deepcopy(model)
    for batch in clients:
        for layer in state.layers(sent):
            seen: list[Tensor] = []
            handle = sent.get_submodule(layer).register_forward_hook(lambda _, args, __, to=seen: to.append(args[0]))
            with torch.no_grad():
                with own_numbers(secret.seed):
                    sent(batch.inputs)
                handle.remove()
                for r in seen:
                    with own_numbers(secret.seed):  # a defence that runs the model again meets the same dropout
                        moved.setdefault(layer, []).append(state.perturb(sent, layer, batch.inputs, r, rng) - r)
    return {layer: each[0][:1] for layer, each in moved.items() if close(each[0][:1], each[1][:1])}
