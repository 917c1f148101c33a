"""Deep leakage from gradients (Zhu et al. 2019): match the gradient in the Euclidean sense, by L-BFGS."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Generator

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import squared_distance
from gradveil.attacks.search.minimise import LBFGS
from gradveil.attacks.search.restarts import Search, Start
from gradveil.errors import AttackError
from gradveil.ranges import Count, Weight
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("dlg")
@dataclass(frozen=True)
class DLG(Attack):
    """Minimise Σ ||∇F(x̂, softmax ŷ) - g||² over images x̂ and label logits ŷ together (Zhu et al. 2019).

    A step is an outer one, as the authors count: ``inner`` iterations of L-BFGS. Departures: a line search; several
    starts, of which the objective chooses; a run ends when it has matched or stalled; starts lie within the data range
    (``start=normal``: N(0, 1), as published, needs about twice the steps); and labels that the server knows are used.
    """

    kind = "search"
    applies_to = (AppliesTo(model="small", steps=(1, 1), default="steps=15,restarts=3", turn=2),)

    steps: Count = 300  # outer steps per start
    inner: Count = 20  # L-BFGS iterations in an outer step
    restarts: Count = 4
    history: Count = 100
    search: bool = True  # Armijo line search; false: every step is taken, as published
    start: Start = "uniform"
    tol: Weight = 1e-7  # of the target's squared norm

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        search = Search(
            squared_distance, lambda *_: LBFGS(self.history, self.search), self.steps * self.inner, self.restarts,
            start=self.start, tol=self.tol, cuts=(0.05, 0.15),
        )  # fmt: skip
        return search.run(at_one_model(seen), rngs)


@ATTACKS.register("idlg")
@dataclass(frozen=True)
class IDLG(DLG):
    """DLG with the label read off the sign of the last layer's gradient (Zhao et al. 2020); one example only."""

    applies_to = (AppliesTo(examples=(1, 1)),)

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        for s in seen:
            if s.num_examples != 1:
                raise AttackError(
                    f"idlg reads the label of one example, and this update is made of {s.num_examples}. "
                    "Use dlg, or gs, which recovers how often each class occurs."
                )
        return super().reconstruct_many(with_labels(seen, rngs, required=True), rngs)
