"""A Flower grid seen through something: what wraps the grid leaves the strategy as it is."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid


def is_training(message: Message) -> bool:
    """Return whether a message asks for training, or answers such a one."""
    return bool(message.metadata.message_type.partition(".")[0] == MessageType.TRAIN)


class GridView(Grid):  # type: ignore[misc]
    """Passes everything on to another grid; override ``received`` to look at, or change, the replies."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sent: dict[int, Message] = {}  # node -> the last training message to it

    def received(self, sent: Message, reply: Message) -> Message:
        """Return what the strategy is given for a reply to a training message."""
        return reply

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Hear of all replies to the training messages of one call, after ``received``."""

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes."""
        return list(self._grid.get_node_ids())

    def get_nodes(self) -> Iterable[Any]:
        """Return what is known of the nodes."""
        return list(self._grid.get_nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return list(self._grid.push_messages(self._remember(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch replies."""
        return [self._look(reply) for reply in self._grid.pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies."""
        out = self._remember(messages)
        replies = [self._look(reply) for reply in self._grid.send_and_receive(out, timeout=timeout)]
        if training := [m for m in out if is_training(m)]:
            self.round_ended(training, replies)
        return replies

    def _remember(self, messages: Iterable[Message]) -> list[Message]:
        out = list(messages)
        self._sent.update({m.metadata.dst_node_id: m for m in out if is_training(m)})
        return out

    def _look(self, reply: Message) -> Message:
        sent = self._sent.get(reply.metadata.src_node_id)
        return reply if sent is None or not is_training(reply) else self.received(sent, reply)
