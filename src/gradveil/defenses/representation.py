"""The paper's defence: zero the entries of the representation that give most of the input away."""

from dataclasses import dataclass
from math import inf

from torch import Tensor, nn

from gradveil.defenses.masking import LayerMask
from gradveil.privacy.draws import Source
from gradveil.protection.defense import DEFENSES, check_choice
from gradveil.ranges import Order
from gradveil.representation.scores import METHODS, leak_scores


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

    p: Order = 2  # the norm of the input's displacement: 1, 2 or inf
    method: str = "auto"  # how leak scores are computed: auto, exact, sketch, ...

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("p", self.p, (1, 2, inf))
        check_choice("method", self.method, METHODS)

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return the scores (N, L) by which entries are zeroed one by one."""
        return leak_scores(model, layer, x, method=self.method, p=float(self.p), seen=r)


# Settings that said what the method does by itself, when it was one with those of its kin.
DEFENSES.renamed("representation:q=0", "representation")
DEFENSES.renamed("representation:mode=paper", "representation")
DEFENSES.renamed("representation:score=diagonal", "representation")
