"""Several defences at once, each in its place, in the order given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import SpecError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.noise import NoiseKind, Source
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.defense import (
    DEFENSES,
    Accounted,
    Defense,
    NoDefense,
    PerRound,
    Place,
    RunningStep,
    accounted,
    in_round,
)
from gradveil.protection.records import Records
from gradveil.registry import describe
from gradveil.representation.jacobian import already_changed
from gradveil.tree import Params, named
from gradveil.types import Batch, Observation, Update


@DEFENSES.register("compose")
@dataclass(frozen=True)
class Compose(Accounted, PerRound):
    """Run several defences, each on what the one before it left: ``representation:share=0.4+gaussian:scale=0.01``.

    Every member of a defence has its rule here: what the parts do one after the other, all of, any of, or most of.
    """

    parts: tuple[Defense, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(part, Defense) for part in self.parts):
            raise SpecError("compose takes defences, not text. Join specs by '+' instead: representation+gaussian.")
        one_on_records(self.parts)

    @property
    def spec(self) -> str:
        """The spec that builds this: the parts' specs joined by ``+``."""
        return "+".join(describe(part) for part in self.parts) or "compose"

    @property
    def title(self) -> str:  # type: ignore[override]
        return " and ".join(part.title or part.spec_name for part in self.parts)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return bool(self._drawing)

    @property
    def draws_on_device(self) -> bool:  # type: ignore[override]
        return self.draws and all(part.draws_on_device for part in self._drawing)

    @property
    def keeps_apart(self) -> bool:  # type: ignore[override]
        on_batch = [part for part in self.parts if "batch" in part.acts_on]
        return bool(on_batch) and all(part.keeps_apart for part in on_batch)

    @property
    def _drawing(self) -> list[Defense]:
        return [part for part in self.parts if part.draws]

    @property
    def acts_on(self) -> frozenset[Place]:
        return frozenset().union(*(part.acts_on for part in self.parts))

    @property
    def idle(self) -> bool:
        return any(part.idle for part in self.parts)

    def noise_from(self, rng: Source) -> NoiseKind:
        kinds = {part.noise_from(rng) for part in self.parts}
        return "simulated" if "simulated" in kinds else "secret" if "secret" in kinds else "none"

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        return reduce(lambda changed, part: part.on_batch(changed, rng), self.parts, batch)

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for part in self.parts for layer in part.layers(model)))

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        first, *others = self._defending(model, layer)
        r = first.perturb(model, layer, x, r, rng)
        with already_changed():
            for part in others:
                r = part.perturb(model, layer, x, r, rng)
        return r

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        return sum(part.asked(model, layer, r) for part in self._defending(model, layer))

    def _defending(self, model: nn.Module, layer: str) -> list[Defense]:
        return [part for part in self.parts if layer in part.layers(model)]

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        return reduce(lambda changed, part: part.on_gradient(changed, rng), self.parts, gradient)

    def on_update(self, update: Update, rng: Source) -> Update:
        return reduce(lambda changed, part: part.on_update(changed, rng), self.parts, update)

    # What a server that knows all parts does.

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        choices = list(product(*(part.servers(model) for part in self.parts)))
        agreed = [choice for choice in choices if len({c.attack for c in choice} - {None}) <= 1]
        return tuple(_together(choice) for choice in agreed or choices)

    def for_server(self) -> Defense:
        return replace(self, parts=tuple(part.for_server() for part in self.parts))

    def mean_of(self, rounds: int) -> Defense | None:
        one = self._last
        calmer = None if one is None else one.mean_of(rounds)
        if calmer is None or self._drawing != [one]:
            return None
        return replace(self, parts=tuple(calmer if part is one else part for part in self.parts))

    @property
    def fingerprint(self) -> Callable[[Observation], Observation] | None:
        one = self._last
        view = None if one is None else one.fingerprint
        before = [part for part in self.parts if part is not one and part.acts_on]
        if one is None or view is None or any(part.draws for part in before):
            return None

        def seen_through(seen: Observation) -> Observation:
            if seen.update.num_steps > 1 and any(part.acts_on & _SENT != one.acts_on for part in before):
                return seen  # what was sent is not a step's gradient, which the parts before it changed
            defended = [named(layer, "weight") for part in before for layer in part.layers(seen.model)]
            found = view(seen.without(*defended) if defended else seen)
            simulate = found.simulate
            return found if simulate is None else replace(found, simulate=lambda g: simulate(self._repeated(before, g)))

        return seen_through

    @staticmethod
    def _repeated(parts: Sequence[Defense], gradient: Params) -> Params:
        """Return what parts that draw nothing make of a trial gradient, or of an update that is one."""
        for part in parts:
            gradient = part.on_gradient(gradient, Generator())
        for part in parts:
            gradient = part.on_update(Update(gradient), Generator()).gradient
        return gradient

    @property
    def _last(self) -> Defense | None:
        """The part whose output is sent as it is; of those in one place the last one given."""
        acting = [part for part in self.parts if part.acts_on]
        return max(reversed(acting), key=lambda part: max(map(_ORDER.index, part.acts_on)), default=None)

    # The one part that acts on records makes the step's gradient; what others do to it comes after.

    @property
    def _on_records(self) -> Accounted:
        return accounted(one_on_records(self.parts))

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        return self._on_records.on_records(records, slots, rng)

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        return self._on_records.on_stacked(records, present, slots, rngs)

    def begin(self, slots: int, rng: Source) -> RunningStep | None:
        return self._on_records.begin(slots, rng)

    def cost(self, epochs: int) -> float | None:
        return self._on_records.cost(epochs)

    @property
    def allowance(self) -> float | None:
        return self._on_records.allowance

    def for_run(self, run: PlannedRun) -> Defense:
        return replace(self, parts=tuple(accounted(part).for_run(run) for part in self.parts))

    def check_steps(self, steps: int) -> None:
        self._on_records.check_steps(steps)

    @property
    def min_clients(self) -> int:
        return self._on_records.min_clients

    def single_client(self) -> Defense:
        return replace(self, parts=tuple(accounted(part).single_client() for part in self.parts))

    @property
    def follows_rounds(self) -> bool:
        return any(isinstance(part, PerRound) and part.follows_rounds for part in self.parts)

    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> Defense:
        return replace(self, parts=tuple(in_round(part, model, public, loss) for part in self.parts))


_SENT: frozenset[Place] = frozenset({"gradient", "update"})
_ORDER: tuple[Place, ...] = ("batch", "records", "representation", "gradient", "update")


def one_on_records(parts: Sequence[Defense]) -> Defense:
    """Return the part that acts on records, if any; raise where another acts on what it needs as it is."""
    acting = [part for part in parts if "records" in part.acts_on]
    names = [describe(part) for part in acting]
    if len(acting) > 1:
        raise SpecError(f"{' and '.join(names)} both make a step's gradient out of its records. Keep one of them.")
    for part in parts:
        if acting and accounted(acting[0]).min_clients and part.acts_on & {"gradient", "update"}:
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


def parts_of(defense: Defense) -> tuple[Defense, ...]:
    """Return the defences that one is made of."""
    return tuple(p for part in defense.parts for p in parts_of(part)) if isinstance(defense, Compose) else (defense,)
