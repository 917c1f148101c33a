"""What stands on the leaderboard and by which rules: all of it fixed before a result is seen."""

from dataclasses import dataclass

from gradveil.federated.settings import Training
from gradveil.seeds import Seeds


@dataclass(frozen=True)
class Entry:
    """A defence at one strength."""

    spec: str
    unit: float = 1.0  # of its learning rates: not 1 where it sends larger or smaller numbers than a gradient's
    batch_size: int | None = None  # of the local steps; None: all of a client's records in one
    model: str = ""  # a defence that is part of the model: what is trained in place of the panel's
    alone: bool = False  # attacked on a client with one record: what the others add cannot be told and taken off

    @property
    def name(self) -> str:
        if self.model:
            return f"model {self.model.partition(':')[0]}"
        return self.spec if self.batch_size is None else f"{self.spec} (batches of {self.batch_size})"


NONE = Entry("none")
BATCHES = Entry("none", 1 / 7, 32)  # what training in batches would reach: trained, not attacked
ENTRIES = (
    NONE,
    Entry("representation:share=0.1"),
    Entry("representation:share=0.4"),
    Entry("random_mask:share=0.4"),
    Entry("pruning:share=0.8"),
    Entry("pruning:share=0.99"),
    Entry("gaussian:scale=0.001"),
    Entry("gaussian:scale=0.01"),
    Entry("gaussian:scale=0.1"),
    Entry("laplace:scale=0.01"),
    Entry("decoy:floor=0.015"),
    Entry("sign"),
    Entry("quantise:bits=4"),
    Entry("qsgd:levels=1,norm=max"),
    Entry("ats"),
    Entry("mixup"),
    Entry("concealed", alone=True),
    Entry("none", model="precode:activation=relu,init=kaiming", alone=True),
    Entry("censor"),
    Entry("outpost"),
    Entry("dp_sgd:noise=1"),
    Entry("veil:promise=reconstruction,quantile=0.95,tier=aggregate"),
    Entry("veil:promise=reconstruction,quantile=0.95,shape=public,tier=aggregate"),
    Entry("veil:promise=reconstruction,quantile=0.95"),
    Entry("veil:promise=reconstruction,clip=1,tier=aggregate", 8),
    Entry("veil:promise=reconstruction,clip=1", 8),
    Entry("veil:promise=identification,quantile=0.95,tier=aggregate"),
    Entry("veil:promise=identification,quantile=0.8"),
    Entry("veil:epsilon=8,quantile=0.8,tier=aggregate"),
)
MULTIPLES = (1, 2, 4, 8)  # of a panel's learning rate: each entry tries all, on the first seed


@dataclass(frozen=True)
class Panel:
    """A data set, dealt out to devices, and for how long they train; one local step of all records in each round."""

    dataset: str
    devices: int
    clients: int  # of a round
    per_class: int  # records of each of a device's two classes
    rounds: int
    lr: float  # the smallest that is tried
    seeds: int
    victims: int  # devices of which one record is sought
    pairs: int  # of updates and images that the learning server learns from
    newton: str = "newton"
    model: str = "lenet:activation=relu,init=kaiming"

    @property
    def records(self) -> int:
        return 2 * self.per_class

    @property
    def splits(self) -> dict[str, str]:
        """How records are dealt out: as in the paper, two classes a device, and at random."""
        return {
            "paper": f"classes:devices={self.devices},classes=2,per_class={self.per_class}",
            "iid": f"iid:devices={self.devices},per_device={self.records}",
        }

    def training(self, entry: Entry = NONE, multiple: float = 1) -> Training:
        """Return how an entry trains at a multiple of the learning rate."""
        lr = self.lr * multiple * entry.unit
        return Training(rounds=self.rounds, clients=self.clients, epochs=1, batch_size=entry.batch_size, lr=lr)


def run_seeds(seeds: Seeds, seed: int) -> Seeds:
    """Return the seeds of one of the repeated runs."""
    return Seeds(seeds.number("leaderboard", seed))


FREE = "newton:steps=20,cg_steps=20,dense_limit=0"  # matrix-free: a tenth of the time, and within 3 % under noise
PANELS = {
    "quick": (Panel("digits", 20, 5, 20, 60, 0.1, 2, 6, 300, newton="newton:steps=15"),),
    "full": (
        Panel("mnist", 100, 10, 100, 200, 0.07, 3, 8, 1000, newton=FREE),
        Panel("cifar10", 100, 10, 100, 1000, 0.01, 3, 8, 1000, newton=FREE),
    ),
}
