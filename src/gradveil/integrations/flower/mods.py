"""A Flower mod that runs an update-level defence (pruning, noise) on what a client is about to send."""

from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import nn

from gradveil import tree
from gradveil.certificates.accountant import Account
from gradveil.defenses.base import Defense
from gradveil.defenses.guard.protect import Guard, RecordSettings, protect, refuse_idle
from gradveil.errors import BudgetError, DefenseError, GradveilError, UpdateError
from gradveil.files import damage_told
from gradveil.integrations.flower.records import (
    LOG,
    SPENT,
    ModelWatch,
    Next,
    Refused,
    add_metrics,
    arrays_of,
    defense_for,
    is_training,
    named_as_in,
    number,
    params_of,
    pay,
    record_of,
    withhold,
)
from gradveil.integrations.flower.statements import state
from gradveil.integrations.local_training import fresh_rng, is_trained
from gradveil.registry import describe
from gradveil.step_rule import StepRule
from gradveil.tree import Params
from gradveil.types import Update


@dataclass(frozen=True)
class UpdateMod:
    """A mod for ``ClientApp(mods=[update_mod(...)])`` that defends the update after the client's training.

    Running statistics and counters pass as they are: no gradient step makes them.

    Args:
        defense: a spec or a defence; None reads ``defense`` from the site's or the run's settings.
        lr: of the local steps, to turn the change of the weights into a gradient (W_before - W_after) / lr;
            None reads ``lr`` from the message, and takes 1 where there is none: the change itself.
        seed: for tests only; None draws from the operating system.
    """

    defense: str | Defense | None = None
    _: KW_ONLY
    lr: float | None = None
    seed: int | None = None

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Let the client train, then send a defended update in place of its own; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        try:
            before = params_of(arrays_of(message)[1])
            defense = defense_for(self.defense, context)
            refuse_idle(defense)
            if defense.acts_on - {"update"}:
                raise DefenseError(f"{describe(defense)} acts inside the local steps. Use guard_mod for it.")
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            sent = self._defend(defense, message, before, reply)
            state(reply, defense, context, steps=sent.num_steps, examples=sent.num_examples)
            return reply
        except GradveilError as error:
            return withhold(message, str(error))

    def _defend(self, defense: Defense, message: Message, before: Params, reply: Message) -> Update:
        key, record = arrays_of(reply)
        after = params_of(record)
        check_reply(before, after)
        update = update_of(message, before, reply, after, self.lr)
        sent = defense.on_update(update, fresh_rng(self.seed))
        defended = {name: before[name] - update.lr * g.to(before[name].dtype) for name, g in sent.gradient.items()}
        reply.content[key] = record_of(after | defended)
        change = tree.norm(tree.subtract(sent.gradient, update.gradient)) / tree.norm(update.gradient).clamp_min(1e-30)
        add_metrics(reply, {"update-change": float(change)})
        return sent


update_mod = UpdateMod


NOT_FINITE = "not finite"


def check_reply(before: Params, after: Params) -> None:
    """Raise ``UpdateError`` unless the reply's tensors fit those that the server sent and are finite."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise UpdateError(f"The reply's tensors are not those of the model sent; they differ in: {', '.join(odd)}.")
    for name, value in after.items():
        if value.shape != before[name].shape:
            raise UpdateError(f"{name!r} is {tuple(value.shape)} in the reply and {tuple(before[name].shape)} as sent.")
        if not bool(torch.isfinite(value).all()):
            raise Refused(NOT_FINITE, f"{name!r} holds NaN or infinite values. Leave this update out.")


def update_of(message: Message, before: Params, reply: Message, after: Params, lr: float | None = None) -> Update:
    """Return what a reply says, as an update: the gradient (W_before - W_after) / lr of the trained tensors."""
    lr = number(message, "lr", 1.0) if lr is None else lr
    if not 0 < lr < inf:
        raise UpdateError(f"The learning rate is {lr}; it must be above 0.")
    weights = {name: value for name, value in before.items() if is_trained(name, value)}
    with damage_told("What the messages say of the local steps", UpdateError, "Leave this update out."):
        examples, steps = (int(number(reply, name, 1)) for name in ("num-examples", "num-steps"))
        size, rule = int(number(message, "batch-size", 0)) or None, rule_of(message)
    update = Update.from_weights(weights, after, lr, max(examples, 1), max(steps, 1), size, rule)
    return replace(update, buffers={n: v for n, v in after.items() if v.is_floating_point() and n not in weights})


RULE = {
    "optimizer": "optimizer", "momentum": "momentum", "weight_decay": "weight-decay", "proximal": "proximal-mu",
    "clip": "clip",
}  # fmt: skip


def rule_of(message: Message) -> StepRule:
    """Return the rule of the local steps that the server asked for; plain SGD where it says nothing."""
    said = next(iter(message.content.config_records.values()), ConfigRecord())
    return StepRule(**{name: said[key] for name, key in RULE.items() if key in said})


STEPS, REMOVED = "defended-steps", "removed-metrics"
PUBLIC = ("num-examples", "num-steps", STEPS)  # counts that a defence of records takes for known


@dataclass(frozen=True)
class GuardMod:
    """A mod for ``ClientApp(mods=[guard_mod(...)])`` that defends every local step of the client's own training.

    It finds the model by its state-dict names when the client calls it, guards it until the client replies, adds
    ``defended-steps`` to the reply's metrics, and withholds the update when no step was defended, or weights were
    changed past the defence.

    Args:
        defense: a spec or a defence; None reads ``defense`` from the site's or the run's settings.
        lr: as in ``update_mod``, where the defence acts on the update as well (``representation+gaussian:on=update``).
        seed: for tests only; None draws from the operating system.
        settings: of a defence of records, as ``protect`` takes them: ``{"slots": 32, "records": 200}``. What such a
            round costs is paid out of the node's account, and of the reply's metrics public counts alone are sent.
    """

    defense: str | Defense | None = None
    _: KW_ONLY
    lr: float | None = None
    seed: int | None = None
    settings: RecordSettings = field(default_factory=RecordSettings)

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Let the client train under guard; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        guards: list[Guard] = []
        try:
            defense = defense_for(self.defense, context)
            if defense.acts_on == {"update"}:
                raise DefenseError(f"{describe(defense)} acts on the update only. Use update_mod for it.")
            if defense.fewest:
                raise DefenseError(
                    "tier=aggregate is for a secure sum that is checked before anything is sent, as gradveil's own app "
                    "does (gradveil train --engine flower --secure-aggregation). Use tier=local here."
                )
            return self._guarded(defense, guards, message, context, call_next)
        except BudgetError as error:
            return withhold(message, f"{SPENT}{error}")
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
            guards.append(protect(model, defense, rng=fresh_rng(self.seed), **self.settings))

        with ModelWatch(before, found):
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        for guard in guards:
            guard.verify()
        steps = sum(guard.report.steps for guard in guards)
        if defense.acts_on and not steps:
            raise DefenseError(_not_found(before) if not guards else _not_trained(guards))
        if "update" in defense.acts_on:
            self._defend_update(guards, message, before, reply)
        add_metrics(reply, {STEPS: steps})
        account = self._pay(defense, guards, context, reply) if "records" in defense.acts_on else None
        examples = max(1, int(number(reply, "num-examples", 1)))
        state(reply, defense, context, steps=steps, examples=examples, account=account)
        return reply

    def _pay(self, defense: Defense, guards: list[Guard], context: Context, reply: Message) -> Account:
        """Charge the node for what is about to be sent, and see to it that nothing else tells of the records."""
        if "update" not in defense.acts_on:
            check_sent(guards, params_of(arrays_of(reply)[1]))
        run = self.settings.get("run")
        limit = (defense if run is None else defense.for_run(run)).allowance
        client = str(context.node_config.get("partition-id", context.node_id))
        keep_public(reply)
        return pay(context, client, sum(guard.account.spent for guard in guards), inf if limit is None else limit)

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


guard_mod = GuardMod


def check_sent(guards: list[Guard], sent: Params) -> None:
    """Raise unless the weights of a reply are those that a guard saw trained: noise is on no others."""
    for guard in guards:
        own, named = guard.model.state_dict(), named_as_in(guard.model, sent)
        if named is not None and all(torch.equal(named[name].to(w), w) for name, w in own.items()):
            return
    raise DefenseError("the weights in the reply are not those of the model that was trained under guard.")


def keep_public(reply: Message) -> None:
    """Take out of a reply what was computed from the records and has no noise: losses, accuracies, anything unknown."""
    removed = 0
    for key in [*reply.content.config_records]:
        del reply.content[key]
        removed += 1
    for record in reply.content.metric_records.values():
        for name in [name for name in record if name not in PUBLIC]:
            del record[name]
            LOG.info("gradveil: %s is computed from private records and was not sent.", name)
            removed += 1
    add_metrics(reply, {REMOVED: removed})


def _not_found(names: Params) -> str:
    return (
        f"no module was called whose state dict has the {len(names)} names that the server sent, so no step was "
        f"defended. Call the model as model(x), in the thread of the train function."
    )


def _not_trained(guards: list[Guard]) -> str:
    name, steps = type(guards[0].model).__name__, sum(guard.report.optimizer_steps for guard in guards)
    return f"{name} was called, but no training step of it was defended ({steps} optimizer steps were taken)."
