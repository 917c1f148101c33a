"""Flower mods on a node: defend the update, guard the steps, check the weights that came; and what may then leave.

Under a defence of records an answer is made anew of what is noisy or public. The app's own reply is looked at, and none
of it is sent: neither its metrics, configs and words, nor the names, order, types and bits of its arrays, nor the text
of its errors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from gradveil import tree
from gradveil.auditing.incoming import check_model
from gradveil.errors import BudgetError, DefenseError, GradveilError, UpdateError
from gradveil.files import wrap_parse_errors
from gradveil.integrations.flower.records import (
    LOG,
    SPENT,
    ModelWatch,
    Next,
    Refused,
    add_metrics,
    arrays_of,
    asked,
    is_training,
    named_as_in,
    number,
    params_of,
    record_of,
    sent_weights,
    withhold,
)
from gradveil.integrations.flower.site import (
    STATEMENT,
    allows,
    check_seed,
    defense_for,
    generator_of,
    name_of,
    noise_of,
    pay,
    state,
)
from gradveil.integrations.leaks import LeakCheck, SeenInputs
from gradveil.modules import is_trained
from gradveil.privacy.accountant import SIMULATED, Account
from gradveil.privacy.noise import SecretDraws
from gradveil.protection.defense import Defense, accounted
from gradveil.protection.protect import Guard, RecordSettings, protect, refuse_idle
from gradveil.step_rule import StepRule
from gradveil.tree import Params
from gradveil.types import Batch, Update

STEPS = "defended-steps"
PUBLIC = ("num-examples", "num-steps", STEPS)  # counts that a defence of records takes for known
FAILED = "the app failed; the node's own log says how. What it says of it may tell of the records, and stays there."


def other_kind(defense: Defense, message: Message, context: Context, call_next: Next) -> Message:
    """Answer a message that asks for no training: not at all, unless the site allows it; then it says so."""
    kind = "evaluate" if message.metadata.message_type.partition(".")[0] == "evaluate" else "query"
    if not allows(context, kind):
        return withhold(
            message,
            f"this site answers no {kind} messages: {name_of(defense)} promises something of single records, and what "
            f"is computed from them here would leave beside its noise and its account. Evaluate on public data on the "
            f"server; a site that wants it all the same sets --node-config \"{kind}='allow'\".",
        )
    reply = call_next(message, context)
    if not reply.has_error():
        reply.content[STATEMENT] = ConfigRecord({"defense": name_of(defense), "allows": [kind], "paid": False})
    return reply


@contextmanager
def told_here_alone(context: Context) -> Iterator[None]:
    """Within, what goes wrong is told in the node's log; the error that leaves says it in a simulation alone."""
    if noise_of(context) == SIMULATED:
        yield
        return
    try:
        yield
    except BudgetError as error:
        LOG.warning("gradveil: %s", error)
        raise BudgetError("It was spent while the app trained; the node's log says more.") from None
    except Exception as error:
        LOG.warning("gradveil: the app failed, and the server is not told how", exc_info=error)
        raise DefenseError(FAILED) from None


def answer_in(app: Next, message: Message, context: Context) -> Message | GradveilError:
    """Return the app's answer, or an error that says nothing of what went wrong: the log of the node does."""
    try:
        with told_here_alone(context):
            reply = app(message, context)
    except GradveilError as error:
        return error
    if reply.has_error():
        LOG.warning("gradveil: the app answered with an error, and the server is not told which: %s", reply.error)
        return DefenseError(FAILED)
    return reply


def trained_in(guards: Sequence[Guard], reply: Message) -> Guard:
    """Return the guard whose model's weights the app wants to send; raise where no guard saw them trained."""
    try:
        sent = params_of(arrays_of(reply)[1])
    except UpdateError:
        sent = {}
    for guard in guards:
        own, named = guard.model.state_dict(), named_as_in(guard.model, sent)
        if named is not None and all(torch.equal(named[name].to(w), w) for name, w in own.items()):
            return guard
    raise DefenseError("the weights in the reply are not those of the model that was trained under guard.")


def made_anew(message: Message, guard: Guard, weights: Params, examples: int, steps: int) -> Message:
    """Return the answer: what was trained, under the names and in the types that were sent, and public counts.

    What was not trained goes back as it came.
    """
    key, record = arrays_of(message)
    before, own = params_of(record), list(guard.model.state_dict())
    names = dict(zip(before, before if before.keys() == {*own} else own, strict=True))  # or they are numbered
    trained = {name for name, p in guard.model.named_parameters(remove_duplicate=False) if p.requires_grad}
    after = {name: weights[names[name]].to(old) if names[name] in trained else old for name, old in before.items()}
    if whole := [name for name in before if names[name] in trained and not before[name].is_floating_point()]:
        raise UpdateError(f"the server sent {whole[0][:80]!r}, which is trained, as {before[whole[0]].dtype}.")
    if not all(bool(value.isfinite().all()) for value in after.values()):
        raise UpdateError("the weights in the types that the server sent are NaN or infinite: nothing is sent.")
    counts = MetricRecord(dict(zip(PUBLIC, (examples, steps, steps), strict=True)))
    return Message(RecordDict({key: record_of(after), "metrics": counts}), reply_to=message)


def tell_what_stays(reply: Message, examples: int, steps: int) -> None:
    """Log what an app wanted to send beside its weights; it was computed from private records, or may have been."""
    known = {"num-examples": examples, "num-steps": steps}
    for record in reply.content.metric_records.values():
        for name, value in record.items():
            if known.get(name) != value:
                LOG.info("gradveil: the metric %r is not sent: it may be computed from private records.", name)
    for key in reply.content.config_records:
        LOG.info("gradveil: the config %r is not sent: it may be computed from private records.", key)


def defend_update(
    defense: Defense,
    message: Message,
    context: Context,
    reply: Message,
    lr: float | None = None,
    seed: int | None = None,
) -> Message:
    """Put the defended update in the place of a reply's own, and state it.

    Running statistics and counters pass as they are: no gradient step makes them. So does an error.
    """
    if reply.has_error():
        return reply
    before, (key, record) = sent_weights(message), arrays_of(reply)
    after = params_of(record)
    check_reply(before, after)
    update = update_of(message, before, reply, after, lr)
    sent = defense.on_update(update, generator_of(context, seed) or SecretDraws())
    defended = {name: before[name] - update.lr * g.to(before[name].dtype) for name, g in sent.gradient.items()}
    reply.content[key] = record_of(after | defended)
    change = tree.norm(tree.subtract(sent.gradient, update.gradient)) / tree.norm(update.gradient).clamp_min(1e-30)
    add_metrics(reply, {"update-change": float(change)})
    state(reply, defense, context, steps=sent.num_steps, examples=sent.num_examples)
    return reply


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
    lr = asked(message, "lr", 1.0) if lr is None else lr
    if not 0 < lr < inf:
        raise UpdateError(f"The learning rate is {lr}; it must be above 0.")
    weights = {name: value for name, value in before.items() if is_trained(name, value)}
    with wrap_parse_errors("What the messages say of the local steps", UpdateError, "Leave this update out."):
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


@dataclass(frozen=True)
class GuardMod:
    """A mod for ``ClientApp(mods=[guard_mod(...)])`` that defends the client's own training, or what comes of it.

    For a defence of the local steps it finds the model by its state-dict names when the client calls it, guards it
    until the client replies, adds ``defended-steps`` to the reply's metrics, and withholds the update when no step was
    defended, or weights were changed past the defence. A defence of the update alone acts on the reply.

    Args:
        defense: a spec or a defence; None reads ``defense`` from the site's or the run's settings.
        lr: of the local steps, where the defence acts on the update (``gaussian:on=update``): it turns the change of
            the weights into a gradient (W_before - W_after) / lr, in units of which noise is. None reads ``lr`` from
            the message, and takes 1 where there is none: give it where the train function does not take that.
        seed: for tests only, where the site asks for simulated noise.
        settings: of a defence of records, as ``protect`` takes them: ``{"slots": 32, "records": 200}``. What such a
            round costs is paid out of the site's account, and the answer is made anew of the noisy weights and public
            counts (``num-examples`` is ``records``, where it is given). Messages that do not ask for training are not
            answered, unless the site allows it.
    """

    defense: str | Defense | None = None
    _: KW_ONLY
    lr: float | None = None
    seed: int | None = None
    settings: RecordSettings = field(default_factory=RecordSettings)

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Let the client train under guard; fail closed."""
        guards: list[Guard] = []
        try:
            defense = defense_for(self.defense, context)
            private = "records" in defense.acts_on
            if not is_training(message):
                return other_kind(defense, message, context, call_next) if private else call_next(message, context)
            if accounted(defense).min_clients:
                raise DefenseError(
                    "tier=aggregate is for a secure sum that is checked before anything is sent, as gradveil's own app "
                    "does (gradveil train --engine flower --secure-aggregation). Use tier=local here."
                )
            check_seed(self.seed, context)
            before = sent_weights(message)
            if defense.acts_on == {"update"}:
                refuse_idle(defense)
                return defend_update(defense, message, context, call_next(message, context), self.lr, self.seed)

            def found(model: nn.Module) -> None:
                simulated = generator_of(context, self.seed)
                guards.append(protect(model, defense, simulated=simulated, **self.settings))

            with ModelWatch(before, found):
                reply = answer_in(call_next, message, context) if private else call_next(message, context)
            return (self._private if private else self._plain)(defense, guards, message, context, reply)
        except BudgetError as error:
            return withhold(message, f"{SPENT}{error}")
        except GradveilError as error:
            return withhold(message, str(error))
        finally:
            for guard in guards:
                guard.remove()

    def _plain(
        self, defense: Defense, guards: list[Guard], message: Message, context: Context, reply: Message
    ) -> Message:
        """Return the app's reply with what was done in it."""
        if reply.has_error():
            return reply
        steps = self._steps(defense, guards, message)
        if "update" in defense.acts_on:
            guard = max(guards, key=lambda g: g.report.steps)
            key, record = arrays_of(reply)
            after = params_of(record)
            reply.content[key] = record_of(self._defended(guard, message, after, reply))
        add_metrics(reply, {STEPS: steps})
        examples = max(1, int(number(reply, "num-examples", 1)))
        state(reply, defense, context, steps=steps, examples=examples)
        return reply

    def _private(
        self, defense: Defense, guards: list[Guard], message: Message, context: Context, reply: Message | GradveilError
    ) -> Message:
        """Pay for what was computed from records, whatever is answered, and answer with nothing else."""
        account = self._pay(defense, guards, message, context)
        if isinstance(reply, GradveilError):
            raise reply
        steps = self._steps(defense, guards, message)
        guard = trained_in(guards, reply)
        weights = guard.model.state_dict()
        if "update" in defense.acts_on:
            weights = self._defended(guard, message, weights)
        run = self.settings.get("run")
        examples = (self.settings.get("records") if run is None else run.records) or guard.report.examples
        tell_what_stays(reply, examples, steps)
        answer = made_anew(message, guard, weights, examples, steps)
        state(answer, defense, context, steps=steps, examples=examples, account=account)
        return answer

    def _steps(self, defense: Defense, guards: list[Guard], message: Message) -> int:
        """Return how many steps were defended; raise where that is not all that took place."""
        for guard in guards:
            guard.verify()
        steps = sum(guard.report.steps for guard in guards)
        if defense.acts_on and not steps:
            raise DefenseError(_not_trained(guards) if guards else _not_found(params_of(arrays_of(message)[1])))
        return steps

    def _pay(self, defense: Defense, guards: list[Guard], message: Message, context: Context) -> Account | None:
        """Charge the site for what its records were used for; nothing where they were not."""
        if "account" in self.settings:
            raise DefenseError("the site keeps the account of a node. Leave account out of the mod's settings.")
        run = self.settings.get("run")
        private = accounted(defense)
        limit = (private if run is None else accounted(private.for_run(run))).allowance
        cost = sum(guard.account.spent for guard in guards)
        return pay(message, context, cost, inf if limit is None else limit) if cost else None

    def _defended(self, guard: Guard, message: Message, after: Params, reply: Message | None = None) -> Params:
        """Return the weights to send in place of these, by the same names."""
        before = sent_weights(message)
        check_reply(before if reply is not None else named_as_in(guard.model, before) or before, after)
        lr = asked(message, "lr", 1.0) if self.lr is None else self.lr
        said = [1.0, 1.0] if reply is None else [number(reply, name, 1) for name in ("num-examples", "num-steps")]
        examples, steps = (max(1, int(value)) for value in said)
        named = [named_as_in(guard.model, weights) or weights for weights in (before, after)]
        sent = guard.update(*named, lr=lr, num_examples=examples, num_steps=steps)
        return dict(zip(after, (sent[name] for name in named[1]), strict=True))


guard_mod = GuardMod


def _not_found(names: Params) -> str:
    return (
        f"no module was called whose state dict has the {len(names)} names that the server sent, so no step was "
        f"defended. Call the model as model(x), in the thread of the train function."
    )


def _not_trained(guards: list[Guard]) -> str:
    name, steps = type(guards[0].model).__name__, sum(guard.report.optimizer_steps for guard in guards)
    return f"{name} was called, but no training step of it was defended ({steps} optimizer steps were taken)."


ACCEPTED = "gradveil-accepted-weights"  # in the node's state: those of the last round that it trained in


@dataclass(frozen=True)
class WeightsGuard:
    """A mod for ``ClientApp(mods=[weights_guard(...)])`` that refuses to train at weights that look planted.

    The train function is not called, and the server gets an error that says why. Weights are held against those of
    the last round that this node took part in, which its state keeps, and against the model where it is given.

    Args:
        model: what makes the model that the client expects, without arguments: ``make_model``.
        examples: what gives some of the client's own examples, for what the weights do to them; needs ``model``.
    """

    model: Callable[[], nn.Module] | None = None
    _: KW_ONLY
    examples: Callable[[Context], Batch] | None = None

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Check what came, then let the client train; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        try:
            honest = None if self.model is None else self.model()
            sent = params_of(arrays_of(message)[1])
            weights = self._named(honest, sent)
            kept = context.state.array_records.get(ACCEPTED)
            last = None if kept is None else params_of(kept)
            own = None if self.examples is None else self.examples(context)
            found = check_model(*(([last] if last else []) + [weights]), model=honest, batch=own)
            if found.suspicious:
                why = " ".join(f.text for f in found.findings[:3])
                if own is not None:  # what the weights do to one's own examples tells of these
                    LOG.warning("gradveil: the weights look planted. %s", why)
                    why = "The node's own log says why."
                raise DefenseError(f"the weights look planted. {why}")
        except GradveilError as error:
            return withhold(message, str(error))
        context.state[ACCEPTED] = record_of(weights)
        return call_next(message, context)

    @staticmethod
    def _named(honest: nn.Module | None, sent: Params) -> Params:
        """Return the weights by the model's names; those of older clients are numbered."""
        named = sent if honest is None else named_as_in(honest, sent) or sent
        if all(name.isdigit() for name in named):
            raise DefenseError("the weights have numbers for names, so nothing can be told of them. Give the model.")
        return named


weights_guard = WeightsGuard


@dataclass(eq=False)
class LeakGuard(LeakCheck):
    """A mod for ``ClientApp(mods=[leak_guard(...)])``; put it first, so that it sees what really leaves.

    It keeps the inputs that the client trains on, attacks the outgoing update without them, and compares. The
    reply's metrics get ``leak-psnr``, the image that came out best, in dB, ``leak-floor``, what a blind guess
    gets, and ``leak-checked``, how many examples these two are about. With ``send_unchecked``, ``checked(grid)`` on the
    server keeps Flower from stopping at a missing score. The settings are those of ``LeakCheck``.
    """

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Let the client train, then attack what it wants to send; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        tape = SeenInputs()
        try:
            before = sent_weights(message)
            with ModelWatch(before, tape.attach):
                reply = call_next(message, context)
            tape.detach()  # before the model is copied for the attack
            if reply.has_error():
                return reply
            if "spent" in reply.content.config_records.get(STATEMENT, {}):
                raise DefenseError(
                    "leak_guard's figures are computed from the records and would leave beside the noise of their "
                    "defence. Leave leak_guard out."
                )
            after = params_of(arrays_of(reply)[1])
            check_reply(before, after)
            if tape.model is not None:
                before, after = (named_as_in(tape.model, weights) or weights for weights in (before, after))
            update = update_of(message, before, reply, after, self.lr)
            run = context.node_config.get("defense", context.run_config.get("defense", "none"))
            add_metrics(reply, self.judge(before, update, self.defense or str(run), tape))
            return reply
        except GradveilError as error:
            return withhold(message, str(error))
        finally:
            tape.detach()


leak_guard = LeakGuard
