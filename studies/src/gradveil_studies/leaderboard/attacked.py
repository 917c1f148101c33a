"""One record is sought, all else is known: what a server of the leaderboard sees of a client under one defence."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Malicious
from gradveil.attacks.rounds import mean_round, pooled
from gradveil.auditing.train import FIT
from gradveil.countermeasures import Countermeasure, plain
from gradveil.data import load
from gradveil.data.base import Dataset, Split
from gradveil.data.partition import Indices, partition
from gradveil.defenses.veil import Veil
from gradveil.federated.client import step_gradient
from gradveil.federated.server import planned_run
from gradveil.federated.settings import Local
from gradveil.models import build as build_model
from gradveil.models import fit_to_public
from gradveil.privacy.plan import PlannedRun, class_spectra
from gradveil.protection.defense import Defense, NoDefense, accounted, in_round
from gradveil.protection.defense import build as build_defense
from gradveil.threats.one_update import alone
from gradveil.threats.panel import listed
from gradveil.threats.trial import Public, observe
from gradveil.tree import Params, map_values
from gradveil.types import Batch, GaussianPrior, Observation, Update
from gradveil_studies.leaderboard.entries import Entry, Panel, run_seeds
from gradveil_studies.leaderboard.training import held_out_records
from gradveil_studies.paper.base import Context

AFTER_THE_MEAN = frozenset({"gradient", "update"})  # places that see the mean over the records alone
RANK = 256  # principal directions of a prior
UNDEALT = 512  # public records that a defence may look at
PLANTED = 8  # records of a client that receives planted weights


@dataclass(frozen=True)
class Place:
    """The devices of one panel that are attacked, at the weights of the first round, and what is public."""

    panel: Panel
    context: Context

    def of(self, entry: Entry) -> "Place":
        """Return the same place with the model that an entry trains."""
        return replace(self, panel=replace(self.panel, model=entry.model)) if entry.model else self

    @cached_property
    def dataset(self) -> Dataset:
        return load(self.panel.dataset, self.context.data)

    @cached_property
    def model(self) -> nn.Module:
        """The model of the first seed, as it is sent in the first round."""
        seed = run_seeds(self.context.seeds, 0).number("weights")
        model = build_model(self.panel.model, self.dataset.input_shape, self.dataset.num_classes, seed=seed)
        fit_to_public(model, self._undealt.batch(slice(0, FIT)).inputs)
        return model.train().to(self.context.device)

    @cached_property
    def truth(self) -> Batch:
        """The records that are sought, one in each attack: the first of as many devices."""
        return self.dataset.train.batch([int(device[0]) for device in self._devices[: self.panel.victims]])

    @cached_property
    def others(self) -> Batch:
        """The other records of the attacked client: those of the first device but one."""
        return self.dataset.train.batch(self._devices[0][1:]).to(self.context.device)

    @cached_property
    def _devices(self) -> list[Indices]:
        rng = run_seeds(self.context.seeds, 0).numpy("split")
        return partition(self.dataset.train.labels, self.panel.splits["paper"], rng)

    @cached_property
    def _undealt(self) -> Split:
        return held_out_records(self.dataset, self._devices, self.context.seeds.numpy("undealt"))

    @cached_property
    def public(self) -> Public:
        """Images that are no client's, and what they say of the others."""
        return Public.draw(self.dataset, self.context.seeds("public")).to(self.context.device)

    @cached_property
    def shown(self) -> Batch:
        return self.public.batch.to(self.context.device)

    @cached_property
    def within(self) -> tuple[Tensor, GaussianPrior]:
        """The mean of each class of public images (classes, pixels), and the prior of what is left of an image."""
        x, y = self.public.batch.inputs.flatten(1), self.public.batch.labels
        means = torch.stack([x[y == c].mean(0) for c in range(self.dataset.num_classes)])
        prior = GaussianPrior.fit(x - means[y], rank=RANK)
        return means, prior

    @cached_property
    def spectra(self) -> list[Tensor]:
        """The spectrum of each class of the test split: what ``gradveil plan`` takes."""
        return list(class_spectra(self.dataset.test.batch(slice(None))).values())

    @cached_property
    def class_priors(self) -> list[GaussianPrior]:
        """What a server that knows the class expects, by class."""
        means, prior = self.within
        at = self.context.device
        return [GaussianPrior(mean.to(at), prior.factor.to(at), prior.ridge) for mean in means]

    def planned(self, entry: Entry) -> PlannedRun:
        """Return the run of the first seed: how often a device takes part at most."""
        training, seeds = self.panel.training(), run_seeds(self.context.seeds, 0)
        return planned_run(seeds, self._devices, training, build_defense(entry.spec))

    def ready(self, entry: Entry, model: nn.Module | None = None) -> Defense:
        """Return the defence as the attacked clients run it in the first round, or at the weights that they receive.

        Where noise is split among a cohort whose sum alone is seen, the server that knows all other records has the
        whole noise of that sum over the one record: as if the client added all of it.
        """
        defense = accounted(build_defense(entry.spec)).for_run(self.planned(entry))
        if isinstance(defense, Veil):
            defense = replace(defense, tier="local")
        public = self._undealt.batch(slice(0, UNDEALT)).to(self.context.device)
        return in_round(defense, model or self.model, public)


class Client:
    """A client under one defence, of which one record is sought; the server has the others and takes off what they add.

    Defences that act after the mean over the records, or mix them, run on a client with all of its records. The others
    act on each record by itself: there the client has the one record alone, which is what is left when the rest is
    taken off; so has one of which ``alone`` says it.
    """

    def __init__(self, place: Place, defense: Defense, rounds: int, alone: bool = False) -> None:
        self.place, self.defense, self.rounds = place, defense, rounds  # rounds: of the whole run, that add up
        self.mixes = "batch" in defense.acts_on and not defense.keeps_apart and not alone
        whole = self.mixes or (defense.acts_on <= AFTER_THE_MEAN and not alone)
        self.size = 1 + len(place.others) if whole else 1
        self.rest: Params = {}  # what the other records add to the mean gradient
        if self.size > 1:
            share = len(place.others) / self.size
            self.rest = map_values(lambda g: g * share, self._gradient(place.others))
        self.simulated, self.simulated_mean = self._simulated, self._simulated_mean  # one object each: a key
        self._gradients: dict[int, Params] = {}  # of the records that are sought
        self._updates: dict[tuple[int, int], Observation] = {}  # as they were sent: the same for every server

    def _gradient(self, batch: Batch) -> Params:
        return step_gradient(self.place.model, batch, NoDefense(), Generator())

    def sought(self, number: int) -> Batch:
        return self.place.truth[number : number + 1].to(self.place.context.device)

    def _sent(self, one: Batch, rng: Generator, defense: Defense, own: Params | None = None) -> Observation:
        place, lr = self.place, self.place.panel.lr
        classes, prior = place.dataset.num_classes, place.public.prior
        if self.mixes:
            one = Batch(torch.cat([place.others.inputs, one.inputs]), torch.cat([place.others.labels, one.labels]))
        if self.mixes or self.size == 1:
            return observe(place.model, one, defense, rng, classes, prior, lr, local=Local(batch_size=None))
        own = self._gradient(one) if own is None else own
        gradient = {name: g / self.size + self.rest[name] for name, g in own.items()}
        update = defense.on_update(Update(defense.on_gradient(gradient, rng), self.size, 1, lr), rng)
        return Observation(place.model, update, place.dataset.input_shape, classes, prior=prior)

    def _simulated(self, one: Batch, rng: Generator) -> Params:
        """Return what is left of an update that the server makes by itself, for any record."""
        return self._left(self._sent(one, rng, self.defense.for_server())).update.gradient

    def _simulated_mean(self, one: Batch, rng: Generator) -> Params:
        """Return the mean of as many such updates as a run has; of Gaussian noise alone it is one with less of it."""
        if (calmer := self.defense.mean_of(self.rounds)) is not None:
            return self._left(self._sent(one, rng, calmer.for_server())).update.gradient
        own = self._gradient(one) if self.size > 1 and not self.mixes else None
        sent = [self._sent(one, rng, self.defense.for_server(), own) for _ in range(self.rounds)]
        return mean_round([self._left(seen) for seen in sent]).update.gradient

    def _left(self, seen: Observation) -> Observation:
        """Return what is left of what was seen when what the other records add is taken off."""
        return seen if self.size == 1 else alone(seen, self.rest, float(self.size))

    def seen(self, number: int, server: Countermeasure, rounds: int = 1, told: bool = False) -> Observation:
        """Return what a server makes of so many rounds; ``told``: it knows the class of the record."""
        one, seeds = self.sought(number), self.place.context.seeds
        if self.size > 1 and number not in self._gradients:
            self._gradients[number] = self._gradient(one)
        found: list[Observation] = []
        for r in range(rounds):
            if (number, r) not in self._updates:
                rng, own = seeds("client", number, r), self._gradients.get(number)
                self._updates[number, r] = self._sent(one, rng, self.defense, own)
            view = self._left(server.view(self._updates[number, r]))
            found.append(replace(view, client=self.simulated) if view.simulate is None else view)
        if told:
            prior = self.place.class_priors[int(one.labels)]
            found = [replace(seen, labels=one.labels, prior=prior) for seen in found]
        first, *rest = found
        alike = tuple(replace(seen, simulate=first.simulate) for seen in rest)  # the same function, made anew
        return replace(first, rounds=alike, public=self.place.shown)

    def mean_seen(self, number: int, told: bool) -> Observation:
        """Return the mean of the whole run's updates as one, beside what a client would send of the same kind."""
        return replace(pooled(self.seen(number, plain(), self.rounds, told)), client=self.simulated_mean)

    def candidates(self, number: int) -> Batch:
        """Return the record among public ones."""
        return listed(self.sought(number), self.place.public, self.place.context.seeds("candidates", number))


def planted(place: Place, entry: Entry, attack: Malicious, rng: Generator) -> tuple[Observation, Batch]:
    """Return what a server sees of a client that takes a step at weights that it chose, and the client's records."""
    data, local = place.dataset, Local(batch_size=None)
    model = attack.plant(place.model, data.input_shape, data.num_classes, place.shown, rng)
    truth, defense = place.others[:PLANTED], place.ready(entry, model)
    seen = observe(model, truth, defense, rng, data.num_classes, place.public.prior, place.panel.lr, local=local)
    return replace(seen, public=place.shown), truth
