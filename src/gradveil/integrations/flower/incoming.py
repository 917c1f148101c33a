"""A Flower mod that looks at the weights a server sent before the client trains at them, and refuses planted ones."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from flwr.app import Context, Message
from torch import nn

from gradveil.auditing.incoming import check_model
from gradveil.errors import DefenseError, GradveilError
from gradveil.integrations.flower.records import (
    LOG,
    Next,
    arrays_of,
    is_training,
    named_as_in,
    params_of,
    record_of,
    withhold,
)
from gradveil.tree import Params
from gradveil.types import Batch

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
