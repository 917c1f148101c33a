"""What leaves a node under a defence of records: an answer made anew of what is noisy or public, and of nothing else.

The app's own reply is looked at, and none of it is sent: neither its metrics, configs and words, nor the names, order,
types and bits of its arrays, nor the text of its errors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from gradveil.errors import BudgetError, DefenseError, GradveilError, UpdateError
from gradveil.integrations.flower.demand import name_of
from gradveil.integrations.flower.records import LOG, Next, arrays_of, named_as_in, params_of, record_of, withhold
from gradveil.integrations.flower.site import allows, noise_of
from gradveil.integrations.flower.statements import STATEMENT
from gradveil.privacy.accountant import SIMULATED
from gradveil.protection.defense import Defense
from gradveil.protection.protect import Guard
from gradveil.tree import Params

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
