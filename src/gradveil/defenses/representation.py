"""The paper's defence: zero the entries of the representation that give most of the input away; and its kin."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from gradveil.defenses.masking import LayerDefense, LayerMask, Layers
from gradveil.errors import DefenseError
from gradveil.privacy.noise import Source
from gradveil.protection.defense import DEFENSES
from gradveil.ranges import MOST, Among, Norm, Positive, Range, Share, Weight
from gradveil.representation.layers.rules.base import wide
from gradveil.representation.scores import METHODS, leak_scores, row_norms
from gradveil.representation.selection import PseudoInverse, best_direction, jacobian, zeroed, zeroing_order

Method = Annotated[str, Among(METHODS)]


@DEFENSES.register("representation")
@dataclass(frozen=True)
class RepresentationPerturbation(LayerMask):
    """Zero the entries of the representation that give most of the input away, in one weight gradient only.

    The weight gradient of the defended layer is Σ δ_j r'_jᵀ in place of Σ δ_j r_jᵀ; r' is r with the ε entries of
    highest score |r_i| / ||∂r_i/∂x||₂ set to zero, per example (Sun et al. 2020, algorithms 1 and 2). Forward pass,
    bias gradient and all other gradients are unchanged.

    **A server that leaves the defended weight out of its matching, or reads the mask off it, undoes this.**

    Departures: entries that are zero already are never chosen; p other than the paper's 2 takes ||∂r_i/∂x||_p.
    """

    title = "Revealing entries hidden (the paper's defence)"

    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    method: Method = "auto"  # how leak scores are computed: auto, exact, sketch, ...

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        return leak_scores(model, layer, x, method=self.method, p=float(self.p), seen=r)


@DEFENSES.register("representation_authors")
@dataclass(frozen=True)
class RepresentationAuthors(LayerDefense):
    """Zero entries of the representation by the rule of the authors' code: one mask for the whole batch.

    Score ||∇r_i|| / (r_i + offset), with the sign of r, summed over the batch; the threshold is the percentile
    100 × share of these signed sums, and entries whose sum is *in absolute value* strictly below it are zeroed.
    So dead entries (sum 0) go first, nothing goes while the threshold is zero or less, and one entry with
    0 / 0 (dead, offset 0) makes the threshold NaN, and nothing goes at all.
    """

    title = "Revealing entries hidden (the authors' code)"

    share: Share = 0.4  # the percentile, as a part of 1
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    offset: Annotated[float, Range(-MOST)] = 0.0  # added to r_i below the fraction; their second script has 0.1
    method: Method = "auto"  # how the norms are computed: auto, exact, sketch, ...

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        return len(r) * round(self.share * r[0].numel())

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        if self.share == 0:
            return r
        flat = r.flatten(1)
        _, norms = row_norms(model, layer, x, self.method, seen=r)  # (N, L)
        sums = (norms / (flat + self.offset)).sum(0)  # (L,)
        threshold = torch.quantile(sums, self.share)
        return flat.masked_fill(sums.abs() < threshold, 0.0).view_as(r)


@DEFENSES.register("representation_certified")
@dataclass(frozen=True)
class RepresentationCertified(LayerDefense):
    """Zero the fewest entries of each example, in the paper's order, whose certificate reaches ``target_mse``.

    Raises where no number of entries does. The certificate is that of the weights as they are, so it is computed anew
    at each step.
    """

    title = "Revealing entries hidden, up to a certificate"

    target_mse: Positive = 1e-6  # of pixels in [0, 1], for every example
    kind: Literal["local", "global", "box"] = "global"  # the certificate that has to reach it
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    method: Method = "exact"  # how leak scores are computed: exact, auto, sketch, ...

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        from gradveil.representation.certificates.certify import needed_counts

        _check(model, x)
        flat, p = r.flatten(1), float(self.p)  # (N, L)
        order = zeroing_order(flat, leak_scores(model, layer, x, method=self.method, p=p, seen=r))
        with torch.no_grad():
            needed = needed_counts(model, layer, x, flat, order, self.target_mse, self.kind, p)
        if not needed.reachable:
            raise DefenseError(
                f"No share reaches target_mse={self.target_mse:g} by kind={self.kind} and p={p:g}: with all of the "
                f"representation zeroed, {float(needed.most.min()):.3g} is certified. Ask for less, or for another "
                f"kind."
            )
        return zeroed(flat, order, needed.counts.to(flat.device)).view_as(r)


def _check(model: nn.Module, x: Tensor) -> None:
    """Raise unless the certificate is about the function and the inputs that are trained on."""
    from gradveil.representation.certificates.chain import has_modes

    if model.training and has_modes(model):
        raise DefenseError(
            "target_mse: dropout and batch norm make the representation another function in training than the one a "
            "certificate is about. Give a share instead, or train with these layers in eval mode."
        )
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise DefenseError(
            f"target_mse is the error of pixels in [0, 1], and inputs lie in [{float(x.min()):.3g}, "
            f"{float(x.max()):.3g}]. Put the normalisation into the model as its first layer; token ids have no "
            "pixels: defend text with veil, gaussian or pruning."
        )


@DEFENSES.register("representation_direction")
@dataclass(frozen=True)
class RepresentationDirection(LayerDefense):
    """Move the representation by share × ||r||_q in the direction that moves the input most, example by example."""

    title = "A direction of a layer hidden"

    share: Share = 0.4  # of ||r||_q: how far r is moved
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    q: Norm = 2  # the norm of the move: 1, 2 or inf
    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺
    clip: bool = False  # keep r' within the range of r, so that no value gives the change away

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        if not self.share:
            return r
        inverses = [PseudoInverse.of(wide(j), self.rcond) for j in jacobian(model, layer, x, r)]
        moved = [self._moved(a, wide(row)) for a, row in zip(inverses, r.flatten(1), strict=True)]
        return torch.stack(moved).view_as(r)

    def _moved(self, inverse: PseudoInverse, r: Tensor) -> Tensor:
        if not len(inverse.values):
            return r  # the input does not move r at all
        u = best_direction(inverse, self.p, self.q).to(r.dtype)  # (L,)
        sign = -1.0 if torch.dot(u, r) > 0 else 1.0  # both do the same to first order: take the one that shrinks r
        moved: Tensor = r + sign * self.share * torch.linalg.vector_norm(r, self.q) * u
        return moved.clamp(r.min(), r.max()) if self.clip else moved
