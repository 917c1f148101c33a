"""Secure aggregation for any strategy of Flower's Message API: a grid that gives it the sum of the updates only.

The protocol is Flower's own SecAgg+, a workflow of the older API; here it runs inside ``send_and_receive``.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import FitIns, FitRes, Parameters, parameters_to_ndarrays
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from gradveil.integrations.flower.grids import GridView
from gradveil.integrations.flower.records import (
    LOG,
    UNRELEASED,
    WITHHELD,
    arrays_of,
    is_training,
    number,
    params_of,
    record_of,
    withhold,
)
from gradveil.integrations.flower.secure_client import NoisySum, floating
from gradveil.integrations.flower.settings import MODULUS, Cohort
from gradveil.integrations.flower.statements import STATEMENT
from gradveil.protection.defense import Defense


class SecureGrid(GridView):
    """The grid with SecAgg+ in it: ``strategy.start(grid=secured(grid), ...)``; clients need ``secure_mod``.

    Every client that arrived answers the strategy with the same weights: those that the sum of all changes leads to.
    So a strategy gets the weighted mean, and none that looks at single updates makes sense here. Where too few
    arrived, nothing is unmasked, every reply is an error, and the strategy keeps its weights.

    Args:
        grid: the grid that the ServerApp was given.
        lost: the share of a round's clients that may drop out of it.
        reach: the largest change of one weight that is sent as it is; a larger one is cut to it.
        max_examples: the most examples that one client may have.
        defense: of the clients; with ``tier=aggregate`` it says ``lost`` and ``reach``.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        lost: float = 0.0,
        reach: float = 8.0,
        max_examples: int = 1000,
        defense: Defense | None = None,
    ) -> None:
        super().__init__(grid)
        self.lost, self.reach, self.max_examples = lost, reach, max_examples
        self.defense = defense
        self.released = True  # the last round's sum: too few may have arrived

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies; those for training go through the protocol."""
        out = list(messages)
        asked = {message.metadata.dst_node_id: message for message in out if is_training(message)}
        others = [message for message in out if not is_training(message)]
        replies = list(self._grid.send_and_receive(others, timeout=timeout)) if others or not asked else []
        return replies + (self._sum(asked, timeout) if asked else [])

    def _sum(self, asked: dict[int, Message], timeout: float | None) -> list[Message]:
        first, cohort, reach = next(iter(asked.values())), Cohort(len(asked), self.lost), self.reach
        if self.defense is not None and self.defense.min_clients:
            noise = NoisySum.of(self.defense)
            cohort, reach = noise.cohort, noise.reach(number(first, "lr", 1.0), self.max_examples)
        stages, protocol = Stages(self._grid), SecureSum(asked, cohort, reach, self.max_examples, timeout)
        protocol.run(stages)
        failed = {node: reason for node, reason in stages.failed.items() if node not in protocol.metrics}
        replies = [
            withhold(asked[node], reason) for node, reason in failed.items() if node in asked
        ]  # not the SuperLink
        self.released = protocol.mean is not None
        if protocol.mean is None:
            why = (
                f"{UNRELEASED}{len(stages.answered)} of {cohort.size} clients arrived, {cohort.min_clients} are needed."
            )
            LOG.warning("Secure sum %s", why)
            return replies + [withhold(asked[node], why) for node in stages.answered]
        key, record = arrays_of(first)
        before = params_of(record)
        after = dict(before)
        for name, change in zip(floating(before), protocol.mean, strict=True):
            after[name] = (before[name].double() - torch.from_numpy(change)).to(before[name].dtype)
        new = record_of(after)
        for node, metrics in protocol.metrics.items():
            said = metrics.pop(STATEMENT, None)
            content = RecordDict({key: new, "metrics": MetricRecord(metrics)})
            with suppress(TypeError, ValueError):  # what cannot be read was not said
                content[STATEMENT] = ConfigRecord(json.loads(str(said)))
            replies.append(Message(content, reply_to=asked[node]))
        return replies


secured = SecureGrid


class Stages(GridView):
    """Passes the protocol's messages on, and keeps who answered the last time, and why others failed."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.answered: list[int] = []
        self.failed: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies."""
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self.answered = [reply.metadata.src_node_id for reply in replies if not reply.has_error()]
        for reply in replies:
            if reply.has_error():
                self.failed[reply.metadata.src_node_id] = str(reply.error.reason).removeprefix(WITHHELD)
        return replies


@dataclass(frozen=True)
class Asked:
    """A client as the older API's workflow wants it."""

    node_id: int


class SecureSum(SecAggPlusWorkflow):  # type: ignore[misc]
    """One secure sum. To the workflow it is strategy and client manager as well.

    In a cohort of up to ``NEIGHBOURS`` every client shares its keys with every other one, and nobody unmasks before
    enough have arrived. In a larger one clients see their neighbours only, and the server counts.
    """

    def __init__(
        self, asked: dict[int, Message], cohort: Cohort, reach: float, max_examples: int, timeout: float | None
    ) -> None:
        super().__init__(
            1.0 if cohort.shares == cohort.size else cohort.shares,
            cohort.threshold / cohort.shares,
            max_weight=float(max_examples),
            clipping_range=float(reach),
            quantization_range=cohort.levels,
            modulus_range=MODULUS,
            timeout=timeout,
        )
        self._asked, self._fewest = asked, cohort.min_clients
        self.mean: list[Any] | None = None
        self.metrics: dict[int, dict[str, Any]] = {}

    def run(self, grid: Grid) -> None:
        """Run the protocol to its end, or as far as it gets."""
        state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})})
        state[MAIN_PARAMS_RECORD] = record_of({})
        self(grid, LegacyContext(Context(0, 0, {}, state, {}), strategy=self, client_manager=self))

    def num_available(self) -> int:
        """Return how many clients there are."""
        return len(self._asked)

    def configure_fit(self, *_: Any) -> list[tuple[Asked, FitIns]]:
        """Return whom to ask; what is asked is put in by ``setup_stage``."""
        return [(Asked(node), FitIns(Parameters([], ""), {})) for node in self._asked]

    def setup_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Collect the public keys; the training messages stay those of the strategy."""
        done = super().setup_stage(grid, context, state)
        state.nid_to_fitins = {node: RecordDict(dict(message.content)) for node, message in self._asked.items()}
        return bool(done)

    def share_keys_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Collect the shares of the keys; who has given none is left out, and nobody is asked for its keys."""
        done = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = set(state.active_node_ids)
        state.nid_to_neighbours = {n: state.nid_to_neighbours[n] & state.active_node_ids for n in state.active_node_ids}
        return bool(done)

    def collect_masked_vectors_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Collect the masked updates; too few are not unmasked."""
        done = super().collect_masked_vectors_stage(grid, context, state)
        return bool(done) and len(state.active_node_ids) >= self._fewest

    def aggregate_fit(
        self, number: int, results: list[tuple[Asked, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        """Keep the mean, weighted by the number of examples."""
        self.mean = parameters_to_ndarrays(results[0][1].parameters)
        self.metrics = {proxy.node_id: dict(result.metrics) for proxy, result in results}
        return None, {}
