"""A Flower mod that imposes a defence of the local steps from outside the training code."""

from dataclasses import dataclass

from flwr.app import Context, Message
from torch import nn

from gradveil.defenses.base import Defense
from gradveil.defenses.guard import Guard, protect
from gradveil.errors import DefenseError, GradveilError
from gradveil.integrations.flower.grids import is_training
from gradveil.integrations.flower.mod_update import check_reply
from gradveil.integrations.flower.records import (
    Next,
    add_metrics,
    arrays_of,
    defense_for,
    number,
    params_of,
    record_of,
    withhold,
)
from gradveil.integrations.flower.watch import ModelWatch, named_as_in
from gradveil.integrations.local_training import fresh_rng
from gradveil.registry import describe
from gradveil.tree import Params

STEPS = "defended-steps"


def guard_mod(defense: str | Defense | None = None, *, lr: float | None = None, seed: int | None = None) -> "GuardMod":
    """Return a mod for ``ClientApp(mods=[...])`` that defends every local step of the client's own training.

    It finds the model by its state-dict names when the client calls it, guards it until the client replies, adds
    ``defended-steps`` to the reply's metrics, and withholds the update when no step was defended.

    Args:
        defense: a spec or a defence; None reads ``defense`` from the site's or the run's settings.
        lr: as in ``update_mod``, where the defence acts on the update as well (``representation+gaussian:on=update``).
        seed: for tests only; None draws from the operating system.
    """
    return GuardMod(defense, lr, seed)


@dataclass(frozen=True)
class GuardMod:
    """See ``guard_mod``."""

    defense: str | Defense | None = None
    lr: float | None = None
    seed: int | None = None

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Let the client train under guard; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        guards: list[Guard] = []
        try:
            defense = defense_for(self.defense, context)
            if defense.acts_on == {"update"}:
                raise DefenseError(f"{describe(defense)} acts on the update only. Use update_mod for it.")
            return self._guarded(defense, guards, message, context, call_next)
        except GradveilError as error:
            return withhold(message, str(error))
        finally:
            for guard in guards:
                guard.remove()

    def _guarded(
        self,
        defense: Defense,
        guards: list[Guard],
        message: Message,
        context: Context,
        call_next: Next,
    ) -> Message:
        before = params_of(arrays_of(message)[1])

        def found(model: nn.Module) -> None:
            guards.append(protect(model, defense, rng=fresh_rng(self.seed)))

        with ModelWatch(before, found):
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        steps = sum(guard.report.steps for guard in guards)
        if defense.acts_on and not steps:
            raise DefenseError(_not_found(before) if not guards else _not_trained(guards))
        if "update" in defense.acts_on:
            self._defend_update(guards, message, before, reply)
        add_metrics(reply, {STEPS: steps})
        return reply

    def _defend_update(self, guards: list[Guard], message: Message, before: Params, reply: Message) -> None:
        key, record = arrays_of(reply)
        after = params_of(record)
        check_reply(before, after)
        lr = number(message, "lr", 1.0) if self.lr is None else self.lr
        examples, steps = (max(1, int(number(reply, name, 1))) for name in ("num-examples", "num-steps"))
        guard = max(guards, key=lambda g: g.report.steps)
        named = [named_as_in(guard.model, weights) or weights for weights in (before, after)]
        sent = guard.update(*named, lr=lr, num_examples=examples, num_steps=steps)
        reply.content[key] = record_of(dict(zip(after, (sent[name] for name in named[1]), strict=True)))


def _not_found(names: Params) -> str:
    return (
        f"no module was called whose state dict has the {len(names)} names that the server sent, so no step was "
        f"defended. Call the model as model(x), in the thread of the train function."
    )


def _not_trained(guards: list[Guard]) -> str:
    name, steps = type(guards[0].model).__name__, sum(guard.report.optimizer_steps for guard in guards)
    return f"{name} was called, but no training step of it was defended ({steps} optimizer steps were taken)."
