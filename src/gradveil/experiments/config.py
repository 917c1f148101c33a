"""What an audit is run with: one frozen table of settings, the same in Python, on the command line and in TOML."""

from dataclasses import dataclass, fields

from gradveil.errors import SpecError

DEFENSES = (
    "none",
    "representation:share=0.4",
    "random_mask:share=0.4",
    "pruning:share=0.8",
    "gaussian:scale=0.1",
)
ATTACKS = ("newton", "dlg:steps=15,restarts=3")


@dataclass(frozen=True)
class AuditConfig:
    """The settings of an audit. The defaults end within three minutes on two cores."""

    dataset: str = "digits"
    data: str | None = None  # the local data folder
    model: str = "lenet:strides=2/1"  # sigmoid, as published, but two convolutions deep: it learns digits in six rounds
    defenses: tuple[str, ...] = DEFENSES
    attacks: tuple[str, ...] = ATTACKS
    partition: str = "iid:devices=10"
    rounds: int = 6
    clients: int = 5  # that train in a round
    epochs: int = 2  # of local training
    batch_size: int = 8  # of a local step
    lr: float = 0.3
    images: int = 8  # that are attacked, in each round that is looked at
    examples: int = 1  # of one attacked update
    gallery: int = 100  # images that an original must be told from, itself included
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and field.name != "seed" and not value > 0:
                raise SpecError(f"{field.name}={value}: give a number above zero.")
        if not self.attacks:
            raise SpecError("An audit needs at least one attack, e.g. --attack newton.")
        if self.images % self.examples:
            raise SpecError(f"images={self.images} cannot be dealt out to updates of {self.examples} examples each.")
        for kind in ("defenses", "attacks"):
            values = getattr(self, kind)
            if len(set(values)) < len(values):
                raise SpecError(f"The {kind} {', '.join(values)} name one twice. Name each once.")
