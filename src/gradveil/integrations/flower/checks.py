"""Replies that must not be averaged: Flower's strategies take NaN as a number and stop at odd names or shapes."""

import math
from collections import Counter

from flwr.app import Message
from flwr.serverapp import Grid

from gradveil.errors import GradveilError, UpdateError
from gradveil.integrations.flower.grids import GridView
from gradveil.integrations.flower.mod_update import check_reply
from gradveil.integrations.flower.records import LOG, arrays_of, number, params_of, withhold


def checked(grid: Grid) -> "CheckedGrid":
    """Return the grid with malformed replies turned into errors: ``strategy.start(grid=checked(grid), ...)``."""
    return CheckedGrid(grid)


class CheckedGrid(GridView):
    """See ``checked``. ``counts`` has one row per round: sent, kept, failed, rejected, silent."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.counts: list[dict[str, int]] = []
        self.last_reason = ""  # why a reply was not kept
        self._rejected: Counter[int] = Counter()  # node -> replies turned away

    def received(self, sent: Message, reply: Message) -> Message:
        """Return the reply, or an error in its place."""
        if reply.has_error():
            self.last_reason = str(reply.error.reason)
            return reply
        try:
            check_reply(params_of(arrays_of(sent)[1]), params_of(arrays_of(reply)[1]))
            if not 0 < (examples := number(reply, "num-examples", 1.0)) < math.inf:
                raise UpdateError(f"The reply counts {examples} examples; it takes at least one.")
        except GradveilError as error:
            LOG.warning("Reply of node %s rejected: %s", reply.metadata.src_node_id, error)
            self.last_reason = str(error)
            self._rejected[reply.metadata.src_node_id] += 1
            return withhold(sent, str(error))
        return reply

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Count the round."""
        failed, rejected = sum(reply.has_error() for reply in replies), self._rejected.total()
        self._rejected.clear()
        self.counts.append(
            {
                "sent": len(sent),
                "kept": len(replies) - failed,
                "failed": failed - rejected,
                "rejected": rejected,
                "silent": len(sent) - len(replies),
            }
        )
