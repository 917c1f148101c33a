"""The leak guard: attack your own update before it leaves, attach the score, withhold above a threshold."""

from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.defenses.base import Defense
from gradveil.defenses.guard.passes import find_input
from gradveil.errors import DefenseError, GradveilError
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
from gradveil.integrations.probe import Probe, floor, worst
from gradveil.tree import Params
from gradveil.types import Batch

UNKNOWN = -1.0  # dB; no image was measured


def leak_guard(
    attack: str | Attack = "newton",
    *,
    max_psnr: float = 20.0,
    defense: str | Defense | None = None,
    public: Tensor | None = None,
    max_examples: int = 16,
    send_unchecked: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
    lr: float | None = None,
    seed: int | None = None,
) -> "LeakGuard":
    """Return a mod for ``ClientApp(mods=[...])``; put it first, so that it sees what really leaves.

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
    return LeakGuard(attack, max_psnr, defense, public, max_examples, send_unchecked, bounds, lr, seed)


@dataclass(frozen=True)
class LeakGuard:
    """See ``leak_guard``."""

    attack: str | Attack = "newton"
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
        add_metrics(reply, {"leak-psnr": row["worst-psnr"], "leak-floor": floor(truth, self.bounds, self.public)})
        return reply


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
            at = find_input(args, kwargs)
            x = args[at] if isinstance(at, int) else kwargs[at]
            self._inputs.append(x.detach().cpu().clone())
            self.model = model

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            self.num_classes = output.shape[-1]
