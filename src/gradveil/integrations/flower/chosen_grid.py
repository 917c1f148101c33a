"""Which nodes of a Flower run take part in a round."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from gradveil.errors import BudgetError
from gradveil.federated.ledger import Ledger
from gradveil.integrations.flower.grids import GridView
from gradveil.integrations.flower.records import LOG, SPENT, is_training
from gradveil.integrations.flower.settings import FlowerSettings

DEVICE = "partition-id"  # what Flower calls the number of a node's share of the data


class ChosenGrid(GridView):
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
    ) -> None:
        super().__init__(grid)
        self._settings, self._ledger, self._tell = settings, ledger, tell
        self.devices: dict[int, int] = {}  # node -> device, as the nodes say
        self._round = 1
        self.drawn: list[int] = []
        self._spent: set[int] = set()  # devices that said so

    def get_node_ids(self) -> list[int]:
        """Return the nodes of this round, as soon as enough are connected."""
        needed = self._settings.clients
        while len(nodes := self._known()) < needed:
            LOG.info("Waiting for nodes: %s connected, %s needed.", len(nodes), needed)
            time.sleep(1)
        order = self._settings.order_of(self._round, self._ledger.sizes)
        able = self._ledger.able([device for device in order if device in nodes and device not in self._spent])
        if len(able) < needed:
            raise BudgetError(
                f"Round {self._round} is refused: {len(nodes) - len(able)} of {len(nodes)} clients have spent their "
                f"budget, and {needed} are needed. Plan all rounds from the start, with the noise that they need."
            )
        self.drawn = able[:needed]
        return [nodes[device] for device in self.drawn]

    def _known(self) -> dict[int, int]:
        """Return the connected devices with their nodes."""
        connected = set(self._grid.get_node_ids())
        self._ask(sorted(connected - self.devices.keys()))
        known = {device: node for node, device in sorted(self.devices.items()) if node in connected}
        return {device: node for device, node in known.items() if 0 <= device < len(self._ledger.sizes)}

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

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Go on to the next draw, without those who have nothing left to spend."""
        self._round += 1
        for reply in replies:
            if reply.has_error() and SPENT in str(reply.error.reason):
                self._spent.add(self.devices[reply.metadata.src_node_id])

    def _ask(self, nodes: list[int]) -> None:
        """Ask new nodes which device they are: node ids are random, and the draw is of devices."""
        questions = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
        for answer in self._grid.send_and_receive(questions, timeout=300) if questions else []:
            device = -1 if answer.has_error() else int(answer.content["node"][DEVICE])
            self.devices[answer.metadata.src_node_id] = device
            if not 0 <= device < len(self._ledger.sizes):
                why = answer.error.reason if answer.has_error() else f"its partition-id is {device}"
                LOG.warning("Node %s is left out: %s", answer.metadata.src_node_id, why)
