"""What a defence is, and where it may act. Settings that make no sense are refused when it is built."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import DefenseError, SpecError
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.draws import NoiseKind, Source, noise_kind
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.records.records import Records
from gradveil.registry import Registry, split_specs
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Update


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless ``value`` is one of the allowed ones."""
    known = list(allowed)
    if value not in known:
        raise SpecError(f"{name}={value!r} is not known. Give one of: {', '.join(map(str, known))}.")


class DefenseRegistry(Registry["Defense"]):
    """The defences; one that declares nothing a server could do is refused."""

    def register(self, name: str) -> Callable[[type["Defense"]], type["Defense"]]:
        """Class decorator: make a frozen dataclass known under a name."""
        remember = super().register(name)

        def checked(cls: type["Defense"]) -> type["Defense"]:
            try:
                servers = cls().adaptive(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
            except Exception:  # it needs settings, or another model: an audit asks again
                return remember(cls)
            check_servers(name, servers)
            return remember(cls)

        return checked


def check_servers(defense: str, servers: Sequence[Countermeasure]) -> None:
    """Raise unless a defence says at least one thing that a server could do."""
    if not servers:
        raise SpecError(
            f"adaptive() of the defence {defense!r} returns nothing. Say what a server that knows it would do: "
            f"countermeasures.plain() where nothing is hidden, countermeasures.undeclared() where you do not know."
        )


DEFENSES = DefenseRegistry("defense", "defenses")

Place = Literal["batch", "records", "representation", "gradient", "update"]
_METHOD_OF: dict[Place, str] = {
    "batch": "on_batch",
    "records": "on_records",
    "representation": "perturb",
    "gradient": "on_gradient",
    "update": "on_update",
}


class RunningStep(ABC):
    """One local step of a defence on records, under way."""

    @abstractmethod
    def add(self, records: Records) -> Params:
        """Return the gradient of the step with these records and all before them."""


class Defense(ABC):
    """Override the places where the defence acts; the others change nothing.

    In order: on the batch before a local step, on the gradients of its records, or on the representation that the
    weight gradient of a layer is built from (Sun et al.), on the gradient of the step, on the update that is sent.
    """

    spec_name: ClassVar[str]
    title: ClassVar[str] = ""  # a few plain words for a page; without them its name stands there
    draws_on_device: ClassVar[bool] = False  # whether random numbers are drawn where the generator lies, CUDA as well
    draws: ClassVar[bool] = True  # whether it draws random numbers at all
    keeps_apart: ClassVar[bool] = False  # whether on_batch changes each example by itself, so that none are mixed

    @property
    def acts_on(self) -> frozenset[Place]:
        """Where this defence acts: the methods it overrides."""
        return frozenset(
            place for place, name in _METHOD_OF.items() if getattr(type(self), name) is not getattr(Defense, name)
        )

    @property
    def idle(self) -> bool:
        """Whether these settings, or those of a part, change nothing: a share, a scale or a floor of zero."""
        return any(getattr(self, name, None) == 0 for name in ("share", "scale", "floor"))

    def noise_from(self, rng: Source) -> NoiseKind:
        """Return what its random numbers are where they are drawn from this source: secret, simulated or none."""
        return noise_kind(rng) if self.draws else "none"

    def said_of_noise(self) -> dict[str, str]:
        """Return what a row of a simulation says of a defence that draws: whether its noise can be drawn again."""
        noise = self.noise_from(Generator())
        return {} if noise == "none" else {"noise": noise}

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

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        """Return the gradient of one local step, made of the gradients of its records.

        ``slots``: how many records a batch has room for, public and the same in a shorter last batch.
        """
        total = records.weighted_sum(torch.ones(records.count))
        return {name: (g / slots).to(records.like[name].dtype) for name, g in total.items()}

    def on_stacked(self, records: Records, present: Tensor, slots: Tensor, rngs: Sequence[Source]) -> Params:
        """Return the same for a step of K clients at once (K, *shape): records (K, N), present (K, N) or padding."""
        raise DefenseError(f"{type(self).__name__} acts on the records of one client at a time. Use another engine.")

    def begin(self, slots: int, rng: Source) -> "RunningStep | None":
        """Return a step whose records may come in several batches; None: ``on_records`` takes them at once."""
        return None

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        """Change the gradient of one local step."""
        return gradient

    def on_update(self, update: Update, rng: Source) -> Update:
        """Change the update before it is sent."""
        return update

    def for_run(self, run: PlannedRun) -> "Defense":
        """Return the defence for a planned run: where a promise is given, with the noise that it needs."""
        return self

    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> "Defense":
        """Return the defence for one round: with what follows from public data at the weights that were sent."""
        return self

    @property
    def follows_rounds(self) -> bool:
        """Whether something of it follows from the weights of each round."""
        return type(self).for_round is not Defense.for_round

    def check_steps(self, steps: int) -> None:  # noqa: B027 - most promise nothing that hangs on it
        """Raise where what is promised does not hold for so many local steps of a round."""

    def spends(self, epochs: int) -> float | None:
        """Return what one participation costs a record, as μ² of Gaussian DP; None: nothing is promised."""
        return None

    @property
    def allowance(self) -> float | None:
        """μ² that a record may spend over a whole run; None: no limit."""
        return None

    @property
    def min_clients(self) -> int:
        """The fewest clients of a round whose sum may be released; 0: each update is released by itself."""
        return 0

    def alone(self) -> "Defense":
        """Return the defence of one client before a server that knows all others: its part of a sum, and the noise."""
        return self

    def for_server(self) -> "Defense":
        """Return the defence as a server has it: where a setting is a secret of the client, with another secret."""
        return self

    def mean_of(self, rounds: int) -> "Defense | None":
        """Return the defence that sends what the mean of so many rounds at the same weights is; None: none is known."""
        return None

    def fingerprint(self, seen: Observation) -> Observation:
        """Return what of an update is the same whatever the client draws, for a server that has a list of candidates.

        The tensors keep their shapes, and ``simulate`` makes the same of a gradient. By default there is nothing.
        """
        return seen

    @abstractmethod
    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what a server that knows this defence would do; never empty."""


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

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
