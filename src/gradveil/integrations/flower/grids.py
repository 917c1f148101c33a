"""A Flower server's grid that looks at replies on their way to the strategy: the frame, and an audit of a sample."""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.auditing.run_folder import Row
from gradveil.errors import GradveilError
from gradveil.files import append_line
from gradveil.integrations.flower.mods import check_reply, update_of
from gradveil.integrations.flower.others_known import SAMPLE, SECONDS, OthersKnown, TrainingPass
from gradveil.integrations.flower.probe import Probe
from gradveil.integrations.flower.records import LOG, arrays_of, is_training, params_of
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.protection.defense import Defense
from gradveil.seeds import Seeds
from gradveil.tree import Params
from gradveil.types import Batch, Update


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


class AuditedGrid(GridView):
    """The grid with an audit in it: ``strategy.start(grid=audited(grid, model, "gs", ...), ...)``.

    The strategy sees every reply as it came. ``rows`` holds what was found, and ``out`` gets it as JSON lines.

    Args:
        grid: the grid that the ServerApp was given.
        model: the architecture; the weights are those that were sent in the round.
        attack: a spec or an attack.
        input_shape: of one example.
        num_classes: of the task; or how many numbers a target has.
        loss: that the clients minimise: a spec, a loss or a function.
        defense: what the clients are known to use: the server that knows it is played as well.
        public: inputs (M, *shape) of the same kind that are no secret: what the attacker knows beforehand.
        sample: how many updates of a round are attacked.
        max_examples: an update of more examples is not attacked as a whole. Where ``truth`` gives the originals of a
            single step, a sample of them is, each with all others known; else the log says that it was skipped.
        lr: of the local steps; None reads ``lr`` from the message, and takes 1 where there is none.
        seed: of the choice of updates and of the attack.
        done: rounds that a run which is continued has behind it.
        out: a file to append to.
        truth: the originals behind a reply, where the audit may know them (tests, public data).
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        attack: str | Attack,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        loss: str | Loss = "cross_entropy",
        defense: str | Defense = "none",
        public: Tensor | None = None,
        sample: int = 1,
        max_examples: int = 16,
        lr: float | None = None,
        seed: int = 0,
        done: int = 0,
        out: Path | None = None,
        truth: Callable[[Message], Batch | None] = lambda reply: None,
    ) -> None:
        super().__init__(grid)
        self._probe = Probe(attack, input_shape, num_classes, defense, public=public, loss=build_loss(loss))
        self._model, self._sample, self._max_examples, self._lr = model, sample, max_examples, lr
        self._seeds, self._out, self._truth = Seeds(seed), out, truth
        self.rows: list[Row] = []
        self._round = done

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Attack some of the round's updates."""
        self._round += 1
        asked = {message.metadata.dst_node_id: message for message in sent}
        good = sorted((r for r in replies if not r.has_error()), key=lambda r: int(r.metadata.src_node_id))
        chosen = self._seeds.numpy("audit", self._round).permutation(len(good))[: self._sample]
        for index in sorted(int(i) for i in chosen):
            reply = good[index]
            about = {"round": self._round, "node": reply.metadata.src_node_id}
            for row in self._attack(asked[reply.metadata.src_node_id], reply, index):
                self._log(about | row)

    def _attack(self, message: Message, reply: Message, index: int) -> list[Row]:
        try:
            before, after = params_of(arrays_of(message)[1]), params_of(arrays_of(reply)[1])
            check_reply(before, after)
            update = update_of(message, before, reply, after, self._lr)
            rng, truth = self._seeds("attack", self._round, index), self._truth(reply)
            if update.num_examples > self._max_examples:
                return self._sampled(before, update, truth, rng)
            return self._probe.run(self._model, before, update, rng, truth)
        except GradveilError as error:
            return [{"error": str(error)}]

    def _sampled(self, before: Params, update: Update, truth: Batch | None, rng: Generator) -> list[Row]:
        size = update.num_examples
        if truth is None or not truth.labelled or update.num_steps > 1 or (update.batch_size or size) < size:
            return [{"examples": size, "skipped": f"more than {self._max_examples} examples"}]
        order = torch.randperm(len(truth), generator=rng)[:SAMPLE]
        passes = [TrainingPass.of(copy.deepcopy(self._model).train(), before, truth, self._probe.loss)]
        chosen = Batch(truth.inputs[order], truth.labels[order])
        each = OthersKnown(self._model, passes, update).check(self._probe, chosen, rng, SECONDS)
        return [row | {"others-known": size - 1} for rows in each for row in rows]

    def _log(self, row: Row) -> None:
        self.rows.append(row)
        LOG.info("Audit: %s", row)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            append_line(self._out, json.dumps(row))


audited = AuditedGrid
