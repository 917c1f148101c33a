"""All clients of a round at once: stacked weights, padded batches with masks, on CUDA in a graph.

Ragged clients stay exact: a step's loss is a weighted sum over a padded batch, with weight 1/n on its n examples
and 0 on the padding; a client that has no step left has weight 0 everywhere, so it stays where it is.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import gcd

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.data.base import Split
from gradveil.defenses.compose import parts_of
from gradveil.defenses.representation import RepresentationPerturbation
from gradveil.errors import GradveilError
from gradveil.federated.client import Sent, shuffled, update_batch_size
from gradveil.federated.engines import ENGINES, Engine, Job, Pool, World, draws_of
from gradveil.federated.settings import Local
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.modules import representation
from gradveil.privacy.noise import Source
from gradveil.protection.capture import output_shapes, records_together
from gradveil.protection.defense import Accounted, Defense, accounted
from gradveil.protection.passes import substitute
from gradveil.protection.records import Captured
from gradveil.ranges import Count
from gradveil.representation import scores as api
from gradveil.representation.matrices import StackedRows
from gradveil.representation.recorder import walk, walkable
from gradveil.representation.rows import RowNorms, scores
from gradveil.representation.selection import largest_live_each
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Update

_RESIDENT = 8 * 2**30  # bytes of training data that may lie on the device
_AS_FLOATS = 2 * 2**30  # bytes up to which they lie there as floats, which saves work at each step


@dataclass
class Steps:
    """The local steps of several clients, padded to one shape."""

    indices: Tensor  # (S, K, B) into the training split; padding: 0
    weights: Tensor  # (S, K, B), 1/n on a step's n examples, else 0
    counts: list[int]  # (K,) steps of each client

    def to(self, device: torch.device) -> "Steps":
        """Return the steps on a device, without waiting for it."""
        pin = device.type == "cuda"
        moved = [t.pin_memory().to(device, non_blocking=True) if pin else t for t in (self.indices, self.weights)]
        return Steps(moved[0], moved[1], self.counts)


def pad_steps(jobs: Sequence[Job], rngs: Sequence[Source], local: Local, dtype: torch.dtype, least: int = 1) -> Steps:
    """Return the steps that each client would take alone, side by side, at least ``least`` examples wide."""
    width = max(least, *(min(local.batch_size or len(job.indices), len(job.indices)) for job in jobs))
    plans = [shuffled(len(job.indices), local, rng) for job, rng in zip(jobs, rngs, strict=True)]
    counts = [len(sizes) for _, sizes in plans]
    indices = np.zeros((len(jobs), max(counts), width), np.int64)
    weights = np.zeros(indices.shape)
    for k, (job, (order, sizes)) in enumerate(zip(jobs, plans, strict=True)):
        lengths = np.array(sizes)[:, None]
        filled = np.arange(width) < lengths  # (S_k, B)
        indices[k, : len(sizes)][filled] = job.indices[order.numpy()]
        weights[k, : len(sizes)] = filled / lengths
    side_by_side = torch.from_numpy(indices).transpose(0, 1).contiguous()
    return Steps(side_by_side, torch.from_numpy(weights).transpose(0, 1).contiguous().to(dtype), counts)


class Resident:
    """The training split on the device."""

    def __init__(self, split: Split, device: torch.device) -> None:
        if split.images.nbytes > _RESIDENT:
            raise GradveilError(
                f"The training data has {split.images.nbytes / 2**30:.0f} GiB; the engine 'vectorised' keeps at most "
                f"{_RESIDENT / 2**30:.0f} GiB on the device. Use the engine sequential."
            )
        self.images = torch.from_numpy(np.array(split.images)).to(device)
        self.labels = split.labels.to(device)
        self.scale = split.scale
        if 4 * self.images.numel() <= _AS_FLOATS:
            self.images, self.scale = self.images.float() / self.scale, 1.0

    def __call__(self, indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return inputs (K, B, *shape) in [0, 1] and labels (K, B, ...)."""
        flat = indices.reshape(-1)
        inputs = self.images.index_select(0, flat)
        if self.scale != 1.0:
            inputs = inputs.float() / self.scale
        inputs = inputs.to(dtype)
        return inputs.unflatten(0, indices.shape), self.labels.index_select(0, flat).unflatten(0, indices.shape)


_STATEFUL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


@ENGINES.register("vectorised")
@dataclass(frozen=True)
class Vectorised(Engine):
    """All clients of a round as one batch of models: for CUDA; on a CPU it loses to processes.

    Takes defences that act on the gradient or the update, the paper's on a layer after plain convolutions, and models
    without batch norm and dropout. In float64 it equals one client after the other to rounding.
    """

    clients: Count = 128  # trained together at most; bounds the memory
    graph: bool | None = None  # record each step as a CUDA graph; None: on CUDA where the defence allows it

    def start(self, world: World) -> Pool:
        reason = why_not(world)
        if reason:
            raise GradveilError(f"The engine 'vectorised' cannot be used here: {reason}. Use the engine sequential.")
        return _StackedPool(world, self.clients, self.graph)


def why_not(world: World) -> str | None:
    """Return why the clients of this world cannot be stacked; ``None``: they can."""
    if any(isinstance(module, _STATEFUL) for module in world.model.modules()):
        return "the model has batch norm or dropout, whose state differs from client to client"
    if world.local.momentum or world.local.adaptive or world.local.clip:
        return "momentum, Adam and clipping run one client after the other"
    if "batch" in world.defense.acts_on:
        return "the defence acts on each client's batch"
    if not build_loss(world.local.loss).separable:
        return f"the loss {world.local.loss} is not known to be a mean of one loss per example"
    if "records" in world.defense.acts_on:
        return why_no_records(world.model, world.defense, _examples(world), build_loss(world.local.loss))
    return why_no_masks(world.model, world.defense, _examples(world).inputs)


def _examples(world: World) -> Batch:
    """Return two examples on the model's device."""
    few, first = world.train.batch(np.arange(min(2, len(world.train)))), next(world.model.parameters())
    return Batch(few.inputs.to(first), few.labels.to(first.device))


def why_no_masks(model: nn.Module, defense: Defense, x: Tensor) -> str | None:
    """Return why the representations of this defence's clients cannot be perturbed together; ``None``: they can.

    ``x`` is one batch, of which only the shape matters.
    """
    layers = set()
    for part in parts_of(defense):
        if "representation" not in part.acts_on:
            continue
        if not isinstance(part, RepresentationPerturbation) or not _is_plain(part):
            return "the defence acts on each client's representation by a rule of its own"
        layers |= set(part.layers(model))
    if len(layers) > 1:
        return f"the defences act on several layers ({', '.join(sorted(layers))})"
    if layers and StackedRows.of(model, layers.pop(), x) is None:
        return "the defended layer does not follow a plain chain of convolutions and activations"
    return None


def _perturbing(defense: Defense) -> list[RepresentationPerturbation]:
    return [part for part in parts_of(defense) if isinstance(part, RepresentationPerturbation)]


def _is_plain(defense: RepresentationPerturbation) -> bool:
    """Whether the defence is the paper's rule; share, count and layer may differ from client to client."""
    return defense.p == 2 and defense.method in ("auto", "exact")


class Masks:
    """Perturbs the input of one layer for K clients; ``counts`` lies on the device, as a CUDA graph needs it."""

    def __init__(self, model: nn.Module, defense: Defense, x: Tensor, clients: int) -> None:
        self.model = model
        (self.layer,) = {layer for part in parts_of(defense) for layer in part.layers(model)}
        rows = StackedRows.of(model, self.layer, x)
        assert rows is not None
        self.rows = rows
        self.like = representation(model, self.layer, x)  # of which only the size matters
        self.counts = torch.zeros(clients, 1, 1, dtype=torch.int64, device=x.device)
        self.exact = torch.zeros(clients, 1, 1, dtype=torch.bool, device=x.device)  # whoever asks for exact scores
        self.asked = {part.method for part in _perturbing(defense)}
        self.effort = api.effort(walk(walkable(model, self.layer, x) or [], x[:1]))  # of one example's exact scores

    def use(self, defenses: list[Defense]) -> None:
        """Take each client's number of entries, and whether its scores are exact, from its own defence."""
        parts = [_perturbing(defense) for defense in defenses]
        counts = [sum(part.budget(self.like) for part in some) for some in parts]
        self.counts.copy_(torch.tensor(counts).view(-1, 1, 1), non_blocking=True)
        exact = [any(part.method == "exact" for part in some) for some in parts]
        self.exact.copy_(torch.tensor(exact).view(-1, 1, 1), non_blocking=True)

    def _rows(self, weights: Params, x: Tensor, present: Tensor) -> RowNorms:
        """Return r and the norms of its rows, as each client alone would have them: exact, or as ``auto`` chooses."""
        if self.asked == {"exact"} or self.effort * x.shape[1] <= api.BUDGET:
            return self.rows(weights, x)
        quick = self.rows.moment(weights, x)
        if self.asked == {"auto"} and self.effort > api.BUDGET:
            return quick
        exact = self.exact | (present.sum(1)[:, None, None] * self.effort <= api.BUDGET)
        slow = self.rows(weights, x)
        return RowNorms(quick.r, {2.0: torch.where(exact, slow.norms[2.0], quick.norms[2.0])})

    def perturbed(self, weights: Params, x: Tensor, present: Tensor) -> Tensor:
        """Return r' (K, B, L) for stacked weights and inputs (K, B, ...), of which some are present (K, B)."""
        rows = self._rows(weights, x, present)
        chosen = largest_live_each(rows.r, scores(rows.r, rows.norms, 2.0), self.counts)
        return rows.r.masked_fill(chosen, 0.0)

    def forward(self, weights: Params, x: Tensor, perturbed: Tensor) -> Tensor:
        """Return one client's logits; the defended layer's weight gradient comes from ``perturbed`` (B, L)."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
            return substitute(module, args[0], perturbed.view_as(args[0]))

        handle = self.model.get_submodule(self.layer).register_forward_hook(hook)
        try:
            logits: Tensor = functional_call(self.model, weights, (x,))
        finally:
            handle.remove()
        return logits


def why_no_records(model: nn.Module, defense: Defense, few: Batch, loss: Loss) -> str | None:
    """Return why the records of this defence's clients cannot be taken together; ``None``: they can."""
    parts = parts_of(defense)
    acting = [part for part in parts if "records" in part.acts_on]
    if any(type(accounted(part)).on_stacked is Accounted.on_stacked for part in acting):
        return "the defence acts on the records of one client at a time"
    if any("representation" in part.acts_on for part in parts):
        return "some defences act on records and others on representations"
    return None if output_shapes(model, few, loss) else "the model has layers whose gradients are not known by record"


class StackedRecords:
    """Steps of K clients whose defences act on their records."""

    def __init__(self, model: nn.Module, few: Batch, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.shapes = output_shapes(model, few, loss) or {}

    def gradients(
        self,
        weights: Params,
        batch: tuple[Tensor, Tensor],
        parts: Tensor,
        slots: Tensor,
        rngs: Sequence[Source],
        defenses: Sequence[Defense],
        same: int = 1,
    ) -> Params:
        """Return each client's defended gradient (K, *shape); ``parts`` (K, B) is above 0 where there is a record.

        ``same``: how many clients each, one after the other, have the same weights.
        """
        records = self._records(weights, *batch, same)
        found: list[Params] = []
        ends = accumulate(len(list(run)) for _, run in groupby(defenses, id))  # of clients with the same defence
        for mine in (slice(*both) for both in pairwise([0, *ends])):
            some, defense = records.clients(mine), defenses[mine.start]
            if "records" in defense.acts_on:
                found.append(accounted(defense).on_stacked(some, parts[mine] > 0, slots[mine], rngs[mine]))
            else:
                found.append({n: g.to(weights[n].dtype) for n, g in some.weighted_sum(parts[mine]).items()})
        active = (parts.sum(1) > 0).to(parts)  # a client that has no step left stays where it is
        joined = found[0] if len(found) == 1 else {n: torch.cat([one[n] for one in found]) for n in weights}
        return {name: g * active.view(-1, *[1] * (g.ndim - 1)) for name, g in joined.items()}

    def _records(self, weights: Params, inputs: Tensor, labels: Tensor, same: int) -> Captured:
        """Return the records of all clients; those that share weights go through the model as one batch."""
        if same > 1:
            weights = {name: w[::same] for name, w in weights.items()}
            inputs, labels = (v.unflatten(0, (-1, same)).flatten(1, 2) for v in (inputs, labels))
        records = records_together(self.model, weights, inputs, labels, self.loss, self.shapes)
        return records.dealt(same) if same > 1 else records


@dataclass
class _Chunk:
    """Clients that are trained together."""

    jobs: Sequence[Job]
    rngs: list[Source]  # after the shuffling
    steps: Steps
    drawing: list[Source]  # of noise on records, where the model is
    slots: Tensor  # (K,) of each client's batches

    @property
    def alike(self) -> int:
        """How many clients each, one after the other, begin with the same weights."""
        return gcd(*(len(list(run)) for _, run in groupby(self.jobs, key=lambda job: id(job.start))))


class _StackedPool(Pool):
    def __init__(self, world: World, limit: int, graph: bool | None) -> None:
        self.world, self.limit = world, limit
        self.device = next(world.model.parameters()).device
        free = not world.defense.acts_on & {"gradient", "records"}
        self.graph = self.device.type == "cuda" and free if graph is None else graph
        if self.graph and not (self.device.type == "cuda" and free):
            raise GradveilError("A CUDA graph needs a model on CUDA and a defence that acts on the update only.")
        self.data = Resident(world.train, self.device)
        self.trainers: dict[int, _Trainer] = {}  # by number of clients
        self.width = 1  # of the widest batch so far
        self.expected: tuple[Sequence[Job], list[_Chunk]] = ([], [])  # prepared ahead

    def expect(self, jobs: Sequence[Job]) -> None:
        self.expected = (jobs, self._prepare(jobs))

    def train(self, model: nn.Module, jobs: Sequence[Job], lr: float) -> list[Sent]:
        same = [job.seed for job in self.expected[0]] == [job.seed for job in jobs]
        chunks = self.expected[1] if same else self._prepare(jobs)
        for chunk, start in zip(chunks, range(0, len(jobs), self.limit), strict=True):
            chunk.jobs = jobs[start : start + self.limit]  # with the defence of the round
        self.expected = ([], [])  # its generators are used up
        return [sent for chunk in chunks for sent in self._together(model, chunk, lr)]

    def _prepare(self, jobs: Sequence[Job]) -> "list[_Chunk]":
        dtype = next(self.world.model.parameters()).dtype
        chunks = []
        for start in range(0, len(jobs), self.limit):
            some = jobs[start : start + self.limit]
            rngs = [draws_of(job) for job in some]
            steps = pad_steps(some, rngs, self.world.local, dtype, self.width)
            self.width = steps.indices.shape[2]
            slots = torch.tensor([min(self.world.local.batch_size or len(j.indices), len(j.indices)) for j in some])
            chunks.append(_Chunk(some, rngs, steps.to(self.device), self._drawing(some, rngs), slots.to(self.device)))
        return chunks

    def _drawing(self, jobs: Sequence[Job], rngs: list[Source]) -> list[Source]:
        """Return the generators of noise on records: those of the clients, or on CUDA others from the same seeds."""
        if self.device.type == "cpu" or "records" not in self.world.defense.acts_on:
            return rngs
        return [draws_of(job, self.device) for job in jobs]

    def _together(self, model: nn.Module, chunk: "_Chunk", lr: float) -> list[Sent]:
        local = self.world.local
        starts = [job.start or model for job in chunk.jobs]
        defenses = [job.defense or self.world.defense for job in chunk.jobs]
        total = self._trainer(chunk.steps).run(_stacked(starts), chunk, lr, defenses)
        sent = []
        rows = zip(*(value.unbind() for value in total.values()), strict=True)
        for k, (job, row) in enumerate(zip(chunk.jobs, rows, strict=True)):
            n = len(job.indices)
            gradient, size = dict(zip(total, row, strict=True)), update_batch_size(local, n)
            update = Update(gradient, n, chunk.steps.counts[k], lr, size, local.rule)
            sent.append(Sent(defenses[k].on_update(update, chunk.rngs[k])))
        return sent

    def _trainer(self, steps: Steps) -> "_Trainer":
        """Return a trainer that these steps fit in; a graph is recorded anew only where they do not."""
        count, clients, width = steps.indices.shape
        known = self.trainers.get(clients)
        if known is None or known.capacity < count or known.width != width:
            self.trainers[clients] = _Trainer(self.world, self.data, steps, self.graph)
        return self.trainers[clients]


def _stacked(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return each weight of the models one above the other: (K, *shape), as a view where all are one model."""
    if all(model is models[0] for model in models):
        return [value.expand(len(models), *value.shape) for value in parameters(models[0]).values()]
    each = [parameters(model).values() for model in models]
    return [torch.stack(values) for values in zip(*each, strict=True)]


class _Trainer:
    """Runs the steps of one padded shape; its tensors stay where they are, as a CUDA graph needs it."""

    def __init__(self, world: World, data: Resident, steps: Steps, graph: bool) -> None:
        self.world, self.data, self.loss = world, data, build_loss(world.local.loss)
        self.device = data.labels.device
        self.capacity, clients, self.width = steps.indices.shape
        own = parameters(world.model)
        self.names = list(own)
        self.weights = [p.new_empty(clients, *p.shape) for p in own.values()]
        self.total = [torch.empty_like(w) for w in self.weights]
        self.start = [torch.empty_like(w) for w in self.weights] if world.local.proximal else []
        self.indices = steps.indices.clone()
        self.parts = steps.weights.clone()
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.lr = torch.zeros((), dtype=steps.weights.dtype, device=self.device)
        masked = "representation" in world.defense.acts_on
        examples = _examples(world)
        self.masks = Masks(world.model, world.defense, examples.inputs, clients) if masked else None
        recorded = "records" in world.defense.acts_on
        self.records = StackedRecords(world.model, examples, self.loss) if recorded else None
        self.gradients = vmap(grad(self._loss))
        self.graph = self._record() if graph else None

    def run(self, start: Sequence[Tensor], chunk: _Chunk, lr: float, defenses: Sequence[Defense]) -> Params:
        """Return the sum of each client's step directions, stacked: (K, *shape) by name."""
        self._reset(start, lr)
        if self.masks is not None:
            self.masks.use(list(defenses))
        count = len(chunk.steps.indices)
        self.indices[:count].copy_(chunk.steps.indices)
        self.parts[:count].copy_(chunk.steps.weights)
        for step in range(count):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step(chunk, step, defenses)
        return {name: value.clone() for name, value in zip(self.names, self.total, strict=True)}

    def _reset(self, start: Sequence[Tensor], lr: float) -> None:
        for stacked, value in zip(self.weights, start, strict=True):
            stacked.copy_(value)
        for stacked, value in zip(self.start, start, strict=False):
            stacked.copy_(value)
        torch._foreach_zero_(self.total)
        self.now.zero_()
        self.lr.fill_(lr)

    def _loss(self, weights: Params, inputs: Tensor, labels: Tensor, parts: Tensor, *changed: Tensor) -> Tensor:
        if self.masks is None:
            logits = functional_call(self.world.model, weights, (inputs,))
        else:
            logits = self.masks.forward(weights, inputs, *changed)
        return (self.loss.each(logits, labels) * parts).sum()

    def _step(self, chunk: _Chunk | None = None, step: int = 0, defenses: Sequence[Defense] = ()) -> None:
        """Take one step of every client, in place; without a chunk, one that no defence changes."""
        parts = self.parts.index_select(0, self.now)[0]  # (K, B)
        inputs, labels = self.data(self.indices.index_select(0, self.now)[0], parts.dtype)
        weights = dict(zip(self.names, self.weights, strict=True))
        changed = () if self.masks is None else (self.masks.perturbed(weights, inputs, parts > 0),)
        with torch.enable_grad():
            if self.records is not None and chunk is not None:
                given = (parts, chunk.slots, chunk.drawing, defenses)
                gradients = self.records.gradients(weights, (inputs, labels), *given, 1 if step else chunk.alike)
            else:
                gradients = self.gradients(weights, inputs, labels, parts, *changed)
        stacked = [gradients[name] for name in self.names]
        direction = stacked if chunk is None else self._defended(stacked, chunk, step, defenses)
        direction = self._regularised(direction, parts)
        torch._foreach_sub_(self.weights, torch._foreach_mul(direction, self.lr))
        torch._foreach_add_(self.total, direction)
        self.now.add_(1)

    def _regularised(self, direction: list[Tensor], parts: Tensor) -> list[Tensor]:
        """Add weight decay and FedProx's pull, for clients that have a step."""
        local = self.world.local
        if not (local.weight_decay or local.proximal):
            return direction
        active = (parts.sum(1) > 0).to(parts.dtype)  # (K,)
        pull = [local.weight_decay * w for w in self.weights]
        if local.proximal:
            pull = [p + local.proximal * (w - s) for p, w, s in zip(pull, self.weights, self.start, strict=True)]
        return [d + p * active.reshape(-1, *[1] * (p.ndim - 1)) for d, p in zip(direction, pull, strict=True)]

    def _defended(self, stacked: list[Tensor], chunk: _Chunk, step: int, defenses: Sequence[Defense]) -> list[Tensor]:
        """Let each client's defence change its gradient, in the order in which it would alone."""
        if not any("gradient" in defense.acts_on for defense in defenses):
            return stacked
        rows = []
        for k, (defense, rng) in enumerate(zip(defenses, chunk.rngs, strict=True)):
            gradient = {name: value[k] for name, value in zip(self.names, stacked, strict=True)}
            changed = defense.on_gradient(gradient, rng) if step < chunk.steps.counts[k] else gradient
            rows.append([changed[name] for name in self.names])
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record one step; a few steps first on a side stream let the libraries set themselves up."""
        self._reset([torch.zeros_like(w) for w in self.weights], 0.0)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with _recording():
            with torch.cuda.stream(side):
                for _ in range(min(3, self.capacity)):
                    self._step()
            torch.cuda.current_stream(self.device).wait_stream(side)
            self.now.zero_()
            with torch.cuda.graph(graph):
                self._step()
        return graph


@contextmanager
def _recording() -> Iterator[None]:
    """Within, cuDNN looks for its fastest kernels, and no garbage is collected.

    Freeing an old graph while another is recorded would spoil it.
    """
    benchmark, collecting = torch.backends.cudnn.benchmark, gc.isenabled()
    torch.backends.cudnn.benchmark = True
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        if collecting:
            gc.enable()
