"""A Flower server's grid that looks at replies on their way to a strategy; one that draws the nodes of a round."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from gradveil.errors import BudgetError, GradveilError
from gradveil.federated.server import Ledger
from gradveil.integrations.flower.records import LOG, SPENT, is_training
from gradveil.integrations.flower.settings import FlowerSettings


class GridView(Grid):  # type: ignore[misc]
    """Passes everything on to another grid; override ``received`` to look at, or change, the replies."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sent: dict[int, Message] = {}  # node -> the last training message to it

    def received(self, sent: Message, reply: Message) -> Message:
        """Return what the strategy is given for a reply to a training message."""
        return reply

    def together(self, sent: list[Message], replies: list[Message]) -> list[Message]:
        """Return what the strategy is given for all replies to the training messages of one call."""
        return replies

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Hear of all replies to the training messages of one call, after ``received`` and ``together``."""

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._grid.get_node_ids())

    def get_nodes(self) -> Iterable[Any]:
        return list(self._grid.get_nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return list(self._grid.push_messages(self._remember(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._look(reply) for reply in self._grid.pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies."""
        out = self._remember(messages)
        replies = [self._look(reply) for reply in self._grid.send_and_receive(out, timeout=timeout)]
        if training := [m for m in out if is_training(m)]:
            replies = self.together(training, replies)
            self.round_ended(training, replies)
        return replies

    def _remember(self, messages: Iterable[Message]) -> list[Message]:
        out = list(messages)
        self._sent.update({m.metadata.dst_node_id: m for m in out if is_training(m)})
        return out

    def _look(self, reply: Message) -> Message:
        sent = self._sent.get(reply.metadata.src_node_id)
        return reply if sent is None or not is_training(reply) else self.received(sent, reply)


DEVICE = "partition-id"  # what Flower calls the number of a node's share of the data


class SampledGrid(GridView):
    """Shows a strategy the nodes of this round only: the first K connected devices in the order of the draw.

    With every device connected these are the devices that the in-process simulation draws from the same seed. Where
    a record may be used so often and no more, devices take turns, and those that have nothing left are not asked.
    """

    def __init__(
        self,
        grid: Grid,
        settings: FlowerSettings,
        ledger: Ledger,
        tell: Callable[[Message], dict[str, Any]] = lambda message: {},
        done: int = 0,
    ) -> None:
        super().__init__(grid)
        self._settings, self._ledger, self._tell = settings, ledger, tell
        self.devices: dict[int, int] = {}  # node -> device, as the nodes say
        self._round = done + 1  # of those before, a run that is continued knows the outcome
        self.drawn: list[int] = []
        self._nodes: list[int] = []  # of this round
        self._silent: set[int] = set()  # nodes that did not say which device they are
        self._spent: set[int] = set()  # devices that said so

    def get_node_ids(self) -> list[int]:
        """Return the nodes of this round: as soon as enough are connected, or those that are at the deadline.

        Strategies ask more than once in a round, and get the same answer.
        """
        if not self._nodes:
            nodes = self._wait()
            self.drawn = self._draw(nodes)
            self._nodes = [nodes[device] for device in self.drawn]
        return self._nodes

    @property
    def absent(self) -> int:
        """How many clients the round is short of, since too few nodes were connected."""
        return self._settings.clients - len(self.drawn)

    def _wait(self) -> dict[int, int]:
        """Return the connected devices with their nodes: as many as a round has clients, or at the deadline fewer."""
        own, needed = self._settings, self._settings.clients
        until = time.monotonic() + own.deadline
        while len(nodes := self._known(until - time.monotonic())) < needed and time.monotonic() < until:
            LOG.info("Waiting for nodes: %s connected, %s needed.", len(nodes), needed)
            time.sleep(1)
        fewest = needed if own.secure_aggregation else own.min_replies
        if len(nodes) < fewest:
            raise GradveilError(
                f"Round {self._round}: {len(nodes)} nodes are connected after {own.deadline:g} s, and it takes "
                f"{fewest}. Start nodes and go on with --resume, or give a longer --deadline."
            )
        if len(nodes) < needed:
            LOG.warning("Round %s: %s of %s clients are connected, and it goes on.", self._round, len(nodes), needed)
        return nodes

    def _draw(self, nodes: dict[int, int]) -> list[int]:
        """Return the devices of the round among those connected."""
        needed = min(self._settings.clients, len(nodes))
        order = self._settings.order_of(self._round, self._ledger.sizes)
        able = self._ledger.able([device for device in order if device in nodes and device not in self._spent])
        if len(able) < needed:
            raise BudgetError(
                f"Round {self._round} is refused: {len(nodes) - len(able)} of {len(nodes)} clients have spent their "
                f"budget, and {needed} are needed. Plan all rounds from the start, with the noise that they need."
            )
        return able[:needed]

    def _known(self, seconds: float) -> dict[int, int]:
        """Return the connected devices with their nodes; new nodes have so long to say which device they are."""
        connected = set(self._grid.get_node_ids())
        self._ask(sorted(connected - self.devices.keys() - self._silent), max(seconds, 1.0))
        known = {device: node for node, device in sorted(self.devices.items()) if node in connected}
        known = {device: node for device, node in known.items() if 0 <= device < len(self._ledger.sizes)}
        if len(known) < self._settings.clients:
            self._silent.clear()  # they are needed, and asked again
        return known

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies; those for training carry the round's learning rate.

        What else clients are told follows from the weights that they get: ``tell``.
        """
        out = list(messages)
        if training := [message for message in out if is_training(message)]:
            self._ledger.pay(self._round, self.drawn)
            told = {"lr": self._settings.lr_of(self._round)} | self._tell(training[0])
            for message in training:
                message.content["config"].update(told)
        return super().send_and_receive(out, timeout=timeout)

    def together(self, sent: list[Message], replies: list[Message]) -> list[Message]:
        """Put the replies in the order of the draw: in the order of arrival a sum is rounded by chance."""
        order = {node: place for place, node in enumerate(self._nodes)}
        return sorted(replies, key=lambda reply: order.get(reply.metadata.src_node_id, len(order)))

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Go on to the next draw, without those who have nothing left to spend."""
        self._round += 1
        self._nodes = []
        for reply in replies:
            if reply.has_error() and SPENT in str(reply.error.reason):
                self._spent.add(self.devices[reply.metadata.src_node_id])

    def _ask(self, nodes: list[int], seconds: float) -> None:
        """Ask new nodes which device they are: node ids are random, and the draw is of devices."""
        questions = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
        self._silent.update(nodes)
        for answer in self._grid.send_and_receive(questions, timeout=seconds) if questions else []:
            device = device_in(answer)
            self._silent.discard(answer.metadata.src_node_id)
            self.devices[answer.metadata.src_node_id] = device
            if not 0 <= device < len(self._ledger.sizes):
                why = answer.error.reason if answer.has_error() else f"its partition-id is {device}"
                LOG.warning("Node %s is left out: %s", answer.metadata.src_node_id, why)


def device_in(answer: Message) -> int:
    """Return which device a node says that it is; -1 where it says none."""
    said = {} if answer.has_error() else answer.content.config_records.get("node", {})
    device = said.get(DEVICE)
    return device if type(device) is int else -1
