"""The nouns that pass between the parts: batch, update, observation, reconstruction; and a server's prior."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import AttackError, UpdateError, from_defense
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.modalities import IMAGE, Modality
from gradveil.step_rule import PLAIN, Momenta, StepRule
from gradveil.tree import Params, parameters


@dataclass(frozen=True)
class GaussianPrior:
    """A Gaussian over flattened inputs: ``x ~ N(mean, factor factorᵀ + ridge I)``.

    It stands for public data of the same kind, never for the client's own.
    """

    mean: Tensor  # (d,)
    factor: Tensor  # (d, k), columns: principal directions scaled by their standard deviations
    ridge: float  # variance in every direction beside

    @classmethod
    def fit(cls, inputs: Tensor, ridge: float = 1e-3, rank: int | None = None) -> "GaussianPrior":
        """Fit to public inputs (N, *shape), keeping at most ``rank`` principal directions."""
        flat = inputs.reshape(len(inputs), -1)
        mean = flat.mean(0)
        scaled = (flat - mean) / max(len(flat) - 1, 1) ** 0.5
        full = min(flat.shape[0], flat.shape[1])
        k = full if rank is None else min(rank, full)
        if k < full and full > MANY_DIRECTIONS:
            return cls(mean, _principal(scaled.double(), k).to(flat), ridge)
        _, s, vt = torch.linalg.svd(scaled, full_matrices=False)
        return cls(mean, vt[:k].T * s[:k], ridge)

    @classmethod
    def white(cls, mean: Tensor, std: float) -> "GaussianPrior":
        """Return a prior that knows the mean only: independent pixels of one standard deviation."""
        return cls(mean.reshape(-1), mean.new_zeros(mean.numel(), 0), std**2)

    def covariance(self) -> Tensor:
        """Return the dense covariance (d, d); for small inputs."""
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return self.factor @ self.factor.T + self.ridge * eye

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``Σ⁻¹ x`` for rows x (..., d), by the Woodbury identity."""
        k = self.factor.shape[1]
        if k == 0:
            return x / self.ridge
        inner = self.ridge * torch.eye(k, dtype=x.dtype, device=x.device) + self.factor.T @ self.factor
        inside = self.factor.T @ (x.mT if x.ndim > 1 else x)  # (k, ...)
        solved: Tensor = torch.linalg.solve(inner, inside)
        return (x - (self.factor @ solved).mT if x.ndim > 1 else x - self.factor @ solved) / self.ridge


MANY_DIRECTIONS = 1000  # beyond which a whole singular value decomposition takes ten times as long as what is used


def _principal(rows: Tensor, count: int) -> Tensor:
    """Return the ``count`` largest principal directions of rows (N, d), scaled by their lengths, as columns."""
    from scipy.linalg import eigh  # of torch's, all eigenvectors come or none

    wide = len(rows) < rows.shape[1]
    gram = (rows @ rows.T if wide else rows.T @ rows).cpu().numpy()
    values, vectors = map(torch.from_numpy, eigh(gram, subset_by_index=[len(gram) - count, len(gram) - 1]))
    largest: Tensor = vectors.flip(1).to(rows)
    return rows.T @ largest if wide else largest * values.flip(0).clamp_min(0).sqrt().to(rows)


@dataclass(frozen=True)
class Batch:
    """Examples of one client: private."""

    inputs: Tensor  # (N, *shape), in the data range
    labels: Tensor  # classes (N,) int64, or what else the loss is of: zeros and ones (N, K), numbers (N,) or (N, D)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labelled(self) -> bool:
        """Whether the labels are known: class numbers below zero stand for none."""
        return self.labels.is_floating_point() or not bool((self.labels < 0).any())

    def __getitem__(self, part: slice) -> "Batch":
        return Batch(self.inputs[part], self.labels[part])

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Update:
    """What one client sends, as a gradient: (W_before - W_after) / lr, the sum of its local steps' directions."""

    gradient: Params
    num_examples: int = 1
    num_steps: int = 1
    lr: float = 1.0  # of the local steps; public, the server sets it
    batch_size: int | None = None  # of the local steps; None: all examples at once
    rule: StepRule = PLAIN  # what the client's optimiser makes of a gradient; public
    buffers: Params = field(default_factory=dict)  # sent beside it: batch norm's running statistics after the steps

    @classmethod
    def from_weights(
        cls,
        before: Params,
        after: Params,
        lr: float,
        num_examples: int,
        num_steps: int,
        batch_size: int | None = None,
        rule: StepRule = PLAIN,
    ) -> "Update":
        """Return the update of a client that started at ``before`` and ended at ``after``."""
        gradient = {name: (value - after[name]) / lr for name, value in before.items()}
        return cls(gradient, num_examples, num_steps, lr, batch_size, rule)

    @property
    def schedule(self) -> str:
        examples = "1 example" if self.num_examples == 1 else f"{self.num_examples} examples"
        steps = "one local step" if self.num_steps == 1 else f"{self.num_steps} local steps"
        whole = ", all of them at once" if self.num_examples > 1 else ""
        size = f", batches of {self.batch_size}" if self.batch_size else whole
        return f"{steps} on {examples}{size} ({self.rule}, learning rate {self.lr:g})"

    def to(self, device: torch.device) -> "Update":
        gradient, buffers = ({name: v.to(device) for name, v in tree.items()} for tree in (self.gradient, self.buffers))
        return replace(self, gradient=gradient, buffers=buffers)


@dataclass(frozen=True)
class Observation:
    """All that the server sees, so all that an attack may use."""

    model: nn.Module  # with the weights that the server sent
    update: Update
    input_shape: tuple[int, ...]  # of one example
    num_classes: int  # or how many numbers a target has, where the loss is not one of classes
    labels: Tensor | None = None  # (N, ...), where the server knows them
    bounds: tuple[float, float] = (0.0, 1.0)  # the data range, public
    prior: GaussianPrior | None = None  # from public data
    weights: Params = field(default_factory=dict)  # how much an entry counts in the matching; absent: 1
    noise: dict[str, float] = field(default_factory=dict)  # known noise std per tensor; absent: 0
    simulate: Callable[[Params], Params] | None = None  # the defence, as the server would run it on its own gradients
    loss: Loss = CROSS_ENTROPY  # that the clients minimise; public, the server sets it
    simulate_on: Literal["gradient", "update"] = "gradient"  # of each local step, or of what is sent
    client: Callable[[Batch, Generator], Params] | None = None  # what a client with other examples would send
    public: Batch | None = None  # examples of the same kind that are no client's
    candidates: Batch | None = None  # examples, one of which the client has
    others: Batch | None = None  # all examples of the client but one
    rounds: tuple["Observation", ...] = ()  # its updates of other rounds, from the same examples
    modality: Modality = IMAGE  # what an example is, public

    def sent(self, gradient: Params, blur: float = 0.0) -> Params:
        """Return what a client whose one step has this gradient would send: the defence, and its optimiser's rule."""
        rule, start = self.update.rule, parameters(self.model)
        gradient = self.simulated(gradient, "gradient")
        if not rule.is_plain:
            gradient, _ = rule.direction(gradient, start, start, Momenta(), blur)
        return self.simulated(gradient, "update")

    def simulated(self, gradient: Params, on: Literal["gradient", "update"]) -> Params:
        """Return what the simulated defence makes of a step's gradient, or of an update, if it acts there.

        Random numbers of a simulated defence are the same at every call, so that this is a function.
        """
        if self.simulate is None or on != self.simulate_on:
            return gradient
        devices = {g.device for g in gradient.values() if g.is_cuda}
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            try:
                return self.simulate(gradient)
            except Exception as error:
                if "vmap" not in str(error).lower():
                    raise from_defense(error, "The defence that the server simulates") from error
                raise AttackError(
                    f"The defence that the server simulates cannot be run on many trials at once "
                    f"({str(error).splitlines()[0][:120]}). Let it look at no values and draw nothing that hangs on "
                    f"them, or use dlg, gs or fedavg, which run it on one trial after the other."
                ) from error

    @property
    def randomness(self) -> Literal["error", "same"]:
        """What vmap is to do with random numbers: those of a simulated defence are the same for all trials."""
        return "error" if self.simulate is None else "same"

    def as_one_step(self) -> "Observation":
        """Return the update as one step with the mean of the step gradients, less what weight decay is known to add.

        Exact for one step. Of several steps the mean gradient is taken to be that at the first weights.
        """
        update = self.update
        if update.num_steps == 1 and update.rule == update.rule.bare:
            return self
        rule, count = update.rule, update.rule.shares(update.num_steps)[0]
        gradient = rule.without_decay(update.gradient, parameters(self.model), update.num_steps)
        one = replace(update, gradient=gradient, num_steps=1, batch_size=None, rule=rule.bare)
        return replace(self, update=one, noise={n: std / count for n, std in self.noise.items()})

    @property
    def needs_all_gradients(self) -> bool:
        """Whether a trial needs the gradients of tensors that are not matched: several steps move every weight, and a
        simulated defence and a client's optimiser look at all."""
        return self.update.num_steps > 1 or self.simulate is not None or not self.update.rule.is_plain

    @property
    def num_examples(self) -> int:
        return self.update.num_examples

    @property
    def visible(self) -> tuple[str, ...]:
        """Names of the tensors the attack matches: in the update, with a weight that is not all zero."""
        return tuple(n for n in self.update.gradient if n not in self.weights or bool(self.weights[n].any()))

    def only(self, *patterns: str) -> "Observation":
        """Keep the tensors whose name fits a pattern (``conv*``); the rest is dropped from the matching."""
        return self._keep(lambda name: any(fnmatch(name, p) for p in patterns), patterns)

    def without(self, *patterns: str) -> "Observation":
        """Drop the tensors whose name fits a pattern (``fc.weight``) from the matching."""
        return self._keep(lambda name: not any(fnmatch(name, p) for p in patterns), patterns)

    def masked(self, *patterns: str) -> "Observation":
        """Match only the non-zero entries of the tensors whose name fits: read the mask off the update."""
        gradient = self.as_one_step().update.gradient  # weight decay fills what a mask left empty
        seen = {n: (g != 0).to(g.dtype) for n, g in gradient.items() if any(fnmatch(n, p) for p in patterns)}
        merged = {n: m * self.weights[n] if n in self.weights else m for n, m in seen.items()}
        return replace(self, weights=self.weights | merged)

    def _keep(self, keep: Callable[[str], bool], patterns: tuple[str, ...]) -> "Observation":
        gradient = {name: g for name, g in self.update.gradient.items() if keep(name)}
        if not gradient:
            known = ", ".join(self.update.gradient)
            raise UpdateError(f"No tensor is left after selecting by {', '.join(patterns)}. The update has: {known}.")
        return replace(self, update=replace(self.update, gradient=gradient))


@dataclass(frozen=True)
class Reconstruction:
    """What an attack brings back, clamped to the data range, chosen by the attack's own objective."""

    inputs: Tensor  # (N, *shape)
    labels: Tensor | None  # (N, ...), as a batch has them
    objective: float  # final value of what the attack minimised
    converged: bool  # finite, and the attack's own stopping rule is content
    details: dict[str, float] = field(default_factory=dict)  # iterations, evaluations, restarts, ...
    raw: Tensor | None = None  # (N, *shape) as the search left it, unclamped, where it may leave the data range
    confidence: Tensor | None = None  # (N, cells) how sure the attack itself is of each cell, from 0 to 1


def check_update(update: Update, model: nn.Module) -> None:
    """Raise ``UpdateError`` unless the update's names, shapes and values fit the model."""
    known = parameters(model)
    for name, g in update.gradient.items():
        if name not in known:
            raise UpdateError(
                f"The update has a tensor {name!r} that the model has not. The model has: {', '.join(known)}."
            )
        if g.shape != known[name].shape:
            raise UpdateError(
                f"{name!r} is {tuple(g.shape)} in the update and {tuple(known[name].shape)} in the model."
            )
        if not g.is_floating_point():
            raise UpdateError(f"{name!r} has dtype {g.dtype}; an update holds floating point numbers.")
        if not bool(torch.isfinite(g).all()):
            raise UpdateError(
                f"{name!r} holds NaN or infinite values. Leave this update out, or find the client's fault."
            )
