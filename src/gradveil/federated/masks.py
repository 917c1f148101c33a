"""The paper's defence for stacked clients: every client its own share, all scored and masked at once."""

from dataclasses import fields

import torch
from torch import Tensor, nn

from gradveil.defenses.base import Defense
from gradveil.defenses.compose import Compose
from gradveil.defenses.representation import RepresentationPerturbation
from gradveil.defenses.selection import budget, largest_live_each
from gradveil.defenses.substitution import substitute
from gradveil.layers import representation
from gradveil.scores.rows import scores
from gradveil.scores.stacked import StackedRows
from gradveil.tree import Params

PLAIN = RepresentationPerturbation()


def why_no_masks(model: nn.Module, defense: Defense, x: Tensor) -> str | None:
    """Return why the representations of this defence's clients cannot be perturbed together; ``None``: they can.

    ``x`` is one batch, of which only the shape matters.
    """
    layers = set()
    for part in _parts(defense):
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


def _parts(defense: Defense) -> tuple[Defense, ...]:
    return tuple(p for part in defense.parts for p in _parts(part)) if isinstance(defense, Compose) else (defense,)


def _is_plain(defense: RepresentationPerturbation) -> bool:
    own = {"share", "count", "layer", "method"}  # these may differ from client to client; the rule may not
    rule = [f.name for f in fields(defense) if f.name not in own]
    same = all(getattr(defense, name) == getattr(PLAIN, name) for name in rule)
    return same and defense.method in ("auto", "exact")


class Masks:
    """Perturbs the input of one layer for K clients; ``counts`` lies on the device, as a CUDA graph needs it."""

    def __init__(self, model: nn.Module, defense: Defense, x: Tensor, clients: int) -> None:
        self.model = model
        (self.layer,) = {layer for part in _parts(defense) for layer in part.layers(model)}
        found = StackedRows.of(model, self.layer, x)
        assert found is not None
        self.rows = found
        self.length = representation(model, self.layer, x)[0].numel()
        self.counts = torch.zeros(clients, 1, 1, dtype=torch.int64, device=x.device)

    def use(self, defenses: list[Defense]) -> None:
        """Take each client's number of entries from its own defence."""
        counts = [sum(_count(part, self.length) for part in _parts(d)) for d in defenses]
        self.counts.copy_(torch.tensor(counts).view(-1, 1, 1), non_blocking=True)

    def perturbed(self, weights: Params, x: Tensor) -> Tensor:
        """Return r' (K, B, L) for stacked weights and inputs (K, B, ...)."""
        rows = self.rows(weights, x)
        chosen = largest_live_each(rows.r, scores(rows.r, rows.norms, 2.0), self.counts)
        return rows.r.masked_fill(chosen, 0.0)

    def forward(self, weights: Params, x: Tensor, perturbed: Tensor) -> Tensor:
        """Return one client's logits; the defended layer's weight gradient comes from ``perturbed`` (B, L)."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
            return substitute(module, args[0], perturbed.view_as(args[0]))

        handle = self.model.get_submodule(self.layer).register_forward_hook(hook)
        try:
            logits: Tensor = torch.func.functional_call(self.model, weights, (x,))
        finally:
            handle.remove()
        return logits


def _count(defense: Defense, length: int) -> int:
    if not isinstance(defense, RepresentationPerturbation):
        return 0
    return budget(length, defense.share, defense.count)
