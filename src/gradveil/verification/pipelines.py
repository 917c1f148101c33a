"""Canary records, and the real pipelines that they are sent through: ``protect``, an engine's rounds, a trainer.

Canaries are examples whose clipped gradients are full and point apart. A pipeline yields what it released, trial by
trial, with the weights it was released at. A slot is zeroed by leaving its record out of a step of fixed slots, or
where an engine counts records by an input that is not a number.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.data.base import Dataset, Split
from gradveil.defenses.dp_sgd import DpSgd
from gradveil.defenses.veil import Veil
from gradveil.errors import DataError, DefenseError, GradveilError
from gradveil.federated.settings import Training
from gradveil.federated.simulate import public_records, simulate
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.losses import build as build_loss
from gradveil.modalities import Modality
from gradveil.modalities.tokens import Tokens
from gradveil.protection.counted import nothing_drawn
from gradveil.protection.defense import Defense, accounted, build, in_round
from gradveil.protection.protect import protect
from gradveil.seeds import Seeds
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Batch

SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)  # of random inputs, until the clip binds
FULL = 2.0  # times the clip: a gradient that long is clipped for certain, whatever is rounded on the way
Into = Callable[[Tensor], Tensor]  # from gradients (K, p) to the coordinates in which the noise is alike


@dataclass(frozen=True)
class Canaries:
    """K records, each put into its slot of a client by a coin, or its slot zeroed."""

    inputs: Tensor  # (K, *shape)
    labels: Tensor  # (K,) or (K, ...)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or len(self.inputs) < 2:
            raise DataError(
                f"There are {len(self.inputs)} canaries with {len(self.labels)} labels. Give two at least, each with "
                "one."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def present(self, some: Tensor) -> Batch:
        """Return the records whose slots are not zeroed; some (K,)."""
        return Batch(self.inputs[some], self.labels[some])


def gradients(model: nn.Module, weights: Params, canaries: Canaries, loss: Loss = CROSS_ENTROPY) -> Tensor:
    """Return each record's gradient (K, p) at these weights, in float32, by plain autograd on batches of one.

    Nothing of the mechanism is used, so what is wrong with its own gradients or norms shows.
    """
    free = {n: weights[n].detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    fixed |= {n: b.detach().clone() for n, b in model.named_buffers()}

    def value(some: Params, x: Tensor, y: Tensor) -> Tensor:
        return loss.each(functional_call(model, fixed | some, (x[None],)), y[None]).sum()

    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = vmap(partial(grad(value), free), randomness="different")(canaries.inputs, canaries.labels)
    except (RuntimeError, NotImplementedError):  # a recurrent layer, a custom function
        pairs = zip(canaries.inputs, canaries.labels, strict=True)
        each = [_plain(value, free, x, y) for x, y in pairs]
        found = {n: torch.stack([g[n] for g in each]) for n in free}
    return torch.cat([g.detach().flatten(1).float() for g in found.values()], 1)


def _plain(value: Callable[[Params, Tensor, Tensor], Tensor], free: Params, x: Tensor, y: Tensor) -> Params:
    own = {n: w.clone().requires_grad_() for n, w in free.items()}
    with torch.enable_grad():
        found = torch.autograd.grad(value(own, x, y), list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True))


def of_kind(batch: Batch, modality: Modality) -> Batch:
    """Return examples to make canaries alike to: tokens, which a data set holds as floats, as whole numbers."""
    return Batch(batch.inputs.long(), batch.labels) if isinstance(modality, Tokens) else batch


def make(
    model: nn.Module,
    like: Batch,
    count: int,
    rng: torch.Generator,
    loss: Loss = CROSS_ENTROPY,
    clip: float = 1.0,
    into: Into = lambda g: g,
) -> Canaries:
    """Return random records of the kind of some given ones, as loud as it takes for the clip to bind.

    Inputs that are numbers are Gaussian, scaled until nine in ten gradients are twice as long as the clip, or as long
    as it goes; tokens are drawn from those given. Labels are those given, drawn again.
    """
    device = like.inputs.device
    chosen = torch.randint(len(like), (count,), generator=rng).to(device)
    labels = like.labels[torch.randint(len(like), (count,), generator=rng).to(device)]
    if not like.inputs.is_floating_point():
        some = like.inputs.flatten()[torch.randint(like.inputs.numel(), like.inputs[chosen].shape, generator=rng)]
        if like.labels.shape == like.inputs.shape:  # the next token at each place
            labels = some
        return Canaries(some.to(device), labels)
    noise = torch.randn((count, *like.inputs.shape[1:]), generator=rng).to(like.inputs)
    weights = parameters(model)
    best, longest = Canaries(noise, labels), -1.0
    for scale in SCALES:
        trial = Canaries(noise * scale, labels)
        length = float(into(gradients(model, weights, trial, loss)).norm(dim=1).nan_to_num().quantile(0.1))
        if length > longest:
            best, longest = trial, length
        if length >= FULL * clip:
            break
    return best


Trainer = Callable[[nn.Module, Tensor, Tensor, Tensor], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Released:
    """One vector that left a pipeline, whatever its unit."""

    trial: int
    weights: Params  # that it was made at; the same object where they are the same
    vector: Tensor  # (p,)


class Pipeline(ABC):
    """A pipeline; ``promised`` is known when it has run."""

    name: str
    secret: bool = True  # whether its noise is meant to be drawn by nobody else
    fresh: bool = True  # whether every release carries noise of its own, and no part of an earlier one
    trial_by_trial: bool = True  # not a round of all trials after the other
    base: bool = False  # whether something beside the canaries may be released
    before: Sequence[int] = (0,)  # draws of a generator that may come before its noise
    promised: float = nan  # μ, as the pipeline itself accounts for it
    clip: float = 1.0  # that the gradients of canaries are made to exceed

    @abstractmethod
    def run(self, model: nn.Module, canaries: Canaries, present: Tensor) -> Iterator[Released]:
        """Send the canaries through, once for each row of coins; present (T, K)."""

    def into(self, model: nn.Module, weights: Params) -> Into:
        """Return the map into the coordinates in which the noise is alike."""
        return lambda g: g


def weights_of(model: nn.Module) -> Params:
    """Return copies of the trained parameters by name, in their order."""
    return {name: p.detach().clone() for name, p in parameters(model).items()}


@dataclass
class OfDefense(Pipeline):
    """A pipeline of this package, with a defence of records in it."""

    defense: Defense
    loss: str = "cross_entropy"
    public: Batch | None = None

    def __post_init__(self) -> None:
        if "records" not in self.defense.acts_on or accounted(self.defense).cost(1) is None:
            raise DefenseError(
                "verify measures a promise about single records, which veil and dp_sgd give; this defence gives none."
            )
        if accounted(self.defense).min_clients:
            raise DefenseError(
                "tier=aggregate promises something of a cohort's sum, and verify looks at single updates. Give the "
                "defence that each client has, tier=local."
            )
        self.clip = float(getattr(self.defense, "clip", None) or 1.0)

    def _acting(self, model: nn.Module, weights: Params) -> Defense:
        at = copy.deepcopy(model)
        at.load_state_dict(weights, strict=False)
        return in_round(self.defense, at, self.public, build_loss(self.loss))

    def into(self, model: nn.Module, weights: Params) -> Into:
        acting = self._acting(model, weights)
        if isinstance(acting, DpSgd) or not isinstance(acting, Veil) or acting.measured.coordinates is None:
            return lambda g: g
        return acting.measured.coordinates.into


@dataclass
class Protected(OfDefense):
    """A plain training loop under ``protect``: some rounds from the server's weights, one step of all slots in each.

    The server sends the same weights in every round, as a server that listens would.
    """

    rounds: int = 2
    lr: float = 0.1
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of protect's
    name: str = "protect"

    def run(self, model: nn.Module, canaries: Canaries, present: Tensor) -> Iterator[Released]:
        start, state = weights_of(model), copy.deepcopy(model.state_dict())
        spent: list[float] = []
        loss = build_loss(self.loss).of(canaries.labels)
        for trial, coins in enumerate(present):
            one, account = copy.deepcopy(model).train(), None
            optimizer = torch.optim.SGD((p for p in one.parameters() if p.requires_grad), lr=self.lr)
            batch = canaries.present(coins) if bool(coins.any()) else _nothing(canaries)
            more = {"slots": len(canaries), "public": self.public, **self.settings}
            for _ in range(self.rounds):
                one.load_state_dict(state)
                optimizer.zero_grad()
                with nothing_drawn(), protect(one, self.defense, account=account, **more) as guard:
                    loss(guard(batch.inputs), batch.labels).backward()
                    yield Released(trial, start, _gradient(one, start))
                    optimizer.step()
                account = guard.account
            spent.append(0.0 if account is None else account.mu)
        self.promised = max(spent)


@dataclass
class Federated(OfDefense):
    """Rounds of federated averaging in one of this package's engines; each trial is a client, and all take part."""

    rounds: int = 2
    lr: float = 0.1
    engine: str = "sequential"
    seed: int = 0
    local: Mapping[str, Any] = field(default_factory=lambda: {"batch_size": None})
    name: str = "engine"
    secret: bool = False  # simulated: the noise is the seed's
    trial_by_trial: bool = False

    def run(self, model: nn.Module, canaries: Canaries, present: Tensor) -> Iterator[Released]:
        clients, count = len(present), len(canaries)
        self.before = (0, count - 1)  # the shuffle of an epoch
        data = dataset_of(canaries, present, self.public)
        parts = np.split(np.arange(clients * count), clients)
        if self.public is not None:  # as the run draws them
            self.public = data.train.batch(public_records(data, parts, Seeds(self.seed)))
        training = Training(rounds=self.rounds, clients=clients, lr=self.lr, loss=self.loss, **self.local)
        rounds = simulate(
            model, data, parts, training, self.defense, self.seed, engine=self.engine, watch=clients
        )  # fmt: skip
        for done in rounds:
            assert done.sent is not None
            weights = weights_of(done.sent)
            for one in done.watched:
                yield Released(one.client, weights, flatten(one.update.gradient))
            self.promised = max(account.mu for account in done.accounts)


def dataset_of(canaries: Canaries, present: Tensor, public: Batch | None = None) -> Dataset:
    """Return clients' records as a data set, client after client, then public ones.

    Records of zeroed slots are not a number.
    """
    if not canaries.inputs.is_floating_point():
        raise GradveilError(
            "An engine counts records, so a slot is zeroed by inputs that are no numbers, and tokens have none. "
            "Verify this model in a training loop: --engine protect."
        )
    inputs = canaries.inputs.expand(len(present), *canaries.inputs.shape).clone()
    inputs[~present] = nan
    labels = canaries.labels.expand(len(present), *canaries.labels.shape)
    more = [] if public is None else [public]
    rows = torch.cat([inputs.flatten(0, 1).cpu(), *(batch.inputs.cpu() for batch in more)])
    answers = torch.cat([labels.flatten(0, 1).cpu(), *(batch.labels.cpu() for batch in more)])
    split = Split(rows.numpy(), answers, 1.0)
    classes = int(answers.max()) + 1 if answers.ndim == 1 and not answers.is_floating_point() else answers[0].numel()
    whose = np.minimum(np.arange(len(rows)) // len(canaries), len(present))
    return Dataset("canaries", split, split, tuple(map(str, range(classes))), groups=whose)


def _gradient(model: nn.Module, like: Params) -> Tensor:
    grads = [model.get_parameter(name).grad for name in like]
    return torch.cat([g.flatten() for g in grads if g is not None])


def _nothing(canaries: Canaries) -> Batch:
    """Return a record that counts as zero, for a client all of whose slots are zeroed."""
    if not canaries.inputs.is_floating_point():
        raise GradveilError("no slot was filled, and no input of tokens counts as zero.")
    return Batch(torch.full_like(canaries.inputs[:1], nan), canaries.labels[:1])


@dataclass
class Foreign(Pipeline):
    """A trainer that is handed over: ``train(model, inputs, labels, present)`` trains a copy of the model.

    It leaves out the records of slots that are not present, and divides by what does not depend on them. It returns
    what it releases, in order: the weights after each release (state dicts), or the released gradients (vectors), all
    at the weights it began with.
    """

    train: Trainer
    mu: float = inf
    clip: float = 1.0
    name: str = "trainer"
    secret: bool = False  # not known
    fresh: bool = False  # momentum repeats earlier noise
    base: bool = True  # weight decay, records of its own

    def run(self, model: nn.Module, canaries: Canaries, present: Tensor) -> Iterator[Released]:
        start = weights_of(model)
        for trial, coins in enumerate(present):
            try:
                found = list(self.train(copy.deepcopy(model), canaries.inputs, canaries.labels, coins))
            except Exception:
                if not bool(coins.any()):  # a trainer need not bear a client without records
                    continue
                raise
            if not found:
                raise GradveilError("The trainer returned nothing. Return the weights after each release, in a list.")
            weights = start
            for one in found:
                if isinstance(one, Tensor):
                    yield Released(trial, start, one.detach().flatten().float())
                    continue
                after = {name: _named(one, name).detach().to(w).clone() for name, w in start.items()}
                change = torch.cat([(weights[n].double() - after[n].double()).flatten() for n in start])
                yield Released(trial, weights, change)
                weights = after
        self.promised = self.mu


def _named(found: Any, name: str) -> Tensor:
    """Return a weight by its name; wrappers (Opacus, DDP, compiled) put a prefix before it."""
    for prefix in ("", "_module.", "module.", "_orig_mod."):
        if isinstance(found, Mapping) and isinstance(value := found.get(prefix + name), Tensor):
            return value
    raise GradveilError(
        f"What the trainer returned has no tensor {name!r}. Return state dicts of the model after each release, or "
        "released gradients as vectors."
    )


def of_spec(spec: str | Defense, engine: str, **settings: Any) -> OfDefense:
    """Return the pipeline for a defence: ``protect``, or one of the engines."""
    defense = build(spec)
    if engine == "protect":
        return Protected(defense, **settings)
    return replace(Federated(defense, **settings), engine=engine, name=engine)
