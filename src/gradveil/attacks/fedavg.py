"""What a real FedAvg update needs: unroll the client's local steps from the weights that the server sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Generator, Tensor
from torch.func import functional_call, grad, vmap

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.fedavg_unroll import local_plan, unroll
from gradveil.attacks.gradients import quiet, soft_cross_entropy
from gradveil.attacks.labels import with_labels
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.matching import Matching, squared_distance
from gradveil.attacks.search import Search
from gradveil.tree import Params, parameters
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Attack):
    """Match the whole weight difference of several local steps, simulated step by step (Dimitrov et al. 2022).

    The server knows the weights it sent, the learning rate, the batch size and the number of steps. Which example
    went into which batch is unknown: one fixed order is unrolled (see ``fedavg_unroll``), with labels in rising
    order. For one epoch the order only renames the examples, up to the pairing of labels with batches; for several
    shuffled epochs it is an approximation. For a single step this is ``idlg`` for batches.
    """

    steps: int = 150  # outer steps of 20 evaluations per start
    restarts: int = 4
    history: int = 50
    tol: float = 1e-7  # of the target's squared norm

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates at once."""
        known = with_labels(seen, rngs, required=True)
        plans: dict[tuple[object, ...], list[int]] = {}
        for i, s in enumerate(known):
            local_plan(s.update)  # refuses steps that do not fit
            plans.setdefault((s.update.num_steps, s.update.lr, s.update.batch_size), []).append(i)
        search = Search(
            squared_distance, lambda _: LBFGS(self.history, True), 20 * self.steps, self.restarts,
            tol=self.tol, cuts=(0.05, 0.15), stack=unrolled,
        )  # fmt: skip
        found: dict[int, Reconstruction] = {}
        for members in plans.values():
            solved = search.run([known[i] for i in members], [rngs[i] for i in members])
            found |= dict(zip(members, solved, strict=True))
        return [found[i] for i in range(len(seen))]


def unrolled(seen: Sequence[Observation]) -> Matching:
    """Stack observations of one group and one plan; the trial is the mean step gradient of the unrolled run."""
    stack = Matching.of(seen, "vmap")
    return replace(stack, trial=_trial(seen[0], stack.names))


def _trial(seen: Observation, names: tuple[str, ...]) -> Callable[[Tensor, Tensor], Params]:
    model, update = seen.model, seen.update
    start = parameters(model)
    fixed = {n: p.detach() for n, p in model.named_parameters() if n not in start}
    fixed |= {n: b.detach() for n, b in model.named_buffers()}

    def loss(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        return soft_cross_entropy(functional_call(model, fixed | weights, (x,)), y)

    def alone(x: Tensor, y: Tensor) -> Params:
        total = unroll(grad(loss), start, x, y, update)
        total = seen.simulate(total) if seen.simulate is not None else total
        return {n: total[n] / update.num_steps for n in names}

    many = vmap(alone)

    def trial(x: Tensor, y: Tensor) -> Params:
        with quiet(model):
            found: Params = many(x, y)
        return found

    return trial
