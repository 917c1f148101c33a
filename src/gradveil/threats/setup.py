"""What an audit is run with: one frozen table of settings, the same in Python, on the command line and in TOML."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from gradveil.attacks.base import LARGE, Attack
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.newton import Newton
from gradveil.countermeasures import TIERS, Countermeasure, Tier
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.data.partition import Indices, deal
from gradveil.errors import DataError, GradveilError, SpecError, did_you_mean, from_defense, own_error
from gradveil.federated.client import check_loss, step_gradient, update_batch_size
from gradveil.federated.server import planned_run
from gradveil.federated.settings import ALL, Training, only_trained
from gradveil.imports import is_import_path
from gradveil.losses import CrossEntropy
from gradveil.losses import build as build_loss
from gradveil.models import build_working
from gradveil.protection.defense import PUBLIC as LOOKED_AT
from gradveil.protection.defense import Defense, accounted, in_round
from gradveil.protection.defense import build as build_defense
from gradveil.ranges import Count, Positive, Seed, Weight
from gradveil.seeds import Seeds
from gradveil.threats.probes import Probed, probe
from gradveil.threats.probing.function import Client
from gradveil.threats.trial import Public, check_fits
from gradveil.tree import parameters, size
from gradveil.types import Batch, Update


def is_large(model: nn.Module, weights: int = LARGE) -> bool:
    """Return whether a network has so many weights, frozen ones too, that what is done to it is limited."""
    return sum(p.numel() for p in model.parameters()) > weights


def in_limited_time(attacks: tuple[str, ...], input_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the attacks for limited time: on large pictures the search of the cheapest steps before the others."""
    if len(input_shape) != 3 or prod(input_shape) <= Newton().dense_limit:
        return attacks
    return tuple(sorted(attacks, key=lambda spec: build_attack(spec).kind == "search" and not spec.startswith("gs")))


WEIGHTS = 100_000
NUMBERS = 256  # of one input


def is_small(model: nn.Module, input_shape: tuple[int, ...] = ()) -> bool:
    """Return whether one thread is enough for this model, and for inputs of this shape.

    On a shared machine a second thread costs a small problem many times what it brings.
    """
    return size(parameters(model)) <= WEIGHTS and prod(input_shape) <= NUMBERS


BUSY = 0.75  # of the cores


def is_busy() -> bool:
    """Return whether others keep this machine's cores busy: then threads wait for each other most of the time.

    Where the number of threads was chosen (OMP_NUM_THREADS), it is left.
    """
    chosen = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys()
    return not chosen and hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Within, torch runs on one thread, where wanted; the setting is put back afterwards."""
    before = torch.get_num_threads()
    try:
        if wanted:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def find_device(name: str) -> torch.device:
    """Return the device of a name: cpu, cuda (``cuda:1`` is the second), or auto, which is cuda where there is one."""
    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu") and not (kind == "cuda" and (number.isdecimal() or name == "cuda")):
        raise SpecError(f"--device {name}: there is no such device. Give cpu, cuda or auto.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if kind == "cuda" and int(number or 0) >= count:
        found = f"there are {count} CUDA devices" if count else "no CUDA device was found"
        raise SpecError(f"--device {name}: {found}. Use --device cpu.")
    return torch.device(name)


def with_found(declared: Sequence[Countermeasure], probed: Probed) -> tuple[Countermeasure, ...]:
    """Return the servers that a defence declares, and those that probing it found, whatever they are called."""
    taken = {c.name for c in declared}
    return (*declared, *(replace(c, name=f"found {c.name}") if c.name in taken else c for c in probed.servers))


MINUTES = 5.0  # for an audit of a large network, where none are given
LEAST_MINUTES = 0.1
DEFENSES = ("none", "representation:share=0.4", "random_mask:share=0.4", "pruning:share=0.8", "gaussian:scale=0.1")


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Training):
    """The settings of an audit. The defaults end within three minutes on two cores."""

    dataset: str = "digits"
    data: str | None = None  # the local data folder
    model: str = ""  # empty: what suits the data set
    defenses: tuple[str, ...] = DEFENSES
    attacks: tuple[str, ...] = ()  # none: those that suit the model (see ``default_panel``)
    tiers: tuple[str, ...] = ()  # of servers; none: all, but oblivious and knows alone where attacks are named
    partition: str = "iid:devices=10"
    rounds: Count = 10
    clients: Count = 5
    batch_size: Count | None = 8
    lr: Positive = 0.3
    images: Count = 8  # that are attacked, in each round that is looked at
    examples: Count = 1  # of one attacked update
    gallery: Count = 100  # images that an original must be told from, itself included
    meter_seconds: Weight = 60.0  # at most, for certificates and the leak meter after all else; 0: they are left out
    minutes: Positive | None = None  # at most, for all of it; None: no limit, of large networks MINUTES
    trained: bool | None = None  # whether a federation is trained, for rounds; None: where the network is not large
    weights: str | None = None  # a file with the weights that clients receive; None: the model's own
    device: str = "cpu"  # cpu, cuda or auto
    seed: Seed = 0

    # may differ on --resume
    FREE: ClassVar[frozenset[str]] = frozenset({"meter_seconds", "minutes", "device", "tiers", "trained"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minutes is not None and self.minutes < LEAST_MINUTES:
            raise SpecError(
                f"minutes={self.minutes}: in {60 * self.minutes:.2g} seconds no audit is set up. Give at least "
                f"{LEAST_MINUTES}."
            )
        if self.images % self.examples:
            raise SpecError(f"images={self.images} cannot be dealt out to updates of {self.examples} examples each.")
        for kind in ("defenses", "attacks"):
            values = getattr(self, kind)
            if len(set(values)) < len(values):
                raise SpecError(f"The {kind} {', '.join(values)} name one twice. Name each once.")
        for tier in self.tiers:
            if tier not in TIERS:
                hint = did_you_mean(tier, TIERS)
                raise SpecError(f"No tier of servers is called {tier!r}. {hint}Known: {', '.join(TIERS)}.")

    @property
    def planned(self) -> Update:
        """The update of an attacked client, without its numbers: what its local training is."""
        n = self.examples
        return Update({}, n, self.steps(n), self.lr_of(1), update_batch_size(self, n), self.rule)


def load_dataset(source: str | Dataset | Callable[..., Any], data: str | None) -> Dataset:
    """Return the data set that a name, an object or a user's function gives."""
    try:
        return load(source, data)
    except GradveilError:
        raise
    except Exception as error:
        if isinstance(source, str) and not is_import_path(source):
            raise  # ours, not the user's
        name = source if isinstance(source, str) else getattr(source, "__name__", repr(source))
        raise DataError(f"The data set {name} cannot be made. The error is its own: {own_error(error)}") from error


def fitting_model(source: Any, dataset: Dataset, loss: str, seed: int, trains: str = ALL) -> nn.Module:
    """Return a model with the outputs that the loss needs for this data, after both were tried on a few examples.

    ``trains``: what of it is trained (see ``only_trained``).
    """
    outputs, sure = dataset.model_outputs(loss), isinstance(build_loss(loss), CrossEntropy)
    model = build_working(source, dataset.input_shape, outputs, seed, dataset.modality, sure_of_classes=sure)
    only_trained(model, trains)
    check_loss(model, dataset.train.batch(slice(0, 2)), loss)
    return model


@dataclass(frozen=True)
class AuditSetup:
    """One audit's parts."""

    config: AuditConfig
    dataset: Dataset
    model: nn.Module  # with the weights of the first round
    defenses: dict[str, Defense]  # by spec; "none" first
    attacks: dict[str, Attack]  # by spec
    clients: Sequence[Indices]
    truth: Batch  # the images under attack
    public: Public
    seeds: Seeds
    num_classes: int  # or numbers in a target
    probes: dict[str, Probed] = field(default_factory=dict)  # by defence, as far as they were made
    _acting: dict[tuple[str, int], tuple[nn.Module, Defense]] = field(default_factory=dict)  # by defence and model

    @property
    def device(self) -> torch.device:
        """Where clients and servers compute; examples are kept on the CPU."""
        return next(self.model.parameters()).device

    @property
    def is_dear(self) -> bool:
        """Whether running a client on every candidate of a list takes long for the time that there is."""
        return is_large(self.model, LARGE if self.config.minutes is None else LARGE // 10)

    @property
    def trains(self) -> bool:
        """Whether a federation is trained."""
        return not is_large(self.model) if self.config.trained is None else self.config.trained

    @property
    def victims(self) -> range:
        """The attacked clients."""
        return range(self.config.images // self.config.examples)

    def held_by(self, victim: int) -> Batch:
        """Return the examples that one attacked client holds."""
        return self.truth[victim * self.config.examples : (victim + 1) * self.config.examples]

    def countermeasures(self, defense: str, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what a server that knows this defence does; nothing where there is nothing to undo."""
        if defense == "none":
            return ()
        return with_found(self.acting(defense, model).servers(model), self.probed(defense))

    def acting(self, defense: str, model: nn.Module) -> Defense:
        """Return the defence as a client runs it that received this model, before a server that knows all others."""
        key = (defense, id(model))
        if key not in self._acting:
            self._acting[key] = (model, for_client(self.defenses[defense], model, self.public.batch, self.config.loss))
        return self._acting[key][1]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of servers that attack."""
        return tuple(tier for tier in TIERS if tier in (self.config.tiers or ("oblivious", "adaptive")))

    def probed(self, defense: str) -> Probed:
        """Return what running the defence says about it; done once."""
        if defense == "none":
            return Probed()
        if defense not in self.probes:
            examples, lr = (self.public.batch, self.config.examples), self.config.lr_of(1)
            self.probes[defense] = probe(
                self.acting(defense, self.model), self.model, *examples, self.config, lr, self.seeds, self.num_classes
            )
        return self.probes[defense]


def build_setup(
    config: AuditConfig,
    dataset: Dataset,
    model: nn.Module,
    defended: Mapping[str, str | Defense],
    attacked: Mapping[str, str | Attack],
) -> AuditSetup:
    """Build every part of an audit; whatever does not fit is an error now and not after minutes."""
    seeds, device = Seeds(config.seed), find_device(config.device)
    named: dict[str, str | Defense] = {"none": "none", **defended}
    defenses = {name: build_defense(spec) for name, spec in named.items()}
    attacks = {name: build_attack(spec) for name, spec in attacked.items()}
    clients = deal(dataset, config.partition, seeds("partition"))
    public = Public.draw(dataset, seeds("public"), gallery=config.gallery).to(device)
    for name, defense in defenses.items():
        check_fits(name, defense, dataset)
        defenses[name] = accounted(defense).for_run(planned_run(seeds, clients, config, defense))
    if config.clients > len(clients):
        made = f"{config.partition} makes {len(clients)}"
        raise DataError(f"{config.clients} clients a round were asked for and {made}. Ask for fewer.")
    if config.images > (most := len(dataset.train)):
        asked = f"{config.images} {dataset.modality.many} were asked for"
        raise DataError(f"{asked} and {dataset.name} has {most} to train on.")
    truth = dataset.train.sample(config.images, seeds("images"))
    known = truth, public, seeds, dataset.outputs(config.loss)
    scene = AuditSetup(config, dataset, model.to(device), defenses, attacks, clients, *known)
    for name in defenses:
        _try_defense(scene, scene.acting(name, scene.model))
    return scene


def for_client(defense: Defense, model: nn.Module, public: Batch, loss: str) -> Defense:
    """Return the defence of one client that received this model, before a server that knows all others."""
    few, first = public[:LOOKED_AT], next(model.parameters())
    few = Batch(few.inputs.to(first), few.labels.to(first.device))
    return in_round(accounted(defense).single_client(), model, few, build_loss(loss))


def _try_defense(scene: AuditSetup, defense: Defense) -> None:
    """Run the defence once, and build the attacks it names: a missing layer is found before training."""
    for server in defense.servers(scene.model):
        if server.attack is not None:
            build_attack(server.attack)
    few, loss = scene.dataset.train.batch(slice(0, 2)).to(scene.device), build_loss(scene.config.loss)
    with Client(defense).running() as own:
        try:
            step_gradient(copy.deepcopy(scene.model), few, own, scene.seeds("trial"), loss=loss)
        except Exception as error:
            if from_defense(error) is error:
                raise  # what a defence's own code raises is a line of the report
