"""Clients side by side in one step: their defended layers, and their records, by stacked weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.defenses.compose import parts_of
from gradveil.defenses.representation import RepresentationPerturbation
from gradveil.losses import Loss
from gradveil.modules import representation
from gradveil.privacy.noise import Source
from gradveil.protection.capture import records_of
from gradveil.protection.defense import Accounted, Defense, accounted
from gradveil.protection.layers import KINDS, known
from gradveil.protection.passes import substitute
from gradveil.protection.records import Captured
from gradveil.representation import scores as api
from gradveil.representation.matrices import StackedRows
from gradveil.representation.recorder import walk, walkable
from gradveil.representation.rows import RowNorms, scores
from gradveil.representation.selection import largest_live_each
from gradveil.tree import Params
from gradveil.types import Batch


def why_no_masks(model: nn.Module, defense: Defense, x: Tensor) -> str | None:
    """Return why the representations of this defence's clients cannot be perturbed together; ``None``: they can.

    ``x`` is one batch, of which only the shape matters.
    """
    layers = set()
    for part in parts_of(defense):
        if "representation" not in part.acts_on:
            continue
        if not isinstance(part, RepresentationPerturbation) or not _is_plain(part):
            return "the defence acts on each client's representation by a rule of its own"
        layers |= set(part.layers(model))
    if len(layers) > 1:
        return f"the defences act on several layers ({', '.join(sorted(layers))})"
    if layers and StackedRows.of(model, layers.pop(), x) is None:
        return "the defended layer does not follow a plain chain of convolutions and activations"
    return None


def _perturbing(defense: Defense) -> list[RepresentationPerturbation]:
    return [part for part in parts_of(defense) if isinstance(part, RepresentationPerturbation)]


def _is_plain(defense: RepresentationPerturbation) -> bool:
    """Whether the defence is the paper's rule; share, count and layer may differ from client to client."""
    return defense.p == 2 and defense.method in ("auto", "exact")


class Masks:
    """Perturbs the input of one layer for K clients; ``counts`` lies on the device, as a CUDA graph needs it."""

    def __init__(self, model: nn.Module, defense: Defense, x: Tensor, clients: int) -> None:
        self.model = model
        (self.layer,) = {layer for part in parts_of(defense) for layer in part.layers(model)}
        rows = StackedRows.of(model, self.layer, x)
        assert rows is not None
        self.rows = rows
        self.like = representation(model, self.layer, x)  # of which only the size matters
        self.counts = torch.zeros(clients, 1, 1, dtype=torch.int64, device=x.device)
        self.exact = torch.zeros(clients, 1, 1, dtype=torch.bool, device=x.device)  # whoever asks for exact scores
        self.asked = {part.method for part in _perturbing(defense)}
        self.effort = api.effort(walk(walkable(model, self.layer, x) or [], x[:1]))  # of one example's exact scores

    def use(self, defenses: list[Defense]) -> None:
        """Take each client's number of entries, and whether its scores are exact, from its own defence."""
        parts = [_perturbing(defense) for defense in defenses]
        counts = [sum(part.budget(self.like) for part in some) for some in parts]
        self.counts.copy_(torch.tensor(counts).view(-1, 1, 1), non_blocking=True)
        exact = [any(part.method == "exact" for part in some) for some in parts]
        self.exact.copy_(torch.tensor(exact).view(-1, 1, 1), non_blocking=True)

    def _rows(self, weights: Params, x: Tensor, present: Tensor) -> RowNorms:
        """Return r and the norms of its rows, as each client alone would have them: exact, or as ``auto`` chooses."""
        if self.asked == {"exact"} or self.effort * x.shape[1] <= api.BUDGET:
            return self.rows(weights, x)
        quick = self.rows.moment(weights, x)
        if self.asked == {"auto"} and self.effort > api.BUDGET:
            return quick
        exact = self.exact | (present.sum(1)[:, None, None] * self.effort <= api.BUDGET)
        slow = self.rows(weights, x)
        return RowNorms(quick.r, {2.0: torch.where(exact, slow.norms[2.0], quick.norms[2.0])})

    def perturbed(self, weights: Params, x: Tensor, present: Tensor) -> Tensor:
        """Return r' (K, B, L) for stacked weights and inputs (K, B, ...), of which some are present (K, B)."""
        rows = self._rows(weights, x, present)
        chosen = largest_live_each(rows.r, scores(rows.r, rows.norms, 2.0), self.counts)
        return rows.r.masked_fill(chosen, 0.0)

    def forward(self, weights: Params, x: Tensor, perturbed: Tensor) -> Tensor:
        """Return one client's logits; the defended layer's weight gradient comes from ``perturbed`` (B, L)."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
            return substitute(module, args[0], perturbed.view_as(args[0]))

        handle = self.model.get_submodule(self.layer).register_forward_hook(hook)
        try:
            logits: Tensor = functional_call(self.model, weights, (x,))
        finally:
            handle.remove()
        return logits


def why_no_records(model: nn.Module, defense: Defense, few: Batch, loss: Loss) -> str | None:
    """Return why the records of this defence's clients cannot be taken together; ``None``: they can."""
    parts = parts_of(defense)
    acting = [part for part in parts if "records" in part.acts_on]
    if any(type(accounted(part)).on_stacked is Accounted.on_stacked for part in acting):
        return "the defence acts on the records of one client at a time"
    if any("representation" in part.acts_on for part in parts):
        return "some defences act on records and others on representations"
    return None if output_shapes(model, few, loss) else "the model has layers whose gradients are not known by record"


def records_together(
    model: nn.Module, weights: Params, inputs: Tensor, labels: Tensor, loss: Loss, outputs: dict[nn.Module, torch.Size]
) -> Captured:
    """Return the gradients of K clients' records at their own weights (K, *shape): inputs (K, N, ...), labels (K, N).

    ``outputs``: the shape of each layer's output for one record (see ``output_shapes``). A zero is added to every
    output, and the loss's gradient by it is δ.
    """
    layers = known(model) or {}

    def value(taps: list[Tensor], own: Params, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        inside: dict[nn.Module, Tensor] = {}

        def look(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            inside[module] = args[0]
            return output + taps[order[module]]

        handles = [m.register_forward_hook(look, prepend=True) for m in layers]
        try:
            result = loss.each(functional_call(model, own, (x,)), y).sum()
        finally:
            for handle in handles:
                handle.remove()
        return result, [inside[m] for m in layers]

    order = {m: i for i, m in enumerate(layers)}
    like = next(iter(weights.values()))
    taps = [like.new_zeros(*inputs.shape[:2], *outputs[m]) for m in layers]
    deltas, inside = vmap(grad(value, has_aux=True))(taps, weights, inputs, labels)
    found = [KINDS[type(m)](m, layers[m], a.detach(), d) for m, a, d in zip(layers, inside, deltas, strict=True)]
    return Captured(found, {n: w[0].detach() for n, w in weights.items()}, tuple(inputs.shape[:2]))


def output_shapes(model: nn.Module, batch: Batch, loss: Loss) -> dict[nn.Module, torch.Size] | None:
    """Return the shape of each trained layer's output for one record; None where the records cannot be stacked."""
    records = records_of(model, batch, loss)
    if not isinstance(records, Captured):
        return None
    return {seen.layer: seen.delta.shape[2:] for seen in records.layers}


class StackedRecords:
    """Steps of K clients whose defences act on their records."""

    def __init__(self, model: nn.Module, few: Batch, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.shapes = output_shapes(model, few, loss) or {}

    def gradients(
        self,
        weights: Params,
        batch: tuple[Tensor, Tensor],
        parts: Tensor,
        slots: Tensor,
        rngs: Sequence[Source],
        defenses: Sequence[Defense],
        same: int = 1,
    ) -> Params:
        """Return each client's defended gradient (K, *shape); ``parts`` (K, B) is above 0 where there is a record.

        ``same``: how many clients each, one after the other, have the same weights.
        """
        records = self._records(weights, *batch, same)
        found: list[Params] = []
        for start, end in _runs(defenses):
            some, defense = records.clients(slice(start, end)), defenses[start]
            if "records" in defense.acts_on:
                given = (parts[start:end] > 0, slots[start:end], rngs[start:end])
                found.append(accounted(defense).on_stacked(some, *given))
            else:
                found.append({n: g.to(weights[n].dtype) for n, g in some.weighted_sum(parts[start:end]).items()})
        active = (parts.sum(1) > 0).to(parts)  # a client that has no step left stays where it is
        joined = {
            name: torch.cat([one[name] for one in found]) if len(found) > 1 else found[0][name] for name in weights
        }
        return {name: g * active.view(-1, *[1] * (g.ndim - 1)) for name, g in joined.items()}

    def _records(self, weights: Params, inputs: Tensor, labels: Tensor, same: int) -> Captured:
        """Return the records of all clients; those that share weights go through the model as one batch."""
        if same > 1:
            weights = {name: w[::same] for name, w in weights.items()}
            inputs, labels = (v.unflatten(0, (-1, same)).flatten(1, 2) for v in (inputs, labels))
        records = records_together(self.model, weights, inputs, labels, self.loss, self.shapes)
        return records.dealt(same) if same > 1 else records


def _runs(defenses: Sequence[Defense]) -> list[tuple[int, int]]:
    """Return where stretches of one and the same defence begin and end."""
    starts = [k for k, defense in enumerate(defenses) if k == 0 or defense is not defenses[k - 1]]
    return list(zip(starts, [*starts[1:], len(defenses)], strict=True))
