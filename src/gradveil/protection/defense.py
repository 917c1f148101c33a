"""Defences by their protocols: where one acts, what it costs a record, what follows from each round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import DefenseError, SpecError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.noise import NoiseKind, SecretDraws, Source, noise_kind
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.records import Records
from gradveil.registry import Registry, split_specs
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Update


class DefenseRegistry(Registry["Defense"]):
    """The defences; one that declares nothing a server could do is refused."""

    def register(self, name: str) -> Callable[[type["Defense"]], type["Defense"]]:
        """Class decorator: make a frozen dataclass known under a name."""
        remember = super().register(name)

        def checked(cls: type["Defense"]) -> type["Defense"]:
            try:
                servers = cls().servers(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
            except Exception:  # it needs settings, or another model: an audit asks again
                return remember(cls)
            check_servers(name, servers)
            return remember(cls)

        return checked


def check_servers(defense: str, servers: Sequence[Countermeasure]) -> None:
    """Raise unless a defence says at least one thing that a server could do."""
    if not servers:
        raise SpecError(
            f"servers() of the defence {defense!r} returns nothing. Say what a server that knows it would do: "
            f"countermeasures.plain() where nothing is hidden, countermeasures.undeclared() where you do not know."
        )


DEFENSES = DefenseRegistry("defense", "defenses")
PUBLIC = 512  # public examples that a defence looks at in a round, at most

Place = Literal["batch", "records", "representation", "gradient", "update"]
_METHOD_OF: dict[Place, str] = {
    "batch": "on_batch",
    "records": "on_records",
    "representation": "perturb",
    "gradient": "on_gradient",
    "update": "on_update",
}


class Defense(ABC):
    """Override the places where the defence acts; the others change nothing.

    In order: on the batch before a local step, on the representation that the weight gradient of a layer is built from
    (Sun et al.), on the gradient of the step, on the update that is sent. A defence on the gradients of single records
    is ``Accounted``, one that follows from each round's weights is ``PerRound``.
    """

    spec_name: ClassVar[str]
    title: ClassVar[str] = ""  # a few plain words for a page; without them its name stands there
    draws_on_device: ClassVar[bool] = False  # whether random numbers are drawn where the generator lies, CUDA as well
    draws: ClassVar[bool] = True  # whether it draws random numbers at all
    keeps_apart: ClassVar[bool] = False  # whether on_batch changes each example by itself, so that none are mixed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for protocol in (Accounted, PerRound) if cls.__module__ != __name__ else ():
            odd = sorted(name for name in vars(protocol).keys() & vars(cls).keys() if not name.startswith("_"))
            if odd and not issubclass(cls, protocol):
                raise SpecError(f"{cls.__name__}.{odd[0]} is of {protocol.__name__}: derive the defence from that.")

    @property
    def acts_on(self) -> frozenset[Place]:
        """Where this defence acts: the methods it overrides."""
        own = {place: getattr(type(self), name, None) for place, name in _METHOD_OF.items()}
        return frozenset(place for place, name in _METHOD_OF.items() if own[place] is not getattr(Defense, name, None))

    @property
    def idle(self) -> bool:
        """Whether these settings, or those of a part, change nothing: a share, a scale or a floor of zero."""
        return any(getattr(self, name, None) == 0 for name in ("share", "scale", "floor"))

    def noise_from(self, rng: Source) -> NoiseKind:
        """Return what its random numbers are where they are drawn from this source: secret, simulated or none."""
        return noise_kind(rng) if self.draws else "none"

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        """Change the examples before a local step."""
        return batch

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return the layers whose weight gradient is built from a perturbed input."""
        return ()

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return r' for the inputs x (N, ...) and the layer's inputs r (N, ...)."""
        return r

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries of r (N, ...) this defence sets out to zero; reports set it beside what it did."""
        return 0

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        """Change the gradient of one local step."""
        return gradient

    def on_update(self, update: Update, rng: Source) -> Update:
        """Change the update before it is sent."""
        return update

    @abstractmethod
    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what servers that know this defence would do; never empty."""

    def for_server(self) -> "Defense":
        """Return the defence as a server has it: where a setting is a secret of the client, with another secret."""
        return self

    def mean_of(self, rounds: int) -> "Defense | None":
        """Return the defence that sends what the mean of so many rounds at the same weights is; None: none is known."""
        return None

    @property
    def fingerprint(self) -> Callable[[Observation], Observation] | None:
        """The view of what in an update is the same whatever the client draws, for a server with a list of candidates.

        The tensors keep their shapes, and ``simulate`` makes the same of a gradient. None: nothing stays the same.
        """
        return None


class RunningStep(ABC):
    """One local step of a defence on records, under way."""

    @abstractmethod
    def add(self, records: Records) -> Params:
        """Return the gradient of the step with these records and all before them."""


class Accounted(Defense):
    """A defence on the gradients of single records, with what each release costs a record."""

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        """Return the gradient of one local step, made of the gradients of its records.

        ``slots``: how many records a batch has room for, public and the same in a shorter last batch.
        """
        total = records.weighted_sum(torch.ones(records.count))
        return {name: (g / slots).to(records.like[name].dtype) for name, g in total.items()}

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        """Return the same for a step of K clients at once (K, *shape): records (K, N), present (K, N) or padding."""
        raise DefenseError(f"{type(self).__name__} acts on the records of one client at a time. Use another engine.")

    def begin(self, slots: int, rng: Source) -> RunningStep | None:
        """Return a step whose records may come in several batches; None: ``on_records`` takes them at once."""
        return None

    def cost(self, epochs: int) -> float | None:
        """Return what one participation costs a record, as μ² of Gaussian DP; None: nothing is promised."""
        return None

    @property
    def allowance(self) -> float | None:
        """μ² that a record may spend over a whole run; None: no limit."""
        return None

    def for_run(self, run: PlannedRun) -> Defense:
        """Return the defence for a planned run: where a promise is given, with the noise that it needs."""
        return self

    def check_steps(self, steps: int) -> None:
        """Raise where what is promised does not hold for so many local steps of a round."""

    @property
    def min_clients(self) -> int:
        """The fewest clients of a round whose sum may be released; 0: each update is released by itself."""
        return 0

    def single_client(self) -> Defense:
        """Return the defence of one client before a server that knows all others: its part of a sum, and the noise."""
        return self


class PerRound(Defense):
    """A defence of which something follows from the weights of each round."""

    @property
    def follows_rounds(self) -> bool:
        """Whether it does; of several joined defences perhaps none."""
        return True

    @abstractmethod
    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> Defense:
        """Return the defence for one round: with what follows from public data at the weights that were sent."""


class Unaccounted(Accounted):
    """Any other defence, as one that promises nothing of single records."""

    def __init__(self, whole: Defense) -> None:
        self.whole = whole

    def for_run(self, run: PlannedRun) -> Defense:
        return self.whole

    def single_client(self) -> Defense:
        return self.whole

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return self.whole.servers(model)


def accounted(defense: Defense) -> Accounted:
    """Return a defence as one with an account of its records; of those that have none all costs are None."""
    return defense if isinstance(defense, Accounted) and "records" in defense.acts_on else Unaccounted(defense)


def in_round(defense: Defense, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> Defense:
    """Return the defence at the weights of a round; most are the same in all."""
    return defense.for_round(model, public, loss) if isinstance(defense, PerRound) else defense


def noise_row(defense: Defense) -> dict[str, str]:
    """Return what a row of a simulation says of a defence that draws: whether its noise can be drawn again."""
    noise = defense.noise_from(Generator())
    return {} if noise == "none" else {"noise": noise}


@contextmanager
def own_draws(defense: object) -> Iterator[None]:
    """Say it in one line where a defence hands secret draws to a function of torch that wants a generator."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if SecretDraws.__name__ not in str(error):
            raise
        name = getattr(defense, "spec_name", type(defense).__name__)
        raise DefenseError(
            f"{name} draws from rng by torch itself, and what rng draws here is secret, which torch cannot. Draw by "
            f"gradveil.draws, for example draws.normal(shape, rng), or say protect(..., simulated=generator)."
        ) from error


def build(spec: str | Defense) -> Defense:
    """Return the defence that a spec describes, e.g. ``representation:share=0.4``; ``a+b`` composes."""
    if isinstance(spec, str) and len(parts := split_specs(spec)) > 1:
        made: Callable[..., Defense] = DEFENSES.get("compose")
        return made(tuple(DEFENSES.build(part) for part in parts))
    return DEFENSES.build(spec)


@DEFENSES.register("none")
@dataclass(frozen=True)
class NoDefense(Defense):
    """Send the gradient as it is."""

    title = "No defence"
    draws: ClassVar[bool] = False

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
