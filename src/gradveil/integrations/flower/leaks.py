"""Leaks: attack an update as a server would and say what came of it; withhold one's own where too much did."""

import copy
import time
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import Context, Message
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import plain
from gradveil.defenses.base import Defense
from gradveil.defenses.base import build as build_defense
from gradveil.defenses.guard.passes import Examples
from gradveil.errors import DefenseError, GradveilError
from gradveil.experiments.run_folder import Row
from gradveil.experiments.trial import Public, Trial, attempt, floors, measured
from gradveil.gradients.functional import quiet
from gradveil.integrations.flower.mods import check_reply, update_of
from gradveil.integrations.flower.records import (
    ModelWatch,
    Next,
    add_metrics,
    arrays_of,
    is_training,
    named_as_in,
    params_of,
    withhold,
)
from gradveil.integrations.local_training import fresh_rng
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update


@dataclass(frozen=True)
class Probe:
    """How updates are attacked. Nothing here sees the client's data; the truth only serves to measure."""

    attack: str | Attack
    input_shape: tuple[int, ...]
    num_classes: int
    defense: str | Defense = "none"  # what the server knows to be in force: each countermeasure is tried as well
    bounds: tuple[float, float] = (0.0, 1.0)
    public: Tensor | None = None  # (M, *shape): data of the same kind that anybody may have

    @cached_property
    def known(self) -> Public | None:
        """What the public data tell; their labels are not known."""
        if self.public is None:
            return None
        return Public(Batch(self.public, torch.full((len(self.public),), -1)), GaussianPrior.fit(self.public))

    def run(
        self, model: nn.Module, weights: Params, update: Update, rng: Generator, truth: Batch | None = None
    ) -> list[Row]:
        """Return a row for each way of attacking: what the objective says and, where the truth is known, the leak."""
        at = copy.deepcopy(model)
        try:
            at.load_state_dict(weights)
        except RuntimeError as error:
            raise GradveilError(f"The weights sent are not those of {type(model).__name__}: {error}") from error
        at.train()  # as the client's was; attacks see to batch norm and dropout
        prior = None if self.known is None else self.known.prior
        seen = Observation(at, update, self.input_shape, self.num_classes, bounds=self.bounds, prior=prior)
        servers = [plain(), *(s for s in build_defense(self.defense).adaptive(at) if s.name != "plain")]
        return [self._row(seen, Trial(seen, s, build_attack(s.attack or self.attack), rng, truth)) for s in servers]

    def _row(self, seen: Observation, trial: Trial) -> Row:
        started = time.perf_counter()
        row: Row = {"attack": describe(trial.attack), "server": trial.server.name, "examples": seen.num_examples}
        (result,) = attempt([trial])
        if isinstance(result, GradveilError):
            return row | {"error": str(result)}
        row |= {"objective": result.objective, "converged": result.converged, "match": match(seen, result)}
        row["seconds"] = time.perf_counter() - started
        if trial.truth is not None:
            values, _ = measured(result, trial.truth, bounds=self.bounds)
            known = {name: values[name].mean() for name in ("mse", "psnr", "ssim", "label")}
            row |= {name: float(mean) for name, mean in known.items() if name != "label" or not mean.isnan()}
            row["worst-psnr"] = float(values["psnr"].max())
        return row

    def floor(self, truth: Batch) -> float:
        """Return the PSNR that a blind guess gets on the example it fits best."""
        return max(float(row["psnr"]) for row in floors(truth, self.known, self.bounds)[0])


def match(seen: Observation, found: Reconstruction) -> float | None:
    """Return the cosine between the update and the gradient that the reconstruction would give; None without labels.

    Near 1 the reconstruction explains the update. It is no proof of a leak, since other inputs may explain it too,
    but it needs no truth. Of several local steps only the first one's weights are used.
    """
    if found.labels is None:
        return None
    named = {n: p for n, p in seen.model.named_parameters() if n in seen.update.gradient}
    with torch.enable_grad(), quiet(seen.model):
        loss = F.cross_entropy(seen.model(found.inputs), found.labels)
        grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    ours = torch.cat([g.flatten() for g in grads])
    theirs = torch.cat([seen.update.gradient[n].flatten() for n in named])
    return float(F.cosine_similarity(ours, theirs, dim=0))


def worst(rows: list[Row]) -> Row:
    """Return the row of the attack that got most: the one image that came out best."""
    measured = [row for row in rows if "worst-psnr" in row]
    if not measured:
        raise GradveilError(f"No attack could be run: {'; '.join(str(row.get('error')) for row in rows)}")
    return max(measured, key=lambda row: float(row["worst-psnr"]))


UNKNOWN = -1.0  # dB; no image was measured


@dataclass(frozen=True)
class LeakGuard:
    """A mod for ``ClientApp(mods=[leak_guard(...)])``; put it first, so that it sees what really leaves.

    It keeps the inputs that the client trains on, attacks the outgoing update without them, and compares. The
    reply's metrics get ``leak-psnr``, the image that came out best, in dB, and ``leak-floor``, what a blind guess
    gets. A score below the threshold says that *this attack* failed, not that none would succeed.

    Args:
        attack: a spec or an attack.
        max_psnr: an update from which some image comes out better than this is withheld.
        defense: what is in force: the server that knows it is played too; None takes the site's or the run's.
        public: inputs (M, *shape) of the same kind that are no secret: what the attacker knows beforehand.
        max_examples: updates of more examples are not attacked.
        send_unchecked: send those all the same; otherwise they are withheld.
        bounds: of the inputs.
        lr: of the local steps; None reads ``lr`` from the message, and takes 1 where there is none.
        seed: for tests only; None draws from the operating system.
    """

    attack: str | Attack = "newton"
    _: KW_ONLY
    max_psnr: float = 20.0
    defense: str | Defense | None = None
    public: Tensor | None = None
    max_examples: int = 16
    send_unchecked: bool = False
    bounds: tuple[float, float] = (0.0, 1.0)
    lr: float | None = None
    seed: int | None = None

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Let the client train, then attack what it wants to send; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        tape = SeenInputs()
        try:
            before = params_of(arrays_of(message)[1])
            with ModelWatch(before, tape.attach):
                reply = call_next(message, context)
            tape.detach()  # before the model is copied for the attack
            return reply if reply.has_error() else self._judge(message, context, before, reply, tape)
        except GradveilError as error:
            return withhold(message, str(error))
        finally:
            tape.detach()

    def _judge(self, message: Message, context: Context, before: Params, reply: Message, tape: "SeenInputs") -> Message:
        if tape.model is None:
            raise DefenseError("the model was not seen in training, so the update could not be checked for leaks.")
        truth = tape.examples()
        if len(truth) > self.max_examples:
            if not self.send_unchecked:
                raise DefenseError(
                    f"the update is of {len(truth)} examples, too many to be checked. Raise max_examples "
                    f"({self.max_examples}), or pass send_unchecked=True."
                )
            add_metrics(reply, {"leak-psnr": UNKNOWN, "leak-floor": UNKNOWN})
            return reply
        after = params_of(arrays_of(reply)[1])
        check_reply(before, after)
        before, after = (named_as_in(tape.model, weights) or weights for weights in (before, after))
        update = update_of(message, before, reply, after, self.lr)
        defense = self.defense or context.node_config.get("defense", context.run_config.get("defense", "none"))
        probe = Probe(self.attack, tuple(truth.inputs.shape[1:]), tape.num_classes, defense, self.bounds, self.public)
        row = worst(probe.run(tape.model, before, update, fresh_rng(self.seed), truth))
        if row["worst-psnr"] > self.max_psnr:
            raise DefenseError(
                f"{row['attack']} ({row['server']}) rebuilt a training example at {row['worst-psnr']:.1f} dB; the "
                f"limit is {self.max_psnr:g} dB. Train on more examples at once, or use a stronger defense."
            )
        add_metrics(reply, {"leak-psnr": row["worst-psnr"], "leak-floor": probe.floor(truth)})
        return reply


leak_guard = LeakGuard


@dataclass
class SeenInputs:
    """Keeps the inputs of a model's training passes, on the client, until the reply has been judged."""

    model: nn.Module | None = None
    num_classes: int = 0
    _inputs: list[Tensor] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        """Listen to a model."""
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._leave))

    def detach(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()

    def examples(self) -> Batch:
        """Return every different example that was trained on; labels are not seen."""
        inputs = torch.unique(torch.cat(self._inputs), dim=0)
        return Batch(inputs, torch.full((len(inputs),), -1))

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            examples = Examples(args, kwargs)
            if len(examples.parts) > 1:
                raise DefenseError(
                    f"The leak check rebuilds one input, and the model was called with {len(examples.parts)}. Turn it "
                    f"off, or join them in one tensor."
                )
            self._inputs.append(examples.x.detach().cpu().clone())
            self.model = model

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            self.num_classes = output.shape[-1]
