"""Several defences at once, each in its place, in the order given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import SpecError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.draws import NoiseKind, Source
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.defense import DEFENSES, Defense, NoDefense, Place, RunningStep
from gradveil.protection.records.records import Records
from gradveil.registry import describe
from gradveil.representation.scores.fast.replay import already_changed
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Update


@DEFENSES.register("compose")
@dataclass(frozen=True)
class Compose(Defense):
    """Run several defences, each on what the one before it left: ``representation:share=0.4+gaussian:scale=0.01``."""

    parts: tuple[Defense, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(part, Defense) for part in self.parts):
            raise SpecError("compose takes defences, not text. Join specs by '+' instead: representation+gaussian.")
        one_on_records(self.parts)

    @property
    def acts_on(self) -> frozenset[Place]:
        """Wherever one of the parts acts."""
        return frozenset().union(*(part.acts_on for part in self.parts))

    @property
    def idle(self) -> bool:
        """Whether one of the parts changes nothing."""
        return any(part.idle for part in self.parts)

    @property
    def spec(self) -> str:
        """The spec that builds this: the parts' specs joined by ``+``."""
        return "+".join(describe(part) for part in self.parts) or "compose"

    def noise_from(self, rng: Source) -> NoiseKind:
        """Return simulated where any part's is, none where no part draws."""
        kinds = {part.noise_from(rng) for part in self.parts}
        return "simulated" if "simulated" in kinds else "secret" if "secret" in kinds else "none"

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        """Change the examples by each part in turn."""
        return reduce(lambda changed, part: part.on_batch(changed, rng), self.parts, batch)

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return every layer that some part defends."""
        return tuple(dict.fromkeys(layer for part in self.parts for layer in part.layers(model)))

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Change r by each part that defends this layer."""
        first, *others = self._defending(model, layer)
        r = first.perturb(model, layer, x, r, rng)
        with already_changed():
            for part in others:
                r = part.perturb(model, layer, x, r, rng)
        return r

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries the parts set out to zero together."""
        return sum(part.asked(model, layer, r) for part in self._defending(model, layer))

    def _defending(self, model: nn.Module, layer: str) -> list[Defense]:
        return [part for part in self.parts if layer in part.layers(model)]

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        """Let the one part that acts on records make the step's gradient; what others do to it comes after."""
        return one_on_records(self.parts).on_records(records, slots, rng)

    def begin(self, slots: int, rng: Source) -> RunningStep | None:
        """Let that part add further records."""
        return one_on_records(self.parts).begin(slots, rng)

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        """Return the same for K clients at once."""
        return one_on_records(self.parts).on_stacked(records, present, slots, rngs)

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        """Change the gradient by each part in turn."""
        return reduce(lambda changed, part: part.on_gradient(changed, rng), self.parts, gradient)

    def on_update(self, update: Update, rng: Source) -> Update:
        """Change the update by each part in turn."""
        return reduce(lambda changed, part: part.on_update(changed, rng), self.parts, update)

    def for_run(self, run: PlannedRun) -> Defense:
        """Return the parts for a planned run."""
        return replace(self, parts=tuple(part.for_run(run) for part in self.parts))

    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> Defense:
        """Return the parts for one round."""
        return replace(self, parts=tuple(part.for_round(model, public, loss) for part in self.parts))

    @property
    def follows_rounds(self) -> bool:
        """Whether a part follows them."""
        return any(part.follows_rounds for part in self.parts)

    def check_steps(self, steps: int) -> None:
        """Raise where a part's promise does not hold for so many local steps."""
        for part in self.parts:
            part.check_steps(steps)

    def spends(self, epochs: int) -> float | None:
        """Return what the part with a promise costs; what is done to its releases costs nothing."""
        return next((cost for part in self.parts if (cost := part.spends(epochs)) is not None), None)

    @property
    def allowance(self) -> float | None:
        """What the part with a promise may spend."""
        return min((part.allowance for part in self.parts if part.allowance is not None), default=None)

    @property
    def min_clients(self) -> int:
        """The fewest clients that every part asks for."""
        return max((part.min_clients for part in self.parts), default=0)

    def alone(self) -> Defense:
        """Return the parts of one client before a server that knows all others."""
        return replace(self, parts=tuple(part.alone() for part in self.parts))

    def for_server(self) -> Defense:
        """Return the parts as a server has them."""
        return replace(self, parts=tuple(part.for_server() for part in self.parts))

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return every choice of one countermeasure for each part, taken together; two attacks do not go together."""
        choices = list(product(*(part.adaptive(model) for part in self.parts)))
        agreed = [choice for choice in choices if len({c.attack for c in choice} - {None}) <= 1]
        return tuple(_together(choice) for choice in agreed or choices)


def one_on_records(parts: Sequence[Defense]) -> Defense:
    """Return the part that acts on records, if any; raise where another acts on what it needs as it is."""
    acting = [part for part in parts if "records" in part.acts_on]
    names = [describe(part) for part in acting]
    if len(acting) > 1:
        raise SpecError(f"{' and '.join(names)} both make a step's gradient out of its records. Keep one of them.")
    for part in parts:
        if acting and acting[0].min_clients and part.acts_on & {"gradient", "update"}:
            raise SpecError(
                f"tier=aggregate needs the sum of the noisy gradients, and {describe(part)} changes each client's by "
                f"itself. Keep one of them."
            )
        if acting and ("representation" in part.acts_on or ("batch" in part.acts_on and not part.keeps_apart)):
            raise SpecError(
                f"{describe(part)} acts before {names[0]} and may mix the records of a batch, so that the promise of "
                f"{names[0]} would not hold. Leave one of them out."
            )
    return acting[0] if acting else NoDefense()


def _together(choice: tuple[Countermeasure, ...]) -> Countermeasure:
    """Return one countermeasure that does all of these, undoing the last defence first."""
    if not choice:
        return plain()

    def view(seen: Observation) -> Observation:
        for countermeasure in reversed(choice):
            seen = countermeasure.view(seen)
        return seen

    names = [c.name for c in choice if c.name != "plain"] or ["plain"]
    attacks = [c.attack for c in choice if c.attack is not None]
    first = replace(choice[0], name="+".join(names), why=" ".join(c.why for c in choice), view=view)
    return replace(first, attack=attacks[-1] if attacks else None)
